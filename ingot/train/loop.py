"""Time: which step comes next, and when it is over. Knows neither mathematics nor side effects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ingot.data.loader import Batch
from ingot.train.step import StepOutcome


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
        """Called on every rank after every step; True ends training, and every rank must say the
        same.
        """
        ...

    def close(self) -> None:
        """Called once, in reverse order, however training ends."""
        ...


@dataclass(frozen=True)
class LoopEnd:
    """Where the loop stood when it ended; `signum` is 0 unless a signal ended it."""

    step: int
    signum: int


def run_loop(
    first: int,
    last: int,
    fetch: Callable[[int], Work],
    do_step: Callable[[int, Work], StepInfo],
    hooks: Sequence[Hook],
    judge: Callable[[int, StepOutcome], None] = lambda step, outcome: None,
) -> LoopEnd:
    """Turn from step `first` (so many are done) until `last` are done, a hook ends it, or a signal
    came on any rank.

    `judge` hears the number (from 0) and the outcome of each step while the next one runs, so that
    the device never waits for the host.
    """
    before: StepOutcome | None = None
    for step in range(first, last):
        work = fetch(step)
        if work.signum:
            return LoopEnd(step, work.signum)
        info = do_step(step, work)
        if before is not None:
            judge(step - 1, before)
        before = info.outcome
        over = [
            hook.after_step(info) for hook in hooks
        ]  # every hook acts, whatever another one says
        if any(over):
            return LoopEnd(info.step, 0)
    return LoopEnd(last, 0)
