"""One writer per run: a lock on the run folder, which the kernel releases however its
holder dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from ingot.base.errors import Failed
from ingot.base.storage import disk_errors


@contextlib.contextmanager
def folder_lock(folder: Path, name: str = "lock") -> Iterator[None]:
    """Hold `folder/.name` exclusively; refuse at once if another process holds it.

    Raises:
        Failed: names the process that holds the lock.
    """
    path = folder / f".{name}"
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 64, 0).decode(errors="replace").strip() or "unknown"
            raise Failed(
                f"{folder} is in use by process {holder}; wait for it, stop it, or choose another"
                " `name`"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def shared_lock(folder: Path, name: str, when_alone: Callable[[], None]) -> Iterator[None]:
    """Hold `folder/.name` together with any number of other processes.

    If no other process holds it, `when_alone` is called first, and no other process enters until it
    returns: whatever it finds was left by dead processes. It is never called on a disk without
    locks.
    """
    with disk_errors(folder):
        descriptor = os.open(folder / f".{name}", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            when_alone()
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


def lock_holder(folder: Path, name: str = "lock") -> int | None:
    """The process that holds `folder/.name`, or None. Read-only, so it never keeps a run from
    starting.

    Reads the kernel's table of locks; without one (not Linux), a live process with the recorded id
    counts as the holder.
    """
    path = folder / f".{name}"
    try:
        process, inode = int(path.read_text()), path.stat().st_ino
        os.kill(process, 0)
    except (OSError, ValueError, OverflowError):
        return None
    table = Path("/proc/locks")
    if not table.exists():
        return process
    held = any(f":{inode}" in line and " FLOCK " in line for line in table.read_text().splitlines())
    return process if held else None
