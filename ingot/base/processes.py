"""Child processes that do not outlive their parent, and whether a process is still the one that was
started.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from ingot.base.errors import WrongInput

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int, signum: int = signal.SIGKILL) -> None:
    """Ask the kernel to send `signum` to this process when `parent` (its parent's id) dies, however
    it dies.

    Call it in the child, first thing. Linux only; elsewhere nothing happens, and a parent that is
    killed with -9 leaves its children behind.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signum))
    if os.getppid() != parent:
        # The parent died before the kernel was asked.
        os.kill(os.getpid(), signum)


def handles_signal(process: int, number: int) -> bool:
    """Whether a process has a handler for a signal; False where the kernel does not tell."""
    with contextlib.suppress(OSError, ValueError):
        masks = dict(
            line.split(":", 1)
            for line in (
                Path(f"/proc/{process}/status")
                .read_text(encoding="ascii", errors="replace")
                .splitlines()
            )
            if ":" in line
        )
        return bool(int(masks.get("SigCgt", "0"), 16) >> (number - 1) & 1)
    return False


def preexec_die_with_parent(signum: int = signal.SIGKILL) -> Callable[[], None]:
    """`preexec_fn` for a child of this process: it gets `signum` when this process dies.

    The kernel means the thread that starts the child, so start it from one that lives as long as
    the process.
    """
    parent = os.getpid()
    return lambda: die_with_parent(parent, signum)


def started_at(pid: int) -> float | None:
    """When process `pid` was started (seconds since the epoch); None when it is gone. Tells a
    reused id from the old one.
    """
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else float(process.create_time())
    except psutil.NoSuchProcess:
        return None


def machine_id() -> str | None:
    """Tells where a process id means the same process: this boot of this machine, and the set of
    ids of this container.
    """
    with contextlib.suppress(OSError):
        return (
            f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
            f" {os.stat('/proc/self/ns/pid').st_ino}"
        )
    return None


def start_ticks(pid: int) -> str | None:
    """When a process was started, in ticks since the boot, which no clock that is set changes:
    tells a reused id from the old one. None where it is dead, or nobody can say.
    """
    if sys.platform != "linux":
        return None if (began := started_at(pid)) is None else str(began)
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in ("Z", "X") else fields[18]


@contextlib.contextmanager
def without_main_module() -> Iterator[None]:
    """Processes are started without the caller's script, which they would import once more: all
    that it imports, and all that it does.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def python_with_module(python: str | None, module: str) -> str:
    """The interpreter to use. Raises WrongInput where it cannot be run or lacks the module."""
    chosen = python or sys.executable
    try:
        code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
        found = subprocess.run(
            [chosen, "-c", code],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=120,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise WrongInput(
            f"serve.python {chosen} cannot be run"
            f" ({getattr(error, 'strerror', None) or 'no answer'}); give the interpreter of an"
            f" environment that has {module}"
        ) from None
    if found.returncode:
        raise WrongInput(
            f"there is no {module} in the environment of {chosen}; set serve.python to the"
            " interpreter of one that has it"
        )
    return chosen
