"""One micro-batch through a model and an objective: the same in training and wherever the objective
is measured.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from ingot.data.loader import Batch
from ingot.models.device import Compute, computing_in
from ingot.models.head import IGNORE
from ingot.objectives.objective import Objective, RowSharing


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
    plain = is_plain(batch)
    there = (batch if sharing is None else cut(batch, sharing)).to(device, non_blocking=True)
    segments = None if plain else there.segments
    with computing_in(compute, device):
        extras = objective.extras(there, segments)
        values = module(
            there.tokens, there.positions, segments, there.labels, objective.token, extras
        )
    return reduced(objective, values, there, sharing)


def is_plain(batch: Batch) -> bool:
    """Whether each row is one document, and needs no mask; decided on the host, where the batch
    still is.
    """
    return bool((batch.segments == batch.segments[:, :1]).all())


def cut(batch: Batch, sharing: RowSharing) -> Batch:
    """This rank's part of each row."""
    share = sharing.share
    return replace(
        batch,
        tokens=share(batch.tokens, 0),
        labels=share(batch.labels, IGNORE),
        positions=share(batch.positions, 0),
        segments=share(batch.segments, 0),
    )


def reduced(
    objective: Objective, values: Tensor, batch: Batch, sharing: RowSharing | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """`values` of one micro-batch, or of this rank's part of its rows, as sums that add up over
    ranks.
    """
    if sharing is None:
        return objective.reduce(values, batch, lambda part: part)
    loss, metrics = objective.reduce(values, batch, sharing.total)
    if objective.can_be_staged:
        return loss, metrics
    # A value that needs the whole row is the same on each of its ranks.
    return loss / sharing.world, {name: value / sharing.world for name, value in metrics.items()}
