"""What follows from the number of a step: its learning rate (linear warm-up, then the curve of the
schedule's kind, a door), and whether an evaluation or a checkpoint is due after it.

Steps and epochs are arithmetic, the same after a restart. Time is measured by rank 0, whose answer
travels with the votes before each step, so that all ranks act after the same one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

from ingot.config.doors import SCHEDULES
from ingot.config.recipe import Recipe
from ingot.config.sections.loop import Every, seconds_of
from ingot.config.sections.training import ScheduleSettings, WSDSchedule
from ingot.data.batches.order import sequence_position


def warmup_steps(settings: ScheduleSettings, total: int) -> int:
    """How many of `total` steps the warm-up takes; more than there are if it is set so."""
    return round(settings.warmup * total) if settings.warmup < 1 else round(settings.warmup)


class LearningRate:
    """The learning rate of step `step` (from 0) out of `total`.

    Warm-up rises linearly from above zero and reaches `peak` at its last step; the curve reaches
    its final value at the last step of training.

    Raises:
        WrongInput: there is no such kind of schedule.
    """

    def __init__(self, settings: ScheduleSettings, peak: float, total: int) -> None:
        kind = SCHEDULES.load(settings.kind, "train.schedule.kind")
        self._settings, self._peak, self._total = settings.over(total), peak, total
        self._curve = kind.load_implementation()
        self._warmup = warmup_steps(settings, total)

    def __call__(self, step: int) -> float:
        if step < self._warmup:
            return self._peak * (step + 1) / self._warmup
        share = min(1.0, (step + 1 - self._warmup) / max(1, self._total - self._warmup))
        return self._peak * float(self._curve(self._settings, share))

    def told(self, first: int, commit: Mapping[str, Any]) -> list[str]:
        """What a user should know of it before step `first` (from 0), one line each: a warm-up that
        does not end, the phases of a warm-up, stable, decay schedule, and a jump from the rate of
        the checkpoint that training goes on from, whose marker is `commit`.
        """
        lines = []
        if self._warmup >= self._total:
            lines.append(
                f"the learning rate rises to {self(self._total - 1):.3g} at step {self._total:,},"
                f" the last one, as its warm-up takes {self._warmup:,} steps; lower"
                " train.schedule.warmup if it is to fall again"
            )
        elif isinstance(self._settings, WSDSchedule):
            lines.append(f"the learning rate {self._phases(self._settings)}")
        before = commit.get("learning_rate")  # none where training begins
        if first and before is not None and abs(self(first - 1) - before) > 1e-6 * self._peak:
            lines.append(
                f"the learning rate goes from {before:.3g}, that of the checkpoint, to"
                f" {self(first):.3g} at once, as train.schedule and the number of steps are now"
            )
        return lines

    def _phases(self, settings: WSDSchedule) -> str:
        """The phases that there are: without a warm-up, or with a decay that begins after it, some
        are not.
        """
        stable = self._total - round(settings.decay * (self._total - self._warmup))
        phases = [f"rises to {self._peak:g} at step {self._warmup:,}"] if self._warmup else []
        if stable > self._warmup:
            phases.append(f"is {self._peak:g} until step {stable:,}")
        begin = "falls" if phases else f"falls from {self._peak:g}"
        floor = f"{self._peak * settings.min_ratio:g} at step {self._total:,}"
        return ", then ".join([*phases, f"{begin} to {floor}"])


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


def wsd(settings: WSDSchedule, share: float) -> float:
    """1 until the share `decay` is left, then down to `min_ratio`."""
    left = min(1.0, (1 - share) / settings.decay)
    high = left if settings.curve == "linear" else 1 - math.sqrt(1 - left)
    return settings.min_ratio + (1 - settings.min_ratio) * high


class Recurrence:
    """Decides after every step whether something is due.

    Args:
        every: the recipe's value; None for never.
        samples: how many a pass over the training rows makes; `batch` of them are used per step.
        begin: steps before the first pass.
        skipped: ranges of the order of samples that are left out (`data.skip`).
    """

    def __init__(
        self,
        every: Every | None,
        samples: int,
        batch: Fraction | int,
        clock: Callable[[], float] = time.monotonic,
        *,
        begin: int = 0,
        skipped: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.every, self._samples, self._batch, self._clock = every, samples, batch, clock
        self._skipped = skipped
        self._first = self._place(begin)
        self._seconds = seconds_of(every)
        self._since, self._due = clock(), False

    @classmethod
    def of(cls, recipe: Recipe, every: Every | None, rows: int, *, begin: int = 0) -> Recurrence:
        """For a training of `recipe` on so many rows."""
        a_step = recipe.train.global_batch / recipe.objective.samples_per_row
        return cls(every, rows, a_step, begin=begin, skipped=recipe.data.skip)

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
            return self._passes(step + 1) > self._passes(step)
        return self._due

    def may_be_due(self, first: int, last: int) -> bool:
        """Whether it can be due after a step between `first` and `last`, which are left out."""
        return self.most_often(first, last) > 0

    def most_often(self, first: int, last: int) -> int:
        """After how many of the steps between `first` and `last`, which are left out, it is due; by
        the clock it may be so after all of them.
        """
        between = max(0, last - first - 1)
        if isinstance(self.every, int):
            return max(0, (last - 1) // self.every - first // self.every)
        if self.every == "epoch":
            return max(0, min(between, self._passes(last) - self._passes(first + 1)))
        return 0 if self.every is None else between

    def _passes(self, steps: int) -> int:
        """Passes over the rows that `steps` steps begin."""
        return -((self._first - self._place(steps)) // self._samples)

    def _place(self, steps: int) -> int:
        """How far `steps` steps come in the order of samples, skipped ones included."""
        return sequence_position(math.ceil(steps * self._batch) - 1, self._skipped) + 1

    def restart(self) -> None:
        """Restart the interval: it has just been done."""
        self._since, self._due = self._clock(), False


def too_short(
    recipe: Recipe, rows: int, first: int, last: int, begin: int = 0
) -> Iterator[tuple[str, str]]:
    """Knobs that do less than they say in a training that begins after step `first` and ends with
    `last`, and why. `rows`, `begin`: as of a Recurrence.
    """
    knobs, steps = recipe.train, f"{first + 1:,} to {last:,}"
    measured = {
        "train.early_stop": knobs.early_stop is not None,
        "checkpoint.best": recipe.checkpoint.best is not None,
    }
    if knobs.sample_every is not None and not recipe.evaluate.prompts:
        yield "train.sample_every", "it has no effect, since evaluate.prompts is empty; give some"
    elif (
        knobs.sample_every is not None and last // knobs.sample_every <= first // knobs.sample_every
    ):
        yield "train.sample_every", f"it comes to no sample in steps {steps}; lower it"
    evaluations = Recurrence.of(recipe, knobs.evaluate_every, rows, begin=begin)
    if not evaluations.may_be_due(first, last + 1):
        if knobs.evaluate_every is not None and not any(measured.values()):
            yield "train.evaluate_every", f"it comes to no evaluation in steps {steps}; lower it"
        for name in [name for name, is_set in measured.items() if is_set]:
            yield (
                name,
                f"it has no effect, since train.evaluate_every {knobs.evaluate_every} comes to no"
                f" evaluation in steps {steps}; lower that",
            )
    elif knobs.early_stop is not None:
        # The first is the best so far, and after the last step nothing is left to end.
        needed, made = knobs.early_stop.patience + 1, evaluations.most_often(first, last)
        if made < needed:
            yield (
                "train.early_stop",
                f"it cannot end this training: patience {needed - 1} takes {needed} evaluations"
                f" before the last step, and train.evaluate_every {knobs.evaluate_every} comes to"
                f" {made} in steps {steps}; lower one of the two",
            )
    average, every = knobs.average, recipe.checkpoint.every
    if average is not None and average.needs_kept:
        made = 1 + Recurrence.of(recipe, every, rows, begin=begin).most_often(first, last)
        if made < average.checkpoints:
            yield (
                "train.average",
                f"of the {average.checkpoints} checkpoints that it asks for there will be {made} at"
                f" most: checkpoint.every is {every}, in steps {steps}; lower that",
            )
