"""What rewards are to a training (`Sample` in, `RewardScores` out), and what a kind of reward is to
this room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class Sample:
    """One answer to be scored."""

    prompt: str
    """The text of the last user turn, or of the prompt column."""
    answer: str
    """The decoded answer without special tokens."""
    reference: str | None = None
    """What the last assistant turn of the chat that is trained says; None if it says nothing."""
    finished: bool = True
    """Whether the answer ended by itself; False if the limit of length cut it."""
    alone: bool = True
    """Whether the prompt is all that stands before the answer; False if there are other turns."""


@dataclass(frozen=True)
class RewardScores:
    """The scores of a batch, in the order of its samples."""

    total: list[float]
    """The weighted sum; where a reward failed, its `on_failure` counts instead."""
    each: dict[str, list[float | None]]
    """By the reward's name, not weighted; None where it failed."""
    failures: dict[str, int]
    """By the reward's name: on how many samples it failed."""
    reasons: dict[str, str] = field(default_factory=dict)
    """By the name of a reward that failed: why it did, on the first sample on which it did."""
    absent: list[str] = field(default_factory=list)
    """Rewards that judged nothing, though trying once more might have helped: a server that does
    not answer, a process that dies. It may lie in the samples where they are few.
    """


class Rewards(Protocol):
    """The rewards of a recipe; made by `ingot.rewards.build.build_rewards`."""

    names: tuple[str, ...]

    def __call__(self, samples: Sequence[Sample]) -> RewardScores:
        """Score a batch. Never raises because of a sample, or of a reward that fails."""
        ...

    def close(self) -> None:
        """End the processes and threads that score."""
        ...


class RewardFailed(Exception):
    """A reward has no value for a sample; the message says why. `again`: trying once more may
    help.
    """

    def __init__(self, message: str, *, again: bool = False) -> None:
        super().__init__(message)
        self.again = again


class ScoresOne(Protocol):
    """What the `implementation(settings)` of a kind of reward returns."""

    def __call__(self, sample: Sample) -> float:
        """The value of an answer. Raises RewardFailed, or anything else, where it has none."""
        ...


class ScoresMany(Protocol):
    """What it returns if its settings say `batched`."""

    def __call__(self, samples: Sequence[Sample]) -> Sequence[float]:
        """The values of the answers, in their order."""
        ...
