"""A server that has imported what tests need and forks processes from itself: a command line or a
rank costs what it does, not starting torch. One server for each process of pytest; the workers of
pytest-xdist (tests/workers.py) and their servers are forked from the one of the process that starts
them.

A process behaves as a new interpreter would: its own working directory, environment, streams,
signals and exit code; so does what it starts as `python -m ingot ...` (tests/forkedmain.py). What
the server's imports have fixed already (`PYTHON*`, `LD_*`, ...) cannot be changed for it; `start`
refuses such environments, and tests/cli/commands.py starts a real interpreter for them.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import psutil

from tests import forkedmain
from tests.forkserver import Request, be_server

START_S = 1200.0
"""How long the server may take to fork: its start imports everything, on a crowded machine slowly."""
_AT_START = dict(os.environ)


def can_fork(environment: Mapping[str, str]) -> bool:
    """Whether a fork of the server is what a new interpreter with `environment` would be."""
    return forkedmain.fixed(environment) == forkedmain.fixed(_AT_START)


class Process:
    """A forked process, with the methods of subprocess.Popen that tests use. `stdout` and `stderr`
    are text streams where a pipe was asked for.
    """

    def __init__(self, request: Request, streams: Iterable[int], reads: dict[str, int]) -> None:
        self.args = list(request.arguments)
        self.returncode: int | None = None
        self._status, theirs = socket.socketpair()
        self._result = os.fdopen(os.memfd_create("result"), "rb")
        server().send(request, (*streams, theirs.fileno(), self._result.fileno()))
        theirs.close()
        self.stdout: IO[str] | None = _reader(reads.get("stdout"))
        self.stderr: IO[str] | None = _reader(reads.get("stderr"))
        self.pid = int(self._receive(START_S) or 0)
        assert self.pid, "the server forked no process"

    def _receive(self, timeout_s: float | None) -> str | None:
        """The next word of the server; None when it did not come in time."""
        if not select.select([self._status], [], [], timeout_s)[0]:
            return None
        word = self._status.recv(16).decode()
        assert word, "the server of forks has ended"
        return word

    def fileno(self) -> int:
        """Readable when the process has ended."""
        return self._status.fileno()

    def result(self) -> bytes:
        """What a call returned; empty where it returned nothing."""
        self._result.seek(0)
        return self._result.read()

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            word = self._receive(timeout)
            if word is None:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = int(word)
            self._status.close()
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """(stdout, stderr), once both have ended, and the process too."""
        texts = {"stdout": "", "stderr": ""}

        def read(name: str, stream: IO[str]) -> None:
            texts[name] = stream.read()

        readers = [
            threading.Thread(target=read, args=(name, stream), daemon=True)
            for name in texts
            if (stream := getattr(self, name)) is not None
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(timeout)
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
        self.wait(timeout)
        return texts["stdout"], texts["stderr"]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self.stdout, self.stderr):
            if stream is not None:
                stream.close()
        self.wait()


def start(
    arguments: Iterable[str],
    *,
    cwd: Path | str | None = None,
    env: Mapping[str, str] | None = None,
    stdin: int | IO[Any] | None = subprocess.DEVNULL,
    stdout: int | IO[Any] | None = None,
    stderr: int | IO[Any] | None = None,
    start_new_session: bool = False,
) -> Process:
    """`ingot ARGUMENTS` in a forked process; the rest as subprocess.Popen has it, texts decoded."""
    request = Request(
        arguments=tuple(arguments),
        cwd=str(cwd or Path.cwd()),
        environment=dict(os.environ if env is None else env),
        session=start_new_session,
    )
    assert can_fork(request.environment), "a library has read these variables already"
    return _started(request, {"stdin": stdin, "stdout": stdout, "stderr": stderr})


def start_call(
    function: Callable[..., bytes | None],
    *arguments: Any,
    modules: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
    stderr: int | None = None,
) -> Process:
    """`function(*arguments)` in a forked process, both picklable. The bytes that it returns are the
    process's `result`; it ends with 1 where it raises. `modules` are imported by the server, for all
    that follow.
    """
    request = Request(
        call=pickle.dumps((function, arguments)),
        modules=(function.__module__, *modules),
        cwd=str(Path.cwd()),
        environment={**os.environ, **(environment or {})},
    )
    return _started(request, {"stdin": subprocess.DEVNULL, "stdout": None, "stderr": stderr})


def _started(request: Request, wanted: Mapping[str, int | IO[Any] | None]) -> Process:
    ours: list[int] = []
    streams: list[int] = []
    reads: dict[str, int] = {}
    for number, (name, stream) in enumerate(wanted.items()):
        if stream == subprocess.PIPE:
            reads[name], end = os.pipe()
            ours.append(end)
            streams.append(end)
        elif stream == subprocess.DEVNULL:
            ours.append(os.open(os.devnull, os.O_RDWR))
            streams.append(ours[-1])
        elif stream == subprocess.STDOUT:
            streams.append(streams[1])
        elif stream is None:
            streams.append(number)
        else:
            streams.append(stream if isinstance(stream, int) else stream.fileno())
    try:
        return Process(request, streams, reads)
    finally:
        for descriptor in ours:
            os.close(descriptor)


def _reader(descriptor: int | None) -> IO[str] | None:
    return None if descriptor is None else os.fdopen(descriptor, encoding="utf-8")


class _Server:
    """The server's process, as its only client sees it."""

    def __init__(self, start: Callable[[socket.socket], psutil.Popen | psutil.Process]) -> None:
        self._socket, theirs = socket.socketpair()
        self._lock = threading.Lock()
        self._process = start(theirs)
        theirs.close()
        atexit.register(self.end)

    def send(self, request: Request, descriptors: Iterable[int]) -> None:
        # As a file: a request has any size.
        body = os.memfd_create("request")
        try:
            with os.fdopen(os.dup(body), "wb") as stream:
                pickle.dump(request, stream)
            with self._lock:
                socket.send_fds(self._socket, [b"?"], [body, *descriptors])
        finally:
            os.close(body)

    def end(self) -> None:
        self._socket.close()
        with contextlib.suppress(psutil.TimeoutExpired):
            self._process.wait(10)
        with contextlib.suppress(psutil.NoSuchProcess):
            self._process.kill()


def _new(control: socket.socket) -> psutil.Popen:
    return psutil.Popen(
        [sys.executable, "-m", "tests.forkserver", str(control.fileno())],
        env={**_AT_START, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[control.fileno()],
    )


def _fork(control: socket.socket) -> psutil.Process:
    pid = os.fork()
    if pid == 0:
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            # Whoever reads what the parent writes would wait for our end too.
            if descriptor not in (2, null, control.fileno()):
                with contextlib.suppress(OSError):  # the one of the listing itself
                    os.fstat(descriptor)
                    os.dup2(null, descriptor, inheritable=descriptor <= 2)
        be_server(control)
    return psutil.Process(pid)


_servers: dict[int, _Server] = {}


def server() -> _Server:
    """The one of this process; a fork of it has another one."""
    if os.getpid() not in _servers:
        _servers[os.getpid()] = _Server(_new)
    return _servers[os.getpid()]


def fork_server() -> None:
    """Of this process, which is a fork of another one's server, its own."""
    _servers[os.getpid()] = _Server(_fork)
