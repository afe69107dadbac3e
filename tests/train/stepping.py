"""One optimizer step over micro-batches that a test has made itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ingot.data.batches.loader import Batch
from ingot.objectives.protocol import Objective
from ingot.parallel.masters import Masters
from ingot.parallel.mesh import Mesh
from ingot.train.step import StepContext, StepControl, StepOutcome, train_step


def one_step(
    module: nn.Module,
    objective: Objective,
    batches: Sequence[Batch],
    masters: Masters,
    optimizer: Optimizer,
    mesh: Mesh,
    step: int = 0,
    dropout: Any = None,
    **knobs: Any,
) -> StepOutcome:
    """`batches` are this rank's; `knobs` are further fields of the StepContext."""
    control = StepControl(lambda step: batches, dropout)
    context = StepContext(module, objective, masters, optimizer, mesh, control, **knobs)
    return train_step(context, step)
