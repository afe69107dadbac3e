"""One micro-batch through a model and an objective: the same in training and wherever the objective
is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn

from ingot.data.batches.loader import Batch
from ingot.models.device import Compute, computing_in
from ingot.models.native.decoder import Decoder
from ingot.models.native.head import IGNORE
from ingot.objectives.protocol import Objective, RowSharing


def forward(
    module: nn.Module,
    objective: Objective,
    batch: Batch,
    compute: Compute,
    device: torch.device,
    sharing: RowSharing | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The objective's sums over the targets of `batch` (on the host still): the loss, with its
    graph, and metrics.

    Over ranks that share rows they add up to those of the whole rows.
    """
    plain = one_document_per_row(batch)
    there = (batch if sharing is None else shard_batch(batch, sharing)).to(
        device, non_blocking=True
    )
    segments = None if plain else there.segments
    with nullcontext() if compute == "fp32" else computing_in(compute, device):
        extras = objective.extras(there, segments)
        values = module(
            there.tokens, there.positions, segments, there.labels, objective.token, extras
        )
    return reduce_values(objective, values, there, sharing)


def one_document_per_row(batch: Batch) -> bool:
    """Whether each row is one document, and needs no mask; decided on the host, where the batch
    still is.
    """
    return bool((batch.segments == batch.segments[:, :1]).all())


def shard_batch(batch: Batch, sharing: RowSharing) -> Batch:
    """This rank's part of each row."""
    share = sharing.share
    return replace(
        batch,
        tokens=share(batch.tokens, 0),
        labels=share(batch.labels, IGNORE),
        positions=share(batch.positions, 0),
        segments=share(batch.segments, 0),
    )


def reduce_values(
    objective: Objective, values: Tensor, batch: Batch, sharing: RowSharing | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """`values` of one micro-batch, or of this rank's part of its rows, as sums that add up over
    ranks.
    """
    if sharing is None:
        return objective.reduce(values, batch, lambda part: part)
    needs_whole_rows = False

    def row_total(part: Tensor) -> Tensor:
        nonlocal needs_whole_rows
        needs_whole_rows = True
        return sharing.total(part)

    loss, metrics = objective.reduce(values, batch, row_total)
    if not needs_whole_rows:
        return loss, metrics
    # What is made of a whole row is the same on each of its ranks, and must be counted once.
    return loss / sharing.world, {name: value / sharing.world for name, value in metrics.items()}


class PipelinedBatches:
    """An objective over micro-batches of one shape, for `ingot.parallel.pipeline`. Every rank of
    the pipeline makes one, of the same batches.

    Args:
        before: hears the number of each micro-batch before a stage computes it.
    """

    def __init__(
        self,
        objective: Objective,
        batches: Sequence[Batch],
        compute: Compute,
        device: torch.device,
        sharing: RowSharing | None,
        before: Callable[[int, Batch], None] = lambda index, batch: None,
    ) -> None:
        self._objective, self._compute, self._device, self._sharing, self._before = (
            objective,
            compute,
            device,
            sharing,
            before,
        )
        self._batches = batches
        self._there = [
            (batch if sharing is None else shard_batch(batch, sharing)).to(
                device, non_blocking=True
            )
            for batch in batches
        ]
        self._plain = [one_document_per_row(batch) for batch in batches]
        self._total: Tensor | None = None
        self._told: dict[str, Tensor] = {}

    @property
    def shape(self) -> tuple[int, int, int]:
        rows, tokens = self._there[0].tokens.shape
        return len(self._there), rows, tokens

    def values(self, stage: Decoder, number: int, hidden: Tensor | None) -> Tensor:
        """Of the last stage the objective's values `[B, T]`, of the others hidden states."""
        self._before(number, self._batches[number])
        there = self._there[number]
        segments = None if self._plain[number] else there.segments
        with computing_in(self._compute, self._device):
            extras = self._objective.extras(there, segments) if stage.stage.last else None
            values: Tensor = stage(
                there.tokens if hidden is None else hidden,
                there.positions,
                segments,
                there.labels,
                self._objective.token,
                extras,
            )
        return values

    def loss(self, values: Tensor, number: int) -> Tensor:
        """The sum over the targets of a micro-batch; adds it, and what else the objective tells, to
        `sums`.
        """
        loss, metrics = reduce_values(self._objective, values, self._there[number], self._sharing)
        self._total = loss.detach() + (0.0 if self._total is None else self._total)
        self._told = {name: self._told.get(name, 0.0) + value for name, value in metrics.items()}
        return loss

    def sums(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and metrics of all micro-batches; on a rank without the last stage zeros, of the
        same names.
        """
        if self._total is None:
            there = self._there[0]
            none = torch.zeros(there.labels.shape, device=self._device)
            _, metrics = reduce_values(self._objective, none, there, self._sharing)
            return torch.zeros((), device=self._device), {
                name: torch.zeros_like(value) for name, value in metrics.items()
            }
        return self._total, self._told
