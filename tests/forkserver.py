"""The process that has imported what tests need and forks others from itself, as its only client asks
(tests/forks.py): what it imports, what can be asked for, and how a forked process becomes that.
"""

from __future__ import annotations

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
import sys
import weakref
from dataclasses import dataclass, field
from typing import NoReturn

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
_STANDARD = (0, 1, 2)


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
    of_pytest: bool = False
    """It runs tests: what it starts is for tests.adopted to fork, and figures are real ones."""


def be_server(control: socket.socket) -> NoReturn:
    """A server, and in a process that it has forked that which was asked for."""
    # A process group's Ctrl-C is for what we have forked.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    request = serve(control)
    if request is None:
        os._exit(0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if not request.of_pytest:
        forkedmain.install()
        sys.modules["ingot.models.device"].PEAK_SIZE["cpu"] = 256  # tiny models need no better one
    forkedmain.run(lambda: _do(request))


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
    forkedmain.open_streams()
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in PRELOADED:
        importlib.import_module(name)
    sys.modules["torch"].set_num_threads(1)
    _make_ready()
    # Of what the imports made, torch's operators above all: at its end each process would undo them.
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    gc.freeze()
    be_server(socket.socket(fileno=int(sys.argv[1])))


def _make_ready() -> None:
    """What each process would make anew, alike in all, and which takes longer than its work."""
    for name in THEIRS:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    importlib.import_module("ingot.cli.app").command()
    importlib.import_module("ingot.report.page").template("page.html")


if __name__ == "__main__":
    # Under its own name, so that what is pickled for it is found.
    importlib.import_module("tests.forkserver")._main()
