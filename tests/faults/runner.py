"""Plants faults one at a time in a copy of the tree and runs the tests that may catch them.

The process that runs this has imported what all tests need of other people's libraries; each run of
pytest is forked from it and imports ingot and the tests from the copy.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.faults.fault import Fault
from tests.graph import PROJECT, files, is_test, seers
from tests.session import UNKNOWN_S, known_times

THEIRS = (
    "pytest",
    "hypothesis",
    "numpy",
    "pyarrow",
    "pyarrow.compute",
    "pydantic",
    "torch",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.nn.parallel",
    "safetensors.torch",
    "tokenizers",
    "transformers",
    "httpx",
    "typer",
    "fastapi",
    "uvicorn",
)
TREE = ("ingot", "tests", "benchmarks", "examples", "recipes", "images", "docs", ".ci")
PASSED, FAILED, NONE = 0, 1, 5
STAGES = (1, 3, 8)
"""How many test files are run at a time, the likeliest first; then the others that see the file,
then all.
"""
SHALLOW = "not by the likeliest"
_mtimes = iter(range(10**9))


@dataclass
class Result:
    """How one fault ended: `caught`, `survived` all tests, `limit` where the time was over before, or
    `not by the likeliest`, the only ones that were run so far.
    """

    id: str
    file: str
    about: str
    key: str
    outcome: str = "survived"
    by: str = ""
    seconds: float = 0.0
    tests: int = 0
    flaky: list[str] = field(default_factory=list)


def key_of(fault: Fault) -> str:
    return repr((fault.file, fault.old, fault.new))


def likely(fault: Fault) -> list[str]:
    """The test files that see the fault's file, the likeliest to catch it first."""
    times, far = known_times(), seers(fault.file)
    room = fault.file.split("/")[1]
    stem = Path(fault.file).stem
    mirror = f"tests/{str(Path(fault.file).parent).removeprefix('ingot/')}/test_{stem}.py"

    def rank(path: str) -> tuple[bool, bool, bool, bool, int, float]:
        return (
            path != fault.by,
            path != mirror,
            stem not in Path(path).stem,
            not path.startswith(f"tests/{room}/"),
            far.get(path, 99),
            times.get(path, UNKNOWN_S),
        )

    return sorted({*far, *([fault.by] if fault.by in files() else [])}, key=rank)


class Copy:
    """A copy of the tree, in which one file at a time differs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in TREE:
            if (PROJECT / name).is_dir():
                shutil.copytree(
                    PROJECT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__")
                )
        for path in PROJECT.iterdir():
            if path.is_file() and path.name != ".git":
                shutil.copy(path, folder / path.name)
        self._known_good: dict[str, bool] = {}

    @contextlib.contextmanager
    def planted(self, fault: Fault) -> Iterator[None]:
        path = self.folder / fault.file
        text = path.read_text(encoding="utf-8")
        assert text.count(fault.old) == 1, f"{fault.id}: its text stands not once in {fault.file}"
        try:
            _write(path, text.replace(fault.old, fault.new))
            yield
        finally:
            _write(path, text)

    def is_good(self, test: str, limit_s: float) -> bool:
        """Whether a test passes without any fault."""
        if test not in self._known_good:
            self._known_good[test] = self.run([test], limit_s)[0] == PASSED
        return self._known_good[test]

    def run(
        self, tests: Sequence[str], limit_s: float, without: Sequence[str] = ()
    ) -> tuple[int | None, str]:
        """(exit code of pytest, or None at the limit; the first test that failed)."""
        told = self.folder / ".first-failure"
        told.unlink(missing_ok=True)
        pid = os.fork()
        if pid == 0:
            _be_pytest(self.folder, tests, told, without)
        code = _wait(pid, limit_s)
        return code, told.read_text(encoding="utf-8") if told.exists() else ""


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    # Bytecode is known by a time in whole seconds and a size: neither need differ.
    stamp = 1_500_000_000 + next(_mtimes)
    os.utime(path, (stamp, stamp))


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)


def _wait(pid: int, limit_s: float) -> int | None:
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            _end_group(pid)
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    _end_group(pid)
    os.waitpid(pid, 0)
    return None


def _end_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


class _First:
    """A plugin of pytest that writes down the first test that failed."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self) -> None:
        """A failure need not be made small, which takes minutes."""
        hypothesis = importlib.import_module("hypothesis")
        phases = set(hypothesis.Phase) - {hypothesis.Phase.shrink, hypothesis.Phase.explain}
        hypothesis.settings.register_profile("faults", deadline=None, phases=phases)
        hypothesis.settings.load_profile("faults")

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self._path.exists():
            self._path.write_text(report.nodeid, encoding="utf-8")

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and not self._path.exists():
            self._path.write_text(f"{report.nodeid} (collecting)", encoding="utf-8")


