"""What the fork server starts is as a new interpreter would be: everything else is proved on it."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from execnet.gateway_io import popen_args
from execnet.xspec import XSpec

from ingot.base.processes import preexec_die_with_parent
from ingot.plan.tracing.workers import Tracer
from ingot.verify.resume import run_ingot
from tests import adopted
from tests.cli.commands import ingot, ingot_afresh, start_ingot
from tests.forks import can_fork, start_call
from tests.launch.blocking import wait_until
from tests.patience import PATIENCE_S
from tests.ranks import run_ranks


@pytest.mark.parametrize(
    "arguments", [("--version",), ("explain", "train.steps"), ("train", "missing.yaml"), ("bogus",)]
)
def test_a_command_ends_as_in_a_new_interpreter(arguments: tuple[str, ...], tmp_path: Path) -> None:
    ours, real = (run(*arguments, cwd=tmp_path) for run in (ingot, ingot_afresh))
    assert (ours.returncode, ours.stdout, ours.stderr) == (
        real.returncode,
        real.stdout,
        real.stderr,
    )


def test_it_has_its_own_environment_and_folder(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("name: here\ndata:\n  train: [{source: text}]\n")
    plain = ingot("show", "config", "r.yaml", cwd=tmp_path)
    seeded = ingot("show", "config", "r.yaml", cwd=tmp_path, INGOT_SEED="12345")
    assert "12345" in seeded.stdout
    assert plain.stdout
    assert "12345" not in plain.stdout


def test_pipes_signals_and_exit_codes(tmp_path: Path) -> None:
    process = start_ingot("show", "knobs", stdout=subprocess.PIPE, cwd=tmp_path)
    out, _ = process.communicate(60)
    assert process.returncode == 0
    assert "train.steps" in out
    asleep = start_call(_sleep)
    time.sleep(0.1)
    asleep.send_signal(signal.SIGKILL)
    assert asleep.wait(30) == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        os.kill(asleep.pid, 0)


PROBE = """
import os, signal, sys, time
print(os.environ.get("KEPT_BACK"), os.environ["GIVEN"], "torch" in sys.modules)
print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, os.getpgid(0) == os.getpid())
print([n for n in os.listdir("/proc/self/fd") if "probe" in os.path.realpath(f"/proc/self/fd/{n}")])
sys.stdout.flush()
time.sleep(float(sys.argv[1]))
sys.exit("the end")
"""


def _start_probe(folder: str, seconds: float) -> bytes:
    """In a forked process that has handlers, open files and variables which no child may have."""
    os.environ["KEPT_BACK"] = "1"
    signal.signal(signal.SIGTERM, lambda *_: None)
    Path(folder, "probe.py").write_text(PROBE)
    sys.modules["ingot"].__path__.append(folder)
    with Path(folder, "probe.py").open():
        child = subprocess.Popen(
            [sys.executable, "-m", "ingot.probe", str(seconds)],
            env={**os.environ, "GIVEN": "2", "KEPT_BACK": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
            preexec_fn=preexec_die_with_parent(),
            text=True,
        )
    Path(folder, "pid").write_text(str(child.pid))
    said = child.communicate()
    return pickle.dumps((child.returncode, *said))


def test_what_a_command_starts_is_a_process_of_its_own(tmp_path: Path) -> None:
    """Forked too, with nothing of what started it but the arguments of subprocess."""
    process = start_call(_start_probe, str(tmp_path), 0.0)
    assert process.wait(60) == 0
    assert pickle.loads(process.result()) == (1, " 2 True\nTrue True\n[]\n", "the end\n")


def test_what_a_killed_command_started_dies_with_it(tmp_path: Path) -> None:
    process = start_call(_start_probe, str(tmp_path), 600.0)
    pid = tmp_path / "pid"
    wait_until(lambda: pid.exists() and bool(pid.read_text()), 60)
    child = psutil.Process(int(pid.read_text()))
    assert child.ppid() == process.pid
    process.kill()
    wait_until(lambda: not child.is_running())


def _by_multiprocessing(deeper: bool) -> bytes:
    """Of a process that multiprocessing forks, and of one that it forks in turn: how they began."""
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        if deeper:
            return pool.apply(_began) + pool.apply(_by_multiprocessing, (False,))
        return pool.apply(_began)


def _began() -> bytes:
    multiprocessing.current_process()._config["daemon"] = False  # it may have children
    return Path("/proc/self/cmdline").read_bytes()


def test_what_multiprocessing_forks_is_forked_from_the_server() -> None:
    """In pytest's own process, in a forked one and in one of multiprocessing's."""
    process = start_call(_by_multiprocessing, True)
    assert process.wait(60) == 0
    for began in (_by_multiprocessing(True), process.result()):
        assert began.count(b"tests.forkserver") == 2, began
        assert began.split(b"\0").count(b"-c") == 0, began


WORKER = """
import subprocess, sys
import __main__
from tests import forks
command = forks.start(["bogus"], stderr=subprocess.DEVNULL)
print(command.wait(60), vars(sys.modules["ingot.models.device"])["PEAK_SIZE"])
print(sys.argv, __main__.__spec__, sys.stdin.readline().strip())
sys.exit(3)
"""


def test_a_worker_of_the_run_is_forked_and_has_a_server_of_its_own() -> None:
    """Known by what execnet starts; a process that nobody knows would be an interpreter as ever."""
    args = popen_args(XSpec("popen"))
    with subprocess.Popen(
        args, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as worker:
        began = Path(f"/proc/{worker.pid}/cmdline").read_bytes()
        assert worker.stdin is not None
        assert worker.stdout is not None
        worker.stdin.write(f"{WORKER!r}\n")
        said = [worker.stdout.readline()]
        worker.stdin.write("told\n")
        said.append(worker.stdout.readline())
        assert worker.wait(60) == 3
    assert b"tests.forkserver" in began
    assert said == ["2 {'cpu': 1024}\n", "['-c'] None told\n"]


def test_an_environment_that_libraries_have_read_needs_a_new_interpreter() -> None:
    assert can_fork({**os.environ, "WHATEVER": "1"})
    assert not can_fork({**os.environ, "PYTHONHASHSEED": "7"})


def test_a_rank_that_fails_is_told_at_once() -> None:
    before = time.monotonic()
    with pytest.raises(AssertionError, match=r"rank 1 of 2 failed:\n[^$]*ValueError: mine"):
        run_ranks(2, _fail_on_one)
    assert time.monotonic() - before < 30


def _sleep() -> None:
    time.sleep(60)


def _fail_on_one() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("mine")
    time.sleep(60)


def test_what_the_program_starts_here_is_a_forked_child_of_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forked: list[int] = []
    original = adopted.start_child

    def start_child(*arguments: Any, **more: Any) -> int:
        forked.append(original(*arguments, **more))
        return forked[-1]

    monkeypatch.setattr(adopted, "start_child", start_child)
    process = Tracer._start()
    assert forked == [process.pid]
    assert psutil.Process(process.pid).ppid() == os.getpid()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == -signal.SIGTERM
    code, said = run_ingot(["show", "nothing"])
    assert (code, len(forked)) == (2, 2), said
    monkeypatch.setenv("HF_HOME", "/nowhere")  # a library has read it
    assert (run_ingot(["show", "nothing"]), len(forked)) == ((code, said), 2)
