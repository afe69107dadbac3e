"""The forward pass of one micro-batch through model and objective; the same in training and
evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn

from ingot.data.batches.loader import Batch
from ingot.models.device import Compute, computing_in
from ingot.models.native.decoder import Decoder
from ingot.models.native.head import IGNORE
from ingot.models.parameters import is_sharded
from ingot.objectives.protocol import Objective, RowSharing, TwoPassObjective


def forward(
    module: nn.Module,
    objective: Objective,
    batch: Batch,
    compute: Compute,
    device: torch.device,
    sharing: RowSharing | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The objective's sums over the targets of `batch` (still on the host): the loss, with its
    graph, and metrics.

    Over ranks that share rows, the sums add up to those of the whole rows.
    """
    single_documents = batch.single_documents
    on_device = shard_batch(batch, sharing).to(device, non_blocking=True)
    segments = None if single_documents else on_device.segments
    # Weights that are gathered for a layer and let go would stay, all of them, as copies.
    keeps = compute != "fp32" and not is_sharded(module)
    computing = computing_in(compute, device, keeps_casts=keeps)
    with nullcontext() if compute == "fp32" else computing:
        extras = objective.extras(on_device, segments)
        values = module(
            on_device.tokens,
            on_device.positions,
            segments,
            on_device.labels,
            objective.token,
            extras,
        )
    return reduce_values(objective, values, on_device, sharing)


def added(sums: Mapping[str, Tensor], more: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Sums of metrics with those of a further micro-batch; one that either does not have is 0
    there.
    """
    zero = torch.zeros(())
    return {name: sums.get(name, zero) + more.get(name, zero) for name in sorted({*sums, *more})}


def first_pass(
    module: nn.Module,
    objective: TwoPassObjective,
    batches: Iterable[Batch],
    compute: Compute,
    device: torch.device,
    sharing: RowSharing | None = None,
) -> Tensor:
    """The sum of an objective's first pass over this rank's micro-batches; without gradients, in
    evaluation mode. Every rank must have equally many.
    """
    first, was_training = objective.first_pass(), module.training
    total = torch.zeros((), device=device)
    module.eval()
    with torch.no_grad():
        for batch in batches:
            rows = objective.first_rows(batch)
            total += forward(module, first, rows, compute, device, sharing)[0]
    module.train(was_training)
    return total


def shard_batch(batch: Batch, sharing: RowSharing | None) -> Batch:
    """The part of each row that this rank holds, `[B, T]` -> `[B, S]`; all of it if rows are not
    shared.
    """
    if sharing is None:
        return batch
    share = sharing.share
    return replace(
        batch,
        tokens=share(batch.tokens, 0),
        labels=share(batch.labels, IGNORE),
        positions=share(batch.positions, 0),
        segments=share(batch.segments, 0),
        values=None if batch.values is None else share(batch.values, 0),
    )


def reduce_values(
    objective: Objective, values: Tensor, batch: Batch, sharing: RowSharing | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Reduce the `values` of one micro-batch, or of this rank's part of its rows, to sums that add
    up over ranks.
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
    # A value of a whole row is the same on each rank that shares it, and must be counted once.
    return loss / sharing.world, {name: value / sharing.world for name, value in metrics.items()}


class PipelinedBatches:
    """An objective over micro-batches of one shape; implements
    `ingot.parallel.schedules.PipelineWork`. Every rank of the pipeline makes one from the same
    batches.

    Args:
        before: called with each micro-batch and its number before a stage computes it.
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
        self._objective = objective
        self._compute = compute
        self._device = device
        self._sharing = sharing
        self._before = before
        self._batches = batches
        self._on_device = [
            shard_batch(batch, sharing).to(device, non_blocking=True) for batch in batches
        ]
        self._single_documents = [batch.single_documents for batch in batches]
        self._total: Tensor | None = None
        self._metric_sums: dict[str, Tensor] = {}

    @property
    def shape(self) -> tuple[int, int, int]:
        rows, tokens = self._on_device[0].tokens.shape
        return len(self._on_device), rows, tokens

    def values(self, stage: Decoder, number: int, hidden: Tensor | None) -> Tensor:
        """The objective's values `[B, T]` on the last stage, hidden states `[B, T, D]` on
        others.
        """
        self._before(number, self._batches[number])
        on_device = self._on_device[number]
        segments = None if self._single_documents[number] else on_device.segments
        with computing_in(self._compute, self._device):
            extras = self._objective.extras(on_device, segments) if stage.stage.last else None
            values: Tensor = stage(
                on_device.tokens if hidden is None else hidden,
                on_device.positions,
                segments,
                on_device.labels,
                self._objective.token,
                extras,
            )
        return values

    def loss(self, values: Tensor, number: int) -> Tensor:
        """The loss of a micro-batch summed over its targets; added, with the objective's metrics,
        to `sums`.
        """
        loss, metrics = reduce_values(
            self._objective, values, self._on_device[number], self._sharing
        )
        self._total = loss.detach() + (0.0 if self._total is None else self._total)
        self._metric_sums = added(self._metric_sums, metrics)
        return loss

    def sums(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and metrics summed over all micro-batches; zeros with the same names on a rank
        without the last stage.
        """
        if self._total is None:
            on_device = self._on_device[0]
            none = torch.zeros(on_device.labels.shape, device=self._device)
            _, metrics = reduce_values(self._objective, none, on_device, self._sharing)
            return torch.zeros((), device=self._device), {
                name: torch.zeros_like(value) for name, value in metrics.items()
            }
        return self._total, self._metric_sums
