"""The server that worker processes are forked from: not this process, since a fork copies the locks
of libraries' threads, but not the threads.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from multiprocessing import forkserver

from ingot.base.errors import Failed
from ingot.base.processes import without_main_module

LONGEST_FOLDER = 70
"""Bytes of the path of a folder in which a socket still gets a name: some systems allow 103."""
SHORT_FOLDER = "/tmp"


def start_fork_server(*preload: str) -> None:
    """Start the server, with modules that the workers will need, unless it runs.

    Raises:
        Failed: it gets no socket, or no process.
    """
    if preload:
        multiprocessing.get_context("forkserver").set_forkserver_preload(list(preload))
    with _folder_for_sockets(), without_main_module():
        try:
            forkserver.ensure_running()
        except OSError as error:
            raise Failed(
                "worker processes cannot be started, with a socket in"
                f" {tempfile.gettempdir()}: {error.strerror or error}; export TMPDIR=FOLDER, one"
                " with a short path that can be written"
            ) from error


@contextlib.contextmanager
def _folder_for_sockets() -> Iterator[None]:
    """multiprocessing takes TMPDIR also if its path is too long for the name of a socket."""
    chosen = tempfile.tempdir
    if len(os.fsencode(tempfile.gettempdir())) > LONGEST_FOLDER:
        tempfile.tempdir = SHORT_FOLDER
    try:
        yield
    finally:
        tempfile.tempdir = chosen
