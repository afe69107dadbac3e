"""The objective itself on held-out rows: what training sees of its validation rows, whatever the way of training."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from dataclasses import replace

import torch
from torch import nn

from ingot.base.errors import WrongInput
from ingot.data.loader import Batch, fixed_batches
from ingot.data.rows import IGNORE, Rows
from ingot.data.samples import Samples
from ingot.models.device import Compute
from ingot.objectives.forward import forward
from ingot.objectives.objective import Objective
from ingot.parallel.mesh import Mesh
from ingot.parallel.sharing import row_sharing


def held_out_objective(
    model: nn.Module, objective: Objective, rows: Rows | Samples, count: int, micro_batch: int, compute: Compute, mesh: Mesh
) -> dict[str, float]:
    """`loss` and the objective's further metrics, each a mean over the targets of the first `count` rows. Collective, the same on every rank.

    Raises:
        WrongInput: the rows have no target at all.
    """
    count = min(count, len(rows))
    data, sharing = mesh.data, row_sharing(mesh)
    mine = list(range(count * data.rank // data.world, count * (data.rank + 1) // data.world))
    device, targets = mesh.device, 0.0
    sums: dict[str, float] = defaultdict(float)
    with torch.no_grad():
        # All ranks look equally often: a model that is spread over them is gathered for each look.
        looks = math.ceil(math.ceil(count / data.world) / micro_batch)
        batches = itertools.chain(fixed_batches(rows, mine, micro_batch), itertools.repeat(_nothing(rows, micro_batch)))
        for batch in itertools.islice(batches, looks):
            total, metrics = forward(model, objective, batch, compute, device, sharing)
            for name, value in {"loss": total, **metrics}.items():
                sums[name] += float(value)
            # Ranks that share rows share the count, too.
            targets += objective.targets(batch) / mesh.context.world
    names = list(sums)
    *found, whole = mesh.losses.agree(*(sums[name] for name in names), targets)
    if not whole:
        raise WrongInput("the validation rows have not one target; set data.validation to more documents")
    return {name: value / whole for name, value in zip(names, found, strict=True)}


def _nothing(rows: Rows | Samples, micro_batch: int) -> Batch:
    """A batch of the usual shape without a target."""
    batch = next(fixed_batches(rows, [0], micro_batch))
    return replace(batch, labels=torch.full_like(batch.labels, IGNORE), rows=torch.full_like(batch.rows, -1))
