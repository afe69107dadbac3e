"""Another engine's server as a process of ours: started, waited for until it answers, told signals,
ended. None outlives this one.

While it loads its log is held back; a server that dies then is one line with its last words, and
its log lies in a file. Once it answers, what it says goes on to stderr.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType

import httpx
import psutil

from ingot.base.errors import Failed, WrongInput
from ingot.base.progress import say

# Seconds between two looks at a server that loads, and between two lines that tell that it still
# does.
POLL_S, REPORT_S = 0.2, 30.0
# Seconds that a server gets to end in once it is told to, before it is killed with all that it
# started.
GRACE_S = 12.0
_KEPT_LINES = 4000
# Reads the group, then waits until the other end of the pipe is closed, which the kernel does when
# we are gone.
_GUARD = """
read -r group || exit
read -r nothing
kill -s TERM -- "-$group"
for second in $(seq "$1"); do kill -s 0 -- "-$group" || exit; sleep 1; done
kill -s KILL -- "-$group"
"""
# What stands before the words of a line in the logs of vLLM and Triton.
_HEAD = re.compile(
    r"^(?:\((?:APIServer|EngineCore|VllmWorker|Worker)[^)]*\)\s*)?(?:(?:INFO|WARNING|ERROR)\s+\d\d-\d\d"
    r" [\d:]+ \[[^\]]+\]\s?)?"
    r"(?:[EWI]\d{4} [\d:.]+ \d+ [\w.]+:\d+\] )?"
)
_ERROR = re.compile(
    r"^(?:[\w.]*(?:Error|Exception|Interrupt)\b: .+|[\w./-]+: error: .+|\"?(?:ERROR|failed"
    r" to)\b.+|error: .+|.*: error while loading shared libraries: .+)"
)
_ONWARDS = ("See root cause above", "initialization failed due to")


@dataclass(frozen=True)
class ServerCommand:
    """How a server is started. `environment` is set beside our own; of `secrets` (by their
    variables) no value is ever shown.

    `health`: the address that answers 200 once it serves.
    """

    engine: str
    argv: tuple[str, ...]
    health: str
    environment: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)


def run_server_process(
    command: ServerCommand,
    greeting: str,
    meanwhile: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> None:
    """Start the server, say `greeting` once it answers, and return when SIGTERM or SIGINT has ended
    it.

    `meanwhile`: what runs beside it from then on.

    Raises:
        WrongInput: there is no such program.
        Failed: it died; with its last words.
    """
    with _started(command) as (process, log):
        _wait(command, process, log)
        with meanwhile(), _told_to_stop() as stop:
            log.let_through()
            say(greeting)
            while not stop.wait(POLL_S):
                if process.poll() is not None:
                    log.join()
                    raise Failed(
                        f"{command.engine} died ({_code(process)}): {log.last_words()}; its log"
                        " stands above, start it again"
                    )
            log.hold()


@contextlib.contextmanager
def _started(command: ServerCommand) -> Iterator[tuple[subprocess.Popen[bytes], _ServerLog]]:
    say(f"{command.engine} is loading; this may take minutes")
    with _guard() as watch:
        try:
            process = subprocess.Popen(
                command.argv,
                env={**os.environ, **command.environment, **command.secrets},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        except OSError as error:
            what = f"{command.engine} cannot be started: {command.argv[0]}: {error.strerror}"
            raise WrongInput(f"{what}; set serve.python to its environment's interpreter") from None
        watch(process.pid)
        log = _ServerLog(process)
        try:
            yield process, log
        finally:
            _end(process)
            log.join()


@contextlib.contextmanager
def _guard() -> Iterator[Callable[[int], None]]:
    """What the block gets takes a process group, which is ended should this process die inside the
    block, however it dies.

    A process of its own waits for that: vLLM that is only told to stop, with nobody left who reads
    its log, hangs with all its processes.
    """
    with subprocess.Popen(
        ["/bin/sh", "-c", _GUARD, "guard", str(math.ceil(GRACE_S))],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        process_group=0,
        text=True,
    ) as process:
        assert process.stdin is not None
        try:
            yield lambda group: print(group, file=process.stdin, flush=True)
        finally:
            process.kill()


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, GRACE_S, then SIGKILL to whatever is left of it and of what it started."""
    try:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait(command: ServerCommand, process: subprocess.Popen[bytes], log: _ServerLog) -> None:
    began = told = time.monotonic()
    with httpx.Client(timeout=5.0, trust_env=False) as client:
        while True:
            if process.poll() is not None:
                log.join()
                raise Failed(
                    f"{command.engine} ended while loading ({_code(process)}): {log.last_words()};"
                    f" its whole log is {log.keep(command.engine)}"
                )
            with contextlib.suppress(httpx.HTTPError):
                if client.get(command.health).status_code == httpx.codes.OK and _listens(
                    process.pid, httpx.URL(command.health).port
                ):
                    return
            if time.monotonic() - told > REPORT_S:
                told = time.monotonic()
                say(f"{command.engine} is still loading ({told - began:.0f} s)")
            time.sleep(POLL_S)


def _listens(pid: int, port: int | None) -> bool:
    """Whether it is this process, or one that it started, that has the port: while it loads, a
    stranger may have taken it and answer.
    """
    try:
        process = psutil.Process(pid)
        sockets = [
            socket
            for one in (process, *process.children(recursive=True))
            for socket in one.net_connections("tcp")
        ]
    except psutil.NoSuchProcess:
        return False
    return any(
        socket.status == psutil.CONN_LISTEN and socket.laddr.port == port for socket in sockets
    )


@contextlib.contextmanager
def _told_to_stop() -> Iterator[threading.Event]:
    """Set at the first SIGINT or SIGTERM; to be stopped is how a server ends well."""
    stop = threading.Event()

    def note(number: int, frame: FrameType | None) -> None:
        stop.set()

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _code(process: subprocess.Popen[bytes]) -> str:
    code = process.returncode
    return f"exit {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"


class _ServerLog:
    """What a process says: kept while it loads, and passed on from `let_through` on."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._stream = process.stdout
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._first_error: str | None = None
        self._through = False
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._stream is not None
        for raw in self._stream:
            line = raw.decode(errors="replace").rstrip()
            self._lines.append(line)
            words = _HEAD.sub("", line, count=1).strip()
            if _ERROR.match(words) and not any(onwards in words for onwards in _ONWARDS):
                self._first_error = self._first_error or words
            if self._through:
                print(line, file=sys.stderr, flush=True)

    def let_through(self) -> None:
        """From here on lines go to stderr, and what went wrong before, and was got over, is
        forgotten.
        """
        self._through, self._first_error = True, None

    def hold(self) -> None:
        """What it says while it is ended on purpose is of no use to anybody."""
        self._through = False

    def join(self) -> None:
        """Wait until all is read; a grandchild that holds the pipe open is not waited for."""
        self._thread.join(2.0)

    def newest(self) -> str:
        words = (_HEAD.sub("", line, count=1).strip() for line in reversed(list(self._lines)))
        return next((text for text in words if text), "it has said nothing")[:200]

    def last_words(self) -> str:
        """The first error that it named, which the others follow from; else its last line."""
        return (self._first_error or self.newest())[:400].replace("\\n", " ").rstrip(' ".')

    def keep(self, engine: str) -> str:
        """A file with all that it said."""
        with tempfile.NamedTemporaryFile(
            "w", prefix=f"ingot-{engine.lower()}-", suffix=".log", delete=False, encoding="utf-8"
        ) as file:
            file.write("\n".join(self._lines) + "\n")
        return file.name
