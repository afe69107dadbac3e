"""A verb that runs until it is stopped: `ingot show config` of a recipe that is a pipe nobody
writes to. And ways to watch processes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.patience import PATIENCE_S


def blocking_argv(folder: Path) -> tuple[str, ...]:
    pipe = folder / "never.yaml"
    os.mkfifo(pipe)
    return ("show", "config", str(pipe))


def wait_until(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def waiting_on(argv: tuple[str, ...]) -> list[psutil.Process]:
    """The processes that run `argv` themselves, not those that start them and wait, and have come as
    far as opening the pipe.
    """
    command = ["-m", "ingot", *argv]
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if [word for word in (process.info["cmdline"] or [])[1:] if word != "-P"] == command
        and _in_open(process.pid)
    ]


def _in_open(pid: int) -> bool:
    """Whether the process sleeps in opening a pipe: then its signal handlers are in place."""
    try:
        return "fifo" in Path(f"/proc/{pid}/wchan").read_text(
            encoding="utf-8"
        ) or _asleep_and_loaded(pid)
    except OSError:
        return False


def _asleep_and_loaded(pid: int) -> bool:
    """Where the kernel hides what a process waits for: asleep, after the libraries of the recipe's
    loader were mapped.
    """
    maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")
    loaded = "_pydantic_core" in maps and "_yaml" in maps
    return loaded and psutil.Process(pid).status() == psutil.STATUS_SLEEPING


def start_script(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
