"""Runs another engine's server as a child process: starts it, waits until it answers, stops it. It
never outlives this process.

Its log is held back while it loads; a server that dies then is reported in one line, and its log is
kept in a file. Once it answers, its log goes to stderr.
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

# Seconds between two health checks of a loading server, and between two progress messages.
POLL_S, REPORT_S = 0.2, 30.0
# Seconds that a server gets to end after SIGTERM, before it and its children are killed.
GRACE_S = 12.0
_KEPT_LINES = 4000
# Reads the process group, then waits until the other end of the pipe is closed, which the kernel
# does when this process ends.
_GUARD = """
read -r group || exit
read -r nothing
kill -s TERM -- "-$group"
for second in $(seq "$1"); do kill -s 0 -- "-$group" || exit; sleep 1; done
kill -s KILL -- "-$group"
"""
# The prefix of log lines of vLLM and Triton.
_LOG_PREFIX = re.compile(
    r"^(?:\((?:APIServer|EngineCore|VllmWorker|Worker)[^)]*\)\s*)?(?:(?:INFO|WARNING|ERROR)\s+\d\d-\d\d"
    r" [\d:]+ \[[^\]]+\]\s?)?"
    r"(?:[EWI]\d{4} [\d:.]+ \d+ [\w.]+:\d+\] )?"
)
_ERROR = re.compile(
    r"^(?:[\w.]*(?:Error|Exception|Interrupt)\b: .+|[\w./-]+: error: .+|\"?(?:ERROR|failed"
    r" to)\b.+|error: .+|.*: error while loading shared libraries: .+)"
)
_NOT_ROOT_CAUSE = ("See root cause above", "initialization failed due to")


@dataclass(frozen=True)
class ServerCommand:
    """How a server is started. `environment` is added to ours; the values of `secrets` are never
    shown. `health`: the URL that answers 200 once it serves.
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
    """Start the server, print `greeting` once it answers, and return when SIGTERM or SIGINT stopped
    it.

    `meanwhile`: a context that is open while it serves.

    Raises:
        WrongInput: there is no such program.
        Failed: it died; with its last error message.
    """
    with _started(command) as (process, log):
        _wait(command, process, log)
        with meanwhile(), _stop_event() as stop:
            log.forward()
            say(greeting)
            while not stop.wait(POLL_S):
                if process.poll() is not None:
                    log.join()
                    raise Failed(
                        f"{command.engine} died ({_describe_exit(process)}): {log.root_error()};"
                        " its log stands above, start it again"
                    )
            log.silence()


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
    """A function that registers a process group to be killed if this process dies inside the block,
    even by SIGKILL.

    A separate process waits for that. vLLM would not end by itself: after SIGTERM, with nobody
    reading its log, it hangs with all its processes.
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
    """Send SIGTERM, wait up to GRACE_S, then SIGKILL what is left of its process group."""
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
    began = reported = time.monotonic()
    with httpx.Client(timeout=5.0, trust_env=False) as client:
        while True:
            if process.poll() is not None:
                log.join()
                raise Failed(
                    f"{command.engine} ended while loading ({_describe_exit(process)}):"
                    f" {log.root_error()}; its whole log is {log.keep(command.engine)}"
                )
            with contextlib.suppress(httpx.HTTPError):
                if client.get(command.health).status_code == httpx.codes.OK and _listens(
                    process.pid, httpx.URL(command.health).port
                ):
                    return
            if time.monotonic() - reported > REPORT_S:
                reported = time.monotonic()
                say(f"{command.engine} is still loading ({reported - began:.0f} s)")
            time.sleep(POLL_S)


def _listens(pid: int, port: int | None) -> bool:
    """Whether this process or one of its children listens on the port: while it loads, another
    process may have taken the port and answer.
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
def _stop_event() -> Iterator[threading.Event]:
    """An event that is set at the first SIGINT or SIGTERM, which then do not raise."""
    stop = threading.Event()

    def note(number: int, frame: FrameType | None) -> None:
        stop.set()

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _describe_exit(process: subprocess.Popen[bytes]) -> str:
    code = process.returncode
    return f"exit {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"


class _ServerLog:
    """The log of a process: held back at first, and passed to stderr after `forward`."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._stream = process.stdout
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._first_error: str | None = None
        self._forwarding = False
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._stream is not None
        for raw in self._stream:
            line = raw.decode(errors="replace").rstrip()
            self._lines.append(line)
            words = _LOG_PREFIX.sub("", line, count=1).strip()
            if _ERROR.match(words) and not any(phrase in words for phrase in _NOT_ROOT_CAUSE):
                self._first_error = self._first_error or words
            if self._forwarding:
                print(line, file=sys.stderr, flush=True)

    def forward(self) -> None:
        """Pass further lines to stderr, and forget errors from before, which it recovered from."""
        self._forwarding, self._first_error = True, None

    def silence(self) -> None:
        """Stop passing lines to stderr; used while the process is being stopped."""
        self._forwarding = False

    def join(self) -> None:
        """Wait until the log is read, but not for a grandchild that holds the pipe open."""
        self._thread.join(2.0)

    def newest(self) -> str:
        """Its last line that is not empty."""
        words = (_LOG_PREFIX.sub("", line, count=1).strip() for line in reversed(list(self._lines)))
        return next((text for text in words if text), "it printed nothing")[:200]

    def root_error(self) -> str:
        """The first error in the log, of which later ones are consequences; else its last line."""
        return (self._first_error or self.newest())[:400].replace("\\n", " ").rstrip(' ".')

    def keep(self, engine: str) -> str:
        """Write the log to a file and return its path."""
        with tempfile.NamedTemporaryFile(
            "w", prefix=f"ingot-{engine.lower()}-", suffix=".log", delete=False, encoding="utf-8"
        ) as file:
            file.write("\n".join(self._lines) + "\n")
        return file.name
