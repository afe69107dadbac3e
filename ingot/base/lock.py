"""One run, one writer: a lock on the run folder that the kernel frees when its holder dies, however it dies."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from ingot.base.errors import Failed


@contextlib.contextmanager
def folder_lock(folder: Path, name: str = "lock") -> Iterator[None]:
    """Hold `folder/.name` exclusively; refuse at once when another process holds it.

    Raises:
        Failed: names the process that holds the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f".{name}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 64, 0).decode(errors="replace").strip() or "unknown"
            raise Failed(
                f"{folder} is in use by process {holder}; wait for it, stop it, or choose another `name`"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)
