"""The interface of a training objective: all that the training loop knows about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from ingot.base.errors import WrongInput
from ingot.config.sections.objective import ObjectiveSettings
from ingot.data.batches.loader import Batch
from ingot.models.native.decoder import Decoder
from ingot.models.native.head import LogitsView

AllSum = Callable[[Tensor], Tensor]
"""Sums over the ranks that hold parts of one row."""


class RowSharing(Protocol):
    """How ranks share rows."""

    @property
    def world(self) -> int:
        """The number of ranks that hold a part of each row."""
        ...

    def share(self, tensor: Tensor, fill: int) -> Tensor:
        """This rank's part of `[B, T]`, padded with `fill` where it does not divide."""
        ...

    def total(self, part: Tensor) -> Tensor:
        """The sum over these ranks; gradients are summed over them in backward as well."""
        ...


@dataclass(frozen=True)
class ObjectiveInputs:
    """What an objective may need beside its settings; filled in as its settings ask for it."""

    reference: Tensor | None = None
    """With `needs_reference`: summed log-probabilities of (chosen, rejected) under the reference,
    `[rows, 2]` by row number, on the training device.
    """
    teacher: Decoder | None = None
    """With `needs_teacher`: in evaluation mode, sharded over the ranks as the trained model is."""


class Objective(Protocol):
    """Per-token values in, (sum, metrics) out.

    The model's head calls `token` with a chunk of tokens; `reduce` receives all values of a
    micro-batch. Everything is a *sum* over what `targets` counts, never a mean, so that any split
    of a batch gives the same result. An objective whose loss needs a row's total calls `all_sum`,
    and must compute everything that it returns from such totals: they are then the same on every
    rank that shares the row, and are counted once.
    """

    def targets(self, batch: Batch) -> int:
        """The number of targets in a batch (still on the host): tokens, pairs or documents."""
        ...

    def extras(self, batch: Batch, segments: Tensor | None) -> Tensor | None:
        """What `token` needs beside logits and labels, `[R, T, ...]` on the batch's device, without
        gradient; None for nothing.
        """
        ...

    def token(self, view: LogitsView, labels: Tensor, extras: Tensor | None) -> Tensor:
        """The value of each of a chunk of N tokens, `[N]`; labels `[N]`, extras `[N, ...]`."""
        ...

    def reduce(
        self, values: Tensor, batch: Batch, all_sum: AllSum
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss summed over the targets of a micro-batch, and sums of further metrics by name,
        without gradient: the same names for every micro-batch, 0 where it has nothing of one.
        """
        ...


@runtime_checkable
class TwoPassObjective(Objective, Protocol):
    """An objective with a term of the whole global batch, which is known only after a first pass
    over all of its micro-batches. It is summed over all ranks before any loss is computed, so that
    no split of the batch changes it.
    """

    def first_pass(self) -> Objective:
        """What is computed in the first pass, without gradients: its loss is what is summed."""
        ...

    def first_rows(self, batch: Batch) -> Batch:
        """The rows that the first pass computes."""
        ...

    def second_rows(self, batch: Batch) -> Batch:
        """The rows that the loss is computed of."""
        ...

    def finish_first_pass(self, mean: Tensor) -> None:
        """Take the mean over the targets of the global batch, a scalar on the training device."""
        ...


def make_objective(settings: ObjectiveSettings, inputs: ObjectiveInputs) -> Objective:
    """The objective that the settings name as their implementation.

    Raises:
        WrongInput: it lacks a method of an objective.
    """
    objective: Objective = settings.load_implementation()(settings, inputs)
    for name in ("targets", "extras", "token", "reduce"):
        if not callable(getattr(objective, name, None)):
            raise WrongInput(
                f"objective.kind {settings.kind} is a {type(objective).__name__}, which has no"
                f" method {name}; an objective has all of ingot.objectives.protocol.Objective"
            )
    return objective
