"""Work done as a user without rights: no permission stops root, as which tests often run."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

NOBODY = 65534


@contextlib.contextmanager
def open_folder() -> Iterator[Path]:
    """A folder that all users may enter: what pytest makes, only its owner may."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        folder.chmod(0o755)
        yield folder


def as_nobody(work: Callable[..., None], *arguments: object) -> None:
    """Call `work` in a process of its own, as nobody if this one is root's; it must not fail."""

    def call() -> None:
        if os.getuid() == 0:
            os.setuid(NOBODY)
        work(*arguments)

    process = multiprocessing.get_context("fork").Process(target=call)
    process.start()
    process.join()
    assert process.exitcode == 0
