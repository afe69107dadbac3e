"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math

from ingot.config.sections.training import Schedule


def warmup_steps(schedule: Schedule, total: int) -> int:
    return round(schedule.warmup * total) if schedule.warmup < 1 else round(schedule.warmup)


def learning_rate(schedule: Schedule, peak: float, step: int, total: int) -> float:
    """The rate of step `step` (from 0) of `total`.

    Warm-up rises linearly and reaches the peak with its last step, never being zero; the decay then
    ends exactly at `min_ratio * peak` with the last step of all.
    """
    warmup = warmup_steps(schedule, total)
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule.kind == "constant":
        return peak
    share = min(1.0, (step + 1 - warmup) / max(1, total - warmup))
    decayed = (1 + math.cos(math.pi * share)) / 2 if schedule.kind == "cosine" else 1 - share
    return peak * (schedule.min_ratio + (1 - schedule.min_ratio) * decayed)
