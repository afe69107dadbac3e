"""Where the server of worker processes cannot have its socket, that is said."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from tests.house.source import PROJECT

START = "from ingot.base.forkserver import start_fork_server; start_fork_server()"


@pytest.mark.skipif(shutil.which("unshare") is None, reason="Linux mounts for one process alone")
def test_a_temporary_folder_without_room_is_named() -> None:
    """A real one: a disk of two files, of which one is the folder of the socket."""
    mount = 'mount -t tmpfs -o nr_inodes=2 tmpfs /mnt && echo mounted && exec "$0" -c "$1"'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", mount, sys.executable, START],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(PROJECT), "TMPDIR": "/mnt"},
        check=False,
    )
    if "mounted" not in done.stdout:
        pytest.skip("mounting a small disk needs root")
    told = done.stderr.splitlines()[-1]
    assert "cannot be started, with a socket in /mnt: No space left on device" in told
    assert "export TMPDIR=FOLDER" in told
