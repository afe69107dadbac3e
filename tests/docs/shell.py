"""A shell in which `ingot` is forked from the tests' server (tests/forks.py), so that a page's
commands run as they are written without starting torch for each.

The program `ingot` on the shell's path hands its arguments, environment and streams to this process
by a socket, passes signals on, and ends as the forked command does.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests import forks
from tests.cli.commands import clean_environment

PROGRAM = """\
#!{python} -SEs
import json, os, signal, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
socket.send_fds(server, [b"?"], [0, 1, 2])
given = {{"arguments": sys.argv[1:], "cwd": os.getcwd(), "environment": dict(os.environ)}}
server.sendall(json.dumps(given).encode() + b"\\n")
answers = server.makefile()
command = int(answers.readline())
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: os.kill(command, number))
code = int(answers.readline())
sys.exit(code if code >= 0 else 128 - code)
"""


@contextlib.contextmanager
def program(folder: Path) -> Iterator[Path]:
    """A folder for the path with `ingot` in it, while the context lasts; what was started by it and
    left running is ended then.
    """
    folder.mkdir()
    address = folder / "socket"
    (folder / "ingot").write_text(PROGRAM.format(python=sys.executable, address=str(address)))
    (folder / "ingot").chmod(0o755)
    started: list[forks.Process] = []
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(address))
        listening.listen(16)
        threading.Thread(target=_accept, args=(listening, started), daemon=True).start()
        try:
            yield folder
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            for process in started:
                if process.returncode is None:
                    os.kill(process.pid, signal.SIGKILL)


def _accept(listening: socket.socket, started: list[forks.Process]) -> None:
    while True:
        try:
            client, _ = listening.accept()
        except OSError:  # closed
            return
        threading.Thread(target=_serve, args=(client, started), daemon=True).start()


def _serve(client: socket.socket, started: list[forks.Process]) -> None:
    with client, client.makefile("rw") as stream:
        _, streams, _, _ = socket.recv_fds(client, 1, 3)
        given = json.loads(stream.readline())
        process = forks.start(
            given["arguments"],
            cwd=given["cwd"],
            env=given["environment"],
            stdin=streams[0],
            stdout=streams[1],
            stderr=streams[2],
        )
        started.append(process)
        for descriptor in streams:
            os.close(descriptor)
        # Whoever was killed does not listen any more.
        with contextlib.suppress(OSError):
            stream.write(f"{process.pid}\n")
            stream.flush()
            code = process.wait()
            stream.write(f"{code}\n")
            stream.flush()


def run(blocks: Sequence[str], folder: Path, timeout_s: float, **environment: str) -> str:
    """Type the blocks one after the other into one shell, which ends at the first command that
    fails; what they print.
    """
    script = "".join(f"echo '== block {n}'\n{block}\n" for n, block in enumerate(blocks, 1))
    # Beside the folder, since the address of a socket has at most 107 characters; and a file and
    # not a pipe, which whatever is left running would hold open.
    with program(folder.parent / "bin") as first, tempfile.TemporaryFile("w+") as out:
        path = os.pathsep.join((str(first), str(Path(sys.executable).parent), os.environ["PATH"]))
        shell = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=folder,
            env=clean_environment(PATH=path, COLUMNS="100", **environment),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
        try:
            code: int | str = shell.wait(timeout_s)
        except subprocess.TimeoutExpired:
            shell.kill()
            code = f"nothing after {timeout_s} s"
        out.seek(0)
        said = out.read()
    assert code == 0, f"{code}; it said\n{said[-6000:]}"
    return said
