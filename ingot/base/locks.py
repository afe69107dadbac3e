"""The kernel's locks on open files, which end with the process that holds them, however it dies."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path

from ingot.base.errors import WrongInput

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP)


def lock_file(descriptor: int, path: str | os.PathLike[str], *, wait: bool) -> None:
    """Lock an open file for this process alone, until the descriptor is closed.

    Raises:
        BlockingIOError: another process holds it, and we are not to wait.
        WrongInput: its disk has no locks, without which two runs would write over each other.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        raise WrongInput(
            f"{os.fspath(path)} cannot be locked ({error.strerror}): its disk is mounted without"
            " locks; mount it with them (Lustre: the option `flock`; NFS: not `nolock`, and a lock"
            " daemon), or choose another `output`"
        ) from error


def hold(descriptor: int) -> None:
    """Lock what this process writes, until the descriptor is closed, for `is_held`. On a disk
    without locks nothing tells others that it is being written.
    """
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_held(path: Path) -> bool:
    """Whether a process holds a file or folder by `hold`, also one of another container; of another
    machine where the disk passes locks on: NFS does of files, and not of folders. What this user
    may not open counts as held.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False
