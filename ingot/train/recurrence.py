"""When something recurs in training: every N steps, at the end of each pass over the rows, or after
an interval of time. Steps and passes are arithmetic, the same after a restart. Time is measured by
rank 0, whose vote is combined with the other votes before each step, so that all ranks act after
the same one.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ingot.config.sections.training import Every, seconds_of


class Recurrence:
    """Decides after every step whether something is due.

    Args:
        every: the recipe's value; None for never.
        rows: training rows; `batch` of them are used per step.
    """

    def __init__(
        self,
        every: Every | None,
        rows: int,
        batch: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.every, self._rows, self._batch, self._clock = every, rows, batch, clock
        self._seconds = seconds_of(every)
        self._since, self._due = clock(), False

    def vote(self) -> bool:
        """Whether the interval has passed on this rank; only rank 0's vote counts."""
        return self._seconds is not None and self._clock() - self._since >= self._seconds

    def set_due(self, vote: bool) -> None:
        """Store the combined vote of the ranks, received before this step."""
        self._due = vote

    def is_due(self, step: int) -> bool:
        """Whether it is due after `step` steps (from 1)."""
        if isinstance(self.every, int):
            return step % self.every == 0
        if self.every == "epoch":
            # True at the last whole step of each pass; `train.epochs` ends with it, too.
            passes, next_passes = (
                -(-steps * self._batch // self._rows) for steps in (step, step + 1)
            )
            return next_passes > passes
        return self._due

    def restart(self) -> None:
        """Restart the interval: it has just been done."""
        self._since, self._due = self._clock(), False
