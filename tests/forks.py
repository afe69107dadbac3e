"""A server that has imported what tests need and forks processes from itself: a command line or a
rank costs what it does, not starting torch. One server for each process of pytest.

A process behaves as a new interpreter would: its own working directory, environment, streams,
signals and exit code; so does what it starts as `python -m ingot ...` (tests/forkedmain.py). What
the server's imports have fixed already (`PYTHON*`, `LD_*`, ...) cannot be changed for it; `start`
refuses such environments, and tests.cli.commands starts a real interpreter for them.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import multiprocessing
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from tests import forkedmain

PRELOADED = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch._dynamo",  # the first optimizer of a process imports it
    "ingot.cli.app",
    "ingot.cli.verbs",
    "ingot.cli.carry",
    "ingot.cli.model",
    "ingot.pipeline.local",
    "ingot.train.trainer",
    "ingot.checkpoints.writer",
    "ingot.parallel.tensor",
    "ingot.serve.server",
    "ingot.data.ingest",
    "ingot.data.prepare",
    "ingot.evaluate.evaluate",
    "ingot.cli.check.recipe",
    "ingot.plan.storage",
    "ingot.models.device",
    "ingot.launch.supervisor.supervise",
    "ingot.__main__",
)
THEIRS = ("pandas", "tabulate", "httpcore")
"""What other libraries import at some use, where it is installed: pyarrow with its first table."""
# What ingot starts by multiprocessing in pytest's own process is forked from a server alike.
multiprocessing.get_context("forkserver").set_forkserver_preload(list(PRELOADED))
START_S = 300.0
"""How long the server may take to fork: its start imports everything, on a crowded machine slowly."""
_AT_START = dict(os.environ)
_STANDARD = (0, 1, 2)


def can_fork(environment: Mapping[str, str]) -> bool:
    """Whether a fork of the server is what a new interpreter with `environment` would be."""
    return forkedmain.fixed(environment) == forkedmain.fixed(_AT_START)


@dataclass
class Request:
    """What a forked process is to be; `streams` become its descriptors 0, 1 and 2. `passed` are
    numbers of descriptors that it has beside them.
    """

    arguments: tuple[str, ...] = ()
    call: bytes = b""
    modules: tuple[str, ...] = ()
    cwd: str = "."
    environment: dict[str, str] = field(default_factory=dict)
    session: bool = False
    result: int = -1
    adoption: forkedmain.Adoption | None = None
    passed: tuple[int, ...] = ()


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

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.forks", str(theirs.fileno())],
            env={**_AT_START, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
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
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._process.kill()


_servers: dict[int, _Server] = {}


def server() -> _Server:
    """The one of this process; a fork of it has another one."""
    if os.getpid() not in _servers:
        _servers[os.getpid()] = _Server()
    return _servers[os.getpid()]


def serve(control: socket.socket) -> Request | None:
    """Fork a process for each request until the client is gone: None then, and in a forked process
    what it is to be.
    """
    running: dict[int, socket.socket] = {}
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        readable, _, _ = select.select([control, woken], [], [])
        if woken in readable:
            os.read(woken, 4096)
            _report(running)
        if control not in readable:
            continue
        word, descriptors, _, _ = socket.recv_fds(control, 1, 10)
        if not word:
            return None
        body, *streams, status, result = descriptors[:6]
        passed = descriptors[6:]
        with os.fdopen(body, "rb") as stream:
            stream.seek(0)
            request: Request = pickle.load(stream)
        for name in request.modules:
            if name not in sys.modules:
                with contextlib.suppress(Exception):  # the process itself says what is wrong
                    importlib.import_module(name)
        pid = os.fork()
        if pid == 0:
            if request.adoption is not None and os.fork():
                os._exit(0)  # whose parent has ended goes to the client, which asks for it
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for descriptor in (woken, wake):
                os.close(descriptor)
            for ended in running.values():
                ended.close()
            control.close()
            with socket.socket(fileno=status) as client:
                if request.adoption is not None:
                    forkedmain.be_adopted(request.adoption)
                    client.send(_word(os.getpid()))
            _become(request, streams, passed)
            request.result = result
            return request
        for descriptor in (*streams, result, *passed):
            os.close(descriptor)
        if request.adoption is not None:
            os.waitpid(pid, 0)
            os.close(status)
        else:
            running[pid] = socket.socket(fileno=status)
            running[pid].send(_word(pid))


def _report(running: dict[int, socket.socket]) -> None:
    for pid in list(running):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            with contextlib.suppress(OSError), running.pop(pid) as stream:
                stream.send(_word(os.waitstatus_to_exitcode(status)))


def _word(number: int) -> bytes:
    return str(number).encode().ljust(16)


def _become(request: Request, streams: list[int], passed: list[int]) -> None:
    if request.session:
        os.setsid()
    # Their numbers may be those of others.
    above = [fcntl.fcntl(each, fcntl.F_DUPFD, 1 + max(request.passed)) for each in passed]
    for descriptor, number in zip(above, request.passed, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    for descriptor, stream in zip(_STANDARD, streams, strict=True):
        os.dup2(stream, descriptor)
    for stream in streams:
        os.close(stream)
    os.chdir(request.cwd)
    for name in os.environ.keys() - request.environment.keys():
        del os.environ[name]
    os.environ.update(request.environment)
    sys.argv = ["ingot", *request.arguments]


def _do(request: Request) -> None:
    if not request.call:
        forkedmain.run_module(request.adoption.module if request.adoption else "ingot")
        return
    function, arguments = pickle.loads(request.call)
    answer = function(*arguments)
    with os.fdopen(request.result, "wb") as stream:
        stream.write(answer or b"")


def _main() -> None:
    # A process group's Ctrl-C is for what we have forked.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in PRELOADED:
        importlib.import_module(name)
    sys.modules["torch"].set_num_threads(1)
    _make_ready()
    gc.freeze()
    request = serve(socket.socket(fileno=int(sys.argv[1])))
    if request is not None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        forkedmain.install()
        forkedmain.run(lambda: _do(request))


def _make_ready() -> None:
    """What each process would make anew, alike in all, and which takes longer than its work."""
    for name in THEIRS:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    sys.modules["ingot.models.device"].PEAK_SIZE["cpu"] = 256  # tiny models need no better figure
    importlib.import_module("ingot.cli.app").command()
    importlib.import_module("ingot.report.page").template()


if __name__ == "__main__":
    # Under its own name, so that what is pickled for it is found.
    importlib.import_module("tests.forks")._main()
