"""How many files this process may have open at once."""

from __future__ import annotations

import contextlib
import errno
import resource

WANTED = 2**16
"""A container's hard limit may be a billion, and programs that close every possible descriptor
before they start another one would take minutes.
"""
ADVICE = {
    errno.EMFILE: "this process has too many files open; raise `ulimit -n`",
    errno.ENFILE: "this machine has too many files open; raise `sysctl fs.file-max`",
    errno.ENOMEM: (
        "the system has no memory for it, or this process has mapped too many files; raise"
        " `sysctl vm.max_map_count`"
    ),
}
"""What to do about errors that say nothing about the file that was to be opened."""


def raise_open_file_limit() -> None:
    """Allow this process, and all that it starts, as many open files as its hard limit does, at
    most `WANTED`: the usual soft limit of 1,024 is there for programs that call select().
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def open_file_limit() -> int:
    """How many files this process may have open, at most `WANTED`."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return WANTED if soft == resource.RLIM_INFINITY else min(WANTED, soft)
