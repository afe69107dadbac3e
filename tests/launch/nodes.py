"""A small training that several nodes share, as a person launches it; what it must come to is what
as many processes on one machine come to.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock

from ingot.base.runlog import read_lines
from ingot.config.load import dump_recipe
from ingot.config.recipe import Recipe
from ingot.launch.node.ranks import free_port
from tests import forks
from tests.launch.blocking import wait_until
from tests.patience import PATIENCE_S
from tests.small import copy_of, small_recipe

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
KNOBS: dict[str, Any] = {"train__steps": 30, "checkpoint__every": 5, "checkpoint__keep": 100}
ENDLESS: dict[str, Any] = {"train__steps": 100_000, "checkpoint__every": 20, "checkpoint__keep": 2}
"""For tests that stop it."""


def recipe_for(root: Path, **knobs: Any) -> Recipe:
    """The training of `root`, with knobs of its place."""
    return small_recipe(
        root, **{**KNOBS, "launch__environment": ENVIRONMENT, "launch__port": free_port(), **knobs}
    )


def written(root: Path, recipe: Recipe) -> Path:
    path = root / "recipe.yaml"
    path.write_text(dump_recipe(recipe), encoding="utf-8")
    return path


def ingot(*arguments: object, cwd: Path, **variables: str) -> forks.Process:
    """`ingot ARGUMENTS` in a folder, as a person types it."""
    return forks.start(
        map(str, arguments),
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def ended(process: forks.Process, seconds: float = PATIENCE_S) -> tuple[int, str, str]:
    """Exit code, standard output and messages."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        out, err = process.communicate(timeout=PATIENCE_S)
        raise AssertionError(f"still running after {seconds} s; it said:\n{err}\n{out}") from None
    return process.returncode, out, err


def until_it_says(process: forks.Process, text: str, seconds: float = PATIENCE_S) -> str:
    """Wait for words among a command's messages; what it said up to then, which `ended` leaves
    out.
    """
    assert process.stderr is not None
    poll = select.poll()  # `select` takes no descriptor above 1023
    poll.register(process.stderr, select.POLLIN)
    said, until = b"", time.monotonic() + seconds
    while text.encode() not in said:
        ready = poll.poll(max(0.0, until - time.monotonic()) * 1000)
        new = os.read(process.stderr.fileno(), 1 << 16) if ready else b""
        assert new, f"it never said {text!r}, but:\n{said.decode()}"
        said += new
    return said.decode()


def reference(prepared_root: Path, place: Path) -> dict[str, str]:
    """The weights that two processes of this machine come to, trained once for all workers of a
    test session; `place` is this one's base folder.
    """
    place = place.parent if "PYTEST_XDIST_WORKER" in os.environ else place
    with FileLock(place / "reference.lock"):
        kept = place / "reference.json"
        if not kept.exists():
            root = copy_of(prepared_root, place / "reference")
            code, _, said = ended(
                ingot(
                    "train",
                    written(root, small_recipe(root, **KNOBS, launch__processes=2)),
                    cwd=root,
                )
            )
            assert code == 0, said
            kept.write_text(json.dumps(weights(root)))
        return dict(json.loads(kept.read_text()))


def weights(root: Path) -> dict[str, str]:
    """What the training came to: the exported weights, by their bytes."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted((root / "runs" / "small" / "model").glob("*.safetensors"))
    }


def events(recipe: Recipe, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_lines(recipe.folder.events) if event["kind"] == kind]


def steps(recipe: Recipe) -> list[int]:
    """The steps with a committed checkpoint. A listing misses what took the place of the only one
    while it was read, so it is looked at twice.
    """
    found = {
        int(path.parent.name[5:])
        for _ in range(2)
        for path in recipe.folder.checkpoints.glob("step-*/COMMIT.json")
    }
    return sorted(found)


def ranks_of(root: Path) -> list[psutil.Process]:
    """Processes that train in `root`, whoever started them: nodes and ranks."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        line = process.info["cmdline"] or []
        if (
            _is_in(root, process, line)
            and ("ingot.launch.node" in line or _is_rank(process))
            and process.info["status"] != psutil.STATUS_ZOMBIE
        ):
            found.append(process)
    return found


def _is_in(root: Path, process: psutil.Process, line: list[str]) -> bool:
    """Nodes are given paths as they see them, from their working folder on."""
    if any(str(root) in part for part in line):
        return True
    try:
        return any(part.startswith("runs/") for part in line) and process.cwd() == str(root)
    except psutil.Error:
        return False


def _is_rank(process: psutil.Process) -> bool:
    try:
        return "LOCAL_RANK" in process.environ()
    except psutil.Error:
        return False


def only_ranks(root: Path) -> dict[int, psutil.Process]:
    """The ranks by their numbers."""
    found = {}
    for process in ranks_of(root):
        with contextlib.suppress(psutil.Error, KeyError):  # ended meanwhile, or a node
            found[int(process.environ()["RANK"])] = process
    return found


def end_all(root: Path) -> None:
    """What a test that failed has left behind; also what it had suspended."""
    for process in ranks_of(root):
        with contextlib.suppress(psutil.Error):
            process.kill()


def wait_for(
    process: forks.Process, condition: Callable[[], bool], seconds: float = PATIENCE_S
) -> None:
    """Wait for a condition while a command runs."""
    try:
        wait_until(lambda: condition() or process.poll() is not None, seconds)
        assert condition(), "the command ended before"
    except AssertionError:
        process.kill()
        out, err = process.communicate(timeout=PATIENCE_S)
        raise AssertionError(f"waited in vain; it said:\n{err}\n{out}") from None
