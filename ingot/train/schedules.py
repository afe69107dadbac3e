"""Learning-rate schedules: a linear warm-up, then the curve of a kind behind the door `schedule`,
as a pure function of the step.
"""

from __future__ import annotations

import math

from ingot.config.doors import SCHEDULES
from ingot.config.sections.training import ScheduleSettings


class LearningRate:
    """The learning rate of step `step` (from 0) of `total`, called with the step.

    Warm-up rises linearly and reaches `peak` with its last step, never being zero; the curve then
    reaches its end with the last step of all.

    Raises:
        WrongInput: there is no such kind of schedule.
    """

    def __init__(self, settings: ScheduleSettings, peak: float, total: int) -> None:
        self._settings, self._peak, self._total = settings, peak, total
        kind = SCHEDULES.load(settings.kind, "train.schedule.kind")
        self._curve = kind.load_implementation()
        warmup = settings.warmup
        self._warmup = round(warmup * total) if warmup < 1 else round(warmup)

    def __call__(self, step: int) -> float:
        if step < self._warmup:
            return self._peak * (step + 1) / self._warmup
        share = min(1.0, (step + 1 - self._warmup) / max(1, self._total - self._warmup))
        return self._peak * float(self._curve(self._settings, share))


def cosine(settings: ScheduleSettings, share: float) -> float:
    """Half a cosine from 1 to `min_ratio`."""
    decayed = (1 + math.cos(math.pi * share)) / 2
    return settings.min_ratio + (1 - settings.min_ratio) * decayed


def linear(settings: ScheduleSettings, share: float) -> float:
    """A straight line from 1 to `min_ratio`."""
    return settings.min_ratio + (1 - settings.min_ratio) * (1 - share)


def constant(settings: ScheduleSettings, share: float) -> float:
    """1 throughout."""
    return 1.0
