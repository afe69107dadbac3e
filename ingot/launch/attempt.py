"""One start of a job's ranks as its supervisor sees it, wherever they run; and the stop requests
that are forwarded to them.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

from ingot.base.errors import EXIT_DONE, EXIT_KEEP, EXIT_STOPPED
from ingot.base.heartbeat import Heartbeat
from ingot.launch.job import Job

POLL_S = 0.1
NON_FAILURE_CODES = (EXIT_DONE, EXIT_KEEP, EXIT_STOPPED)
"""Exit codes of a rank that do not count as a failure."""
SAME_REQUEST_S = 2.0
"""Signals within this time are one request: a terminal, a launcher and a service manager may each
send one.
"""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@dataclass(frozen=True)
class AttemptExit:
    """How an attempt ended: the rank that decided it and its exit code, negative if a signal ended
    it. `reason` describes the end if the place reports more.
    """

    rank: int
    code: int
    reason: str = ""

    @property
    def shell_code(self) -> int:
        """The exit code as a shell reports it: 128 + signal."""
        return 128 - self.code if self.code < 0 else self.code

    def describe(self) -> str:
        if self.reason:
            return self.reason
        if self.code < 0:
            return f"rank {self.rank} was ended by {signal.Signals(-self.code).name}"
        return f"rank {self.rank} failed (exit {self.code})"


class Attempt(Protocol):
    """The ranks of one start. No method blocks, except `stop`. `stacks_s`: how long requested
    stacks of ranks may take to arrive.
    """

    stacks_s: float

    def poll(self) -> AttemptExit | None:
        """None while a rank runs. The first rank that fails decides the exit; the other ranks are
        then terminated.
        """
        ...

    def running(self) -> Collection[int]:
        """The ranks that have not ended yet."""
        ...

    def suspended(self) -> bool:
        """Whether the place suspends the ranks, which cannot answer to anything meanwhile."""
        ...

    def beats(self) -> dict[int, Heartbeat]:
        """The last heartbeat by rank, also of ranks that have ended; ranks that sent none are
        missing.
        """
        ...

    def send(self, number: int, ranks: Collection[int] | None = None) -> None:
        """Send a signal to some ranks, or to all that are running."""
        ...

    def preempted(self) -> bool:
        """After the end: whether the place ended the attempt without our request (a time limit, a
        reclaimed machine), so that it should be restarted.
        """
        ...

    def stop(self) -> None:
        """Terminate all ranks immediately, and wait until they are gone."""
        ...


class StopRequested(BaseException):
    """Unwinds what comes before a start. Not an Exception, so that no handler mistakes it for a
    failure.
    """


class StopRequests:
    """While entered, SIGINT, SIGTERM, SIGHUP and SIGUSR1 are only recorded: `first` is the first
    signal received (0: none), `repeated` whether another request followed.
    """

    def __init__(self) -> None:
        self.first, self.repeated = 0, False
        self._first_at = 0.0
        self._leaving = False
        self._previous_handlers: dict[int, Any] = {}

    def __enter__(self) -> StopRequests:
        for number in STOP_SIGNALS:
            # An ignored signal stays ignored: `nohup ingot run` survives the end of its terminal.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous_handlers[number] = signal.signal(number, self._record)
        return self

    def _record(self, number: int, frame: FrameType | None) -> None:
        if not self.first:
            self.first, self._first_at = number, time.monotonic()
        elif time.monotonic() - self._first_at > SAME_REQUEST_S:
            self.repeated = True
        else:
            return
        if self._leaving:
            raise StopRequested

    @contextlib.contextmanager
    def leaving_at_once(self) -> Iterator[None]:
        """While entered, a request raises StopRequested, one that was already received too: nothing
        runs yet that could be asked to stop, and nothing is to be started any more.
        """
        if self.first:
            raise StopRequested
        self._leaving = True
        try:
            yield
        finally:
            self._leaving = False

    @property
    def signal_to_forward(self) -> int:
        """The signal for the ranks: a closed terminal (SIGHUP) becomes a request for a clean
        stop.
        """
        return signal.SIGTERM if self.first == signal.SIGHUP else self.first

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)


StartAttempt = Callable[[Job, StopRequests], Attempt]


def follow(
    attempt: Attempt, stops: StopRequests, must_end: Callable[[], bool] = lambda: False
) -> AttemptExit:
    """Wait for the end. The first stop request is forwarded to the ranks; a second one terminates
    them immediately, as does `must_end`, which is polled, when it returns True.
    """
    forwarded = False
    while (end := attempt.poll()) is None:
        if stops.repeated or must_end():
            attempt.stop()
            continue
        if stops.first and not forwarded:
            attempt.send(stops.signal_to_forward)
            forwarded = True
        time.sleep(POLL_S)
    return end