def _be_pytest(folder: Path, tests: Sequence[str], told: Path, without: Sequence[str]) -> None:
    """Never returns."""
    os.setsid()
    _die_with_parent()
    os.chdir(folder)
    for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "ingot")]:
        del sys.modules[name]
    sys.path[:] = [str(folder), *(path for path in sys.path if path not in ("", str(PROJECT)))]
    sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in repr(finder)]
    os.environ.update(PYTHONPATH=str(folder), OMP_NUM_THREADS="1")
    os.environ["TEST_PATIENCE_S"] = "60"  # many faults are caught by what never comes
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    with (folder / ".pytest.log").open("ab") as log, Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    deselected = [word for test in without for word in ("--deselect", test)]
    code = 3
    try:
        arguments = [
            "-x",
            "-q",
            "-m",
            "not slow or drawn",
            "-p",
            "no:cacheprovider",
            *deselected,
            *tests,
        ]
        code = int(pytest.main(arguments, plugins=[_First(told)]))
    finally:
        os._exit(code)


def try_fault(copy: Copy, fault: Fault, limit_s: float, *, deep: bool) -> Result:
    """Run the likeliest tests, and where `deep` all that there are."""
    result = Result(fault.id, fault.file, fault.about, key_of(fault))
    began = time.monotonic()
    waiting = likely(fault)
    everything = [path for path in files() if is_test(path) and path not in waiting]
    stages = [*STAGES, *((len(waiting), len(everything)) if deep else ())]
    waiting += everything
    while waiting and stages:
        size = stages.pop(0)
        tests, waiting = waiting[:size], waiting[size:]
        while tests:
            left = limit_s - (time.monotonic() - began)
            if left <= 0:
                result.outcome = "limit"
                break
            with copy.planted(fault):
                code, first = copy.run(tests, left, result.flaky)
            result.seconds = round(time.monotonic() - began, 1)
            if code is None:
                result.outcome = "limit"
                break
            if code in (PASSED, NONE):
                result.tests += len(tests)
                break
            if copy.is_good(first.removesuffix(" (collecting)"), limit_s):
                result.outcome, result.by = "caught", first
                break
            result.flaky.append(first)  # fails without the fault, too
            if first.endswith("(collecting)"):
                tests = [test for test in tests if not first.startswith(test)]
        if result.outcome != "survived":
            break
    if result.outcome == "survived" and not deep:
        result.outcome = SHALLOW
    result.seconds = round(time.monotonic() - began, 1)
    return result


def run_all(
    faults: Sequence[Fault],
    jobs: int,
    limit_s: float,
    deep: bool,
    done: Callable[[Result], None],
) -> None:
    """Try all faults in `jobs` processes; `done` is called in them."""
    for name in THEIRS:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    sys.modules["torch"].set_num_threads(1)
    workers = []
    for number in range(jobs):
        pid = os.fork()
        if pid == 0:
            _die_with_parent()
            with tempfile.TemporaryDirectory(prefix="faults-") as folder:
                copy = Copy(Path(folder))
                for fault in faults[number::jobs]:
                    done(try_fault(copy, fault, limit_s, deep=deep))
            os._exit(0)
        workers.append(pid)
    for pid in workers:
        os.waitpid(pid, 0)


def read_results(path: Path) -> dict[str, Result]:
    """The last result of each fault."""
    if not path.exists():
        return {}
    lines = path.read_text(encoding="utf-8").splitlines()
    return {found["id"]: Result(**found) for found in map(json.loads, lines)}
