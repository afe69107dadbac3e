"""The objective itself on held-out rows: what training sees of its validation rows, whatever the way of training."""

from __future__ import annotations

from collections import defaultdict

import torch

from ingot.base.errors import WrongInput
from ingot.data.loader import fixed_batches
from ingot.data.rows import Rows
from ingot.data.samples import Samples
from ingot.models.device import Compute
from ingot.models.kinds import Model
from ingot.objectives.forward import forward
from ingot.objectives.objective import Objective
from ingot.parallel.mesh import Mesh


def held_out_objective(
    model: Model, objective: Objective, rows: Rows | Samples, count: int, micro_batch: int, compute: Compute, mesh: Mesh
) -> dict[str, float]:
    """`loss` and the objective's further metrics, each a mean over the targets of the first `count` rows. Collective, the same on every rank.

    Raises:
        WrongInput: the rows have no target at all.
    """
    count = min(count, len(rows))
    mine = list(range(count * mesh.rank // mesh.world, count * (mesh.rank + 1) // mesh.world))
    device, targets = next(model.parameters()).device, 0
    sums: dict[str, float] = defaultdict(float)
    with torch.no_grad():
        # A rank without a row of its own looks at one all the same, to know what there is to add nothing to.
        for batch in fixed_batches(rows, mine or [0], micro_batch):
            total, metrics = forward(model, objective, batch, compute, device)
            weight = 1 if mine else 0
            for name, value in {"loss": total, **metrics}.items():
                sums[name] += weight * float(value)
            targets += weight * objective.targets(batch)
    names = list(sums)
    *found, whole = mesh.agree(*(sums[name] for name in names), float(targets))
    if not whole:
        raise WrongInput("the validation rows have not one target; set data.validation to more documents")
    return {name: value / whole for name, value in zip(names, found, strict=True)}
