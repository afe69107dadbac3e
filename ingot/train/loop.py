"""Time: which step comes next, and when it is over. Knows neither mathematics nor side effects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ingot.base.errors import Failed
from ingot.data.loader import Batch
from ingot.train.step import StepOutcome

MAX_SKIPPED = 10


@dataclass(frozen=True)
class Work:
    """What one step needs: this rank's micro-batches, and what all ranks agreed on."""

    batches: Sequence[Batch]
    targets: int
    """Target tokens of the whole global batch."""
    signum: int
    """The signal that asked some rank to stop, or 0."""
    began: float
    """Monotonic time at which the step began, before its data was there."""


@dataclass(frozen=True)
class StepInfo:
    """What hooks are told."""

    step: int
    """Steps done, this one included."""
    samples: int
    """Sequences in this step, over all ranks."""
    tokens: int
    """Tokens in this step, over all ranks, padding included."""
    outcome: StepOutcome
    lr: float
    seconds: float
    """From the start of the step to its end on the host, waiting for data included."""


class Hook(Protocol):
    """A side effect of training."""

    def after_step(self, info: StepInfo) -> bool:
        """Called on every rank after every step; True ends training, and every rank must say the same."""
        ...

    def close(self) -> None:
        """Called once, in reverse order, however training ends."""
        ...


@dataclass(frozen=True)
class LoopEnd:
    """Where the loop stood when it ended; `signum` is 0 unless a signal ended it."""

    step: int
    signum: int


def run_loop(first: int, last: int, fetch: Callable[[int], Work], do_step: Callable[[int, Work], StepInfo], hooks: Sequence[Hook]) -> LoopEnd:
    """Turn from step `first` (so many are done) until `last` are done, a hook ends it, or a signal came on any rank.

    Raises:
        Failed: many steps in a row were not finite.
    """
    skipped_in_row = 0
    before: StepOutcome | None = None
    for step in range(first, last):
        work = fetch(step)
        if work.signum:
            return LoopEnd(step, work.signum)
        info = do_step(step, work)
        # The flag of the step before is read while this one runs, so that the device never waits for the host.
        if before is not None:
            skipped_in_row = skipped_in_row + 1 if float(before.skipped) else 0
            if skipped_in_row >= MAX_SKIPPED:
                raise Failed(f"loss or gradient was not finite in {MAX_SKIPPED} steps in a row, up to step {step}; lower train.optimizer.lr")
        before = info.outcome
        over = [hook.after_step(info) for hook in hooks]  # every hook acts, whatever another one says
        if any(over):
            return LoopEnd(info.step, 0)
    return LoopEnd(last, 0)
