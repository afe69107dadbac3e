"""The interface of a training objective: all that the training loop knows about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ingot.config.sections.objective import ObjectiveSettings
from ingot.data.batches.loader import Batch
from ingot.models.native.decoder import Decoder
from ingot.models.native.head import LogitsView

AllSum = Callable[[Tensor], Tensor]
"""Adds over the ranks that hold parts of one row."""


class RowSharing(Protocol):
    """How the ranks that share rows share them."""

    @property
    def world(self) -> int:
        """Ranks that have a part of each row."""
        ...

    def share(self, tensor: Tensor, fill: int) -> Tensor:
        """This rank's part of `[B, T]`, which is filled up with `fill` where it does not divide."""
        ...

    def total(self, part: Tensor) -> Tensor:
        """The sum over these ranks; gradients are summed over them going backward."""
        ...


@dataclass(frozen=True)
class ObjectiveInputs:
    """What an objective is made of beside its settings, as far as those ask for it."""

    reference: Tensor | None = None
    """With `needs_reference`: summed log-probabilities of (chosen, rejected) under the reference,
    `[rows, 2]` by the number of the row, on the device of training.
    """
    teacher: Decoder | None = None
    """With `needs_teacher`: in evaluation mode, spread over the ranks as the trained model is."""


class Objective(Protocol):
    """Per-token values in, (sum, metrics) out.

    `token` is called with a chunk of tokens at the model's head, `reduce` with all values of a
    micro-batch. Everything is a *sum* over what `targets` counts, never a mean, so that any split
    of a batch gives one number. An objective whose loss needs the total over a row calls `all_sum`
    and makes all that it returns from such totals: they are then the same on every rank that shares
    the row, and counted once.
    """

    name: str

    def targets(self, batch: Batch) -> int:
        """How many targets a batch (still on the host) has: tokens, pairs or documents."""
        ...

    def extras(self, batch: Batch, segments: Tensor | None) -> Tensor | None:
        """What `token` needs beside logits and labels, `[R, T, ...]`, on the batch's device; None
        for nothing. Carries no gradient.
        """
        ...

    def token(self, view: LogitsView, labels: Tensor, extras: Tensor | None) -> Tensor:
        """The value of each of N tokens, `[N]`."""
        ...

    def reduce(
        self, values: Tensor, batch: Batch, all_sum: AllSum
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss's sum over the targets of a micro-batch, and sums of further metrics by name,
        without gradient.
        """
        ...


def make_objective(settings: ObjectiveSettings, inputs: ObjectiveInputs) -> Objective:
    """The objective that the settings name as their implementation."""
    objective: Objective = settings.load_implementation()(settings, inputs)
    return objective
