"""A process that has many files open, as one that reads many parts of columns."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator

import pytest

FILES = 1100
"""More than select() can tell apart."""


@contextlib.contextmanager
def many_open_files() -> Iterator[None]:
    """So many that whatever is opened meanwhile has a descriptor above 1,023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * FILES
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"no process may have more than {hard} files open here")
    with contextlib.ExitStack() as opened:
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(FILES):
            opened.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        yield
