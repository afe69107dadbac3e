"""When something recurs in training: after so many steps, at the end of each pass over the rows, or
after so much time. Steps and passes are arithmetic, the same after a restart; time is told by rank
0, whose word travels with the votes before each step, so that all ranks act after the same one.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ingot.config.sections.training import Every, seconds_of


class Recurrence:
    """Asked after every step whether it is time.

    Args:
        every: what the recipe says; None for never.
        rows: training rows, and `batch` of them in a step.
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
        self._since, self._told = clock(), False

    def vote(self) -> bool:
        """Whether so much time has passed here; only rank 0 is asked."""
        return self._seconds is not None and self._clock() - self._since >= self._seconds

    def hear(self, vote: bool) -> None:
        """What rank 0 said before this step."""
        self._told = vote

    def is_due(self, step: int) -> bool:
        """Whether it is time after `step` steps (from 1)."""
        if isinstance(self.every, int):
            return step % self.every == 0
        if self.every == "epoch":
            # The last whole step of each pass: `train.epochs` ends with it, too.
            passes, next_passes = (
                -(-steps * self._batch // self._rows) for steps in (step, step + 1)
            )
            return next_passes > passes
        return self._told

    def begin_anew(self) -> None:
        """It has been done: the next time is counted from now."""
        self._since, self._told = self._clock(), False
