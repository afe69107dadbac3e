"""One micro-batch through a model and an objective: the same in training and wherever the objective is measured."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ingot.data.loader import Batch
from ingot.models.device import Compute, computing_in
from ingot.objectives.objective import AllSum, Objective


def forward(
    module: nn.Module, objective: Objective, batch: Batch, compute: Compute, device: torch.device, row_sum: AllSum = lambda part: part
) -> tuple[Tensor, dict[str, Tensor]]:
    """The objective's sums over the targets of `batch` (on the host still): the loss, with its graph, and metrics.

    `row_sum` adds over the ranks that hold parts of one row; alone where each rank has whole rows.
    """
    # A row that is one document needs no mask; decided on the host, where the batch still is.
    plain = bool((batch.segments == batch.segments[:, :1]).all())
    there = batch.to(device, non_blocking=True)
    segments = None if plain else there.segments
    with computing_in(compute, device):
        extras = objective.extras(there, segments)
        values = module(there.tokens, there.positions, segments, there.labels, objective.token, extras)
    return objective.reduce(values, there, row_sum)
