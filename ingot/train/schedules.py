"""Learning-rate schedules: linear warm-up, then the curve of the schedule's kind (a door), as a
pure function of the step.
"""

from __future__ import annotations

import math

from ingot.config.doors import SCHEDULES
from ingot.config.sections.training import ScheduleSettings


class LearningRate:
    """The learning rate of step `step` (from 0) out of `total`.

    Warm-up rises linearly from above zero and reaches `peak` at its last step; the curve reaches
    its final value at the last step of training.

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
    """Half a cosine period from 1 down to `min_ratio`."""
    decayed = (1 + math.cos(math.pi * share)) / 2
    return settings.min_ratio + (1 - settings.min_ratio) * decayed


def linear(settings: ScheduleSettings, share: float) -> float:
    """Linear from 1 to `min_ratio`."""
    return settings.min_ratio + (1 - settings.min_ratio) * (1 - share)


def constant(settings: ScheduleSettings, share: float) -> float:
    """1 at every step."""
    return 1.0
