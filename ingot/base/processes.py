"""Child processes that do not outlive their parent, and recognising a process whose id was
reused.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import signal
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

from ingot.base.errors import WrongInput

_PR_SET_PDEATHSIG = 1
BOOT = Path("/proc/sys/kernel/random/boot_id")


def die_with_parent(parent: int, signum: int = signal.SIGKILL) -> None:
    """Ask the kernel to send `signum` to this process when `parent` (its parent's id) dies, for
    whatever reason.

    Call it first thing in the child. Linux only; elsewhere it does nothing, and a parent killed
    with SIGKILL leaves its children behind.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signum))
    if os.getppid() != parent:
        # The parent died before the request took effect.
        os.kill(os.getpid(), signum)


def hear_of_children() -> None:
    """Let this process, which starts others, hear how they end. It may have inherited that SIGCHLD
    is ignored: the kernel then tells of no child how it ended, and Python that it ended well.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def handles_signal(process: int, number: int) -> bool:
    """Whether a process has a handler for a signal; False if the kernel does not say."""
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
    """`preexec_fn` for a child of this process that must get `signum` when this process dies.

    To the kernel, the parent is the thread that starts the child: start it from a thread that lives
    as long as the process.
    """
    parent = os.getpid()
    return lambda: die_with_parent(parent, signum)


def started_at(pid: int) -> float | None:
    """When process `pid` was started (seconds since the epoch); None if it is gone. Distinguishes a
    reused id from the original.
    """
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else float(process.create_time())
    except psutil.NoSuchProcess:
        return None


def descends_from(pid: int) -> bool:
    """Whether process `pid` is this one, or started it, directly or through others."""
    import psutil

    return pid in (os.getpid(), *(parent.pid for parent in psutil.Process().parents()))


def machine_id() -> str | None:
    """Identifies the scope in which a process id is meaningful: this boot of this machine, and this
    container's PID namespace.
    """
    with contextlib.suppress(OSError):
        return f"{BOOT.read_text().strip()} {os.stat('/proc/self/ns/pid').st_ino}"
    return _boot_session()


@functools.cache
def process_scope() -> str:
    """`machine_id` as eight hexadecimal digits, for names of files."""
    return hashlib.sha256((machine_id() or "").encode()).hexdigest()[:8]


@functools.cache
def _boot_session() -> str | None:
    """What macOS calls this boot; None where there is no such name."""
    try:
        said = subprocess.check_output(
            ["sysctl", "-n", "kern.bootsessionuuid"], stderr=subprocess.DEVNULL, text=True
        )
        return said.strip() or None
    except (OSError, subprocess.CalledProcessError):
        return None


def is_alive(process: int) -> bool:
    """Whether there is a process with that id, of whatever user."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def start_ticks(pid: int) -> str | None:
    """When a process was started, as the kernel noted it, on Linux in clock ticks since boot:
    changing the clock does not affect it. Distinguishes a reused id from the original. None if it
    is dead or unknown.
    """
    if sys.platform != "linux":
        return start_by_ps(pid)
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in ("Z", "X") else fields[18]


def start_by_ps(pid: int) -> str | None:
    """When a process was started where there is no /proc. psutil would change it with the clock."""
    asked = ["ps", "-o", "stat=", "-o", "lstart=", "-p", str(pid)]
    try:
        said = subprocess.check_output(
            asked,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "LC_ALL": "C", "TZ": "UTC"},
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    state, _, began = said.strip().partition(" ")
    return None if state.startswith("Z") else began.strip() or None


@contextlib.contextmanager
def without_main_module() -> Iterator[None]:
    """Inside the block, new processes do not import the caller's main script, which would run its
    imports and side effects again.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def own_python(python: str | None = None) -> list[str]:
    """What begins a command that runs a module of ours: an interpreter, this one if none is given;
    `-m` follows.

    Python then looks for all modules in the working directory first, where somebody's `random.py`
    would take the place of its own, or a `datasets.py` that of the library. So it is told not to,
    unless this process finds modules there too, as one of a checkout that is not installed does.
    """
    return [python or sys.executable, *(["-P"] if safe_path() else [])]


def safe_path() -> dict[str, str]:
    """The variable that tells an interpreter what `own_python` does. One of another environment may
    be older than 3.11: it passes over the variable, and knows no `-P`.
    """
    finds_here = {"", os.getcwd()} & {*sys.path}
    return {} if finds_here else {"PYTHONSAFEPATH": "1"}


def python_with_module(python: str | None, module: str) -> str:
    """The interpreter to use. Raises WrongInput if it cannot be run or lacks the module."""
    chosen = python or sys.executable
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    if run_python(chosen, code, module).returncode:
        raise WrongInput(
            f"there is no {module} in the environment of {chosen}; set serve.python to the"
            " interpreter of one that has it"
        )
    return chosen


def run_python(python: str, code: str, module: str) -> subprocess.CompletedProcess[str]:
    """What an interpreter whose environment should have `module` answers to `code`. Raises
    WrongInput if it cannot be run.
    """
    try:
        return subprocess.run(
            [python, "-c", code],
            env={**os.environ, **safe_path()},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise WrongInput(
            f"serve.python {python} cannot be run"
            f" ({getattr(error, 'strerror', None) or 'no answer'}); give the interpreter of an"
            f" environment that has {module}"
        ) from None
