"""One start of a job's ranks: what whoever supervises it must be able to ask of it, wherever the
ranks run.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from ingot.base.errors import EXIT_DONE, EXIT_KEEP, EXIT_STOPPED
from ingot.base.heartbeat import Heartbeat
from ingot.launch.job import Job
from ingot.launch.stops import Stops

POLL_S = 0.1
WELL = (EXIT_DONE, EXIT_KEEP, EXIT_STOPPED)
"""Exit codes of a rank that are no failure."""


@dataclass(frozen=True)
class Exit:
    """How an attempt ended: the rank that decided it, and its exit code, negative where a signal
    ended it; `how` in words where that says more.
    """

    rank: int
    code: int
    how: str = ""

    @property
    def shown(self) -> int:
        """The code as a shell shows it: 128 + signal."""
        return 128 - self.code if self.code < 0 else self.code

    def told(self) -> str:
        if self.how:
            return self.how
        if self.code < 0:
            return f"rank {self.rank} was ended by {signal.Signals(-self.code).name}"
        return f"rank {self.rank} failed (exit {self.code})"


class Attempt(Protocol):
    """The ranks of one start. None of these waits, but for `stop`. `stacks_s`: how long stacks that
    ranks were asked for may take to be seen here.
    """

    stacks_s: float

    def poll(self) -> Exit | None:
        """None while a rank runs. The first that fails decides how all end; the others are ended
        then.
        """
        ...

    def running(self) -> Collection[int]:
        """The ranks that have not ended yet."""
        ...

    def beats(self) -> dict[int, Heartbeat]:
        """The last sign of life of each of these ranks, ended ones too; ranks that gave none are
        left out.
        """
        ...

    def send(self, number: int, rank: int | None = None) -> None:
        """A signal to one rank, or to all that run."""
        ...

    def taken(self) -> bool:
        """Once ended: whether the place did it (a time limit, a machine taken away) and nobody had
        asked, so that it is to be started again.
        """
        ...

    def stop(self) -> None:
        """End all ranks at once, and wait until they are gone."""
        ...


Start = Callable[[Job], Attempt]


def follow(attempt: Attempt, stops: Stops, look: Callable[[], bool] = lambda: False) -> Exit:
    """Wait for the end. The first request to stop is handed on, the next one ends all ranks at
    once; so does `look`, called often, by saying True.
    """
    handed = False
    while (end := attempt.poll()) is None:
        if stops.again or look():
            attempt.stop()
            continue
        if stops.first and not handed:
            attempt.send(stops.asked)
            handed = True
        time.sleep(POLL_S)
    return end
