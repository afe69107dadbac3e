"""One optimizer step: micro-batches through model, head and objective, one division, clip, finite
check, optimizer.

The loss is a *sum* over target tokens and its gradient is summed over micro-batches and ranks in
float32; both are divided once, by the target count of the whole global batch. So the split of a
batch, padding and packing never change the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ingot.data.loader import Batch
from ingot.models.device import Compute
from ingot.objectives.forward import StagedBatches, forward
from ingot.objectives.protocol import Objective
from ingot.parallel.apply import last_micro_batch, sum_factor
from ingot.parallel.masters import Masters
from ingot.parallel.mesh import Mesh
from ingot.parallel.pipeline import Pipeline
from ingot.parallel.rows import row_sharing
from ingot.train.spikes import Spikes


@dataclass(frozen=True)
class StepOutcome:
    """Numbers of one step, still on the device: reading one waits for the step."""

    loss: Tensor
    """Mean over the targets of the global batch, nats."""
    grad_norm: Tensor
    """Norm of the whole gradient before clipping."""
    skipped: Tensor
    """1.0 when no weight was changed, since loss or gradient were not finite, or the gradient a
    spike, else 0.0.
    """
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """What else the objective tells, means over the targets of the global batch."""


def global_targets(
    objective: Objective, batches: Sequence[Batch], mesh: Mesh, *mine: bool
) -> tuple[int, list[bool]]:
    """Targets of the global batch, each counted once, and for each vote of `mine` whether any rank
    says so. Between hosts; the same on all ranks.
    """
    total, *votes = mesh.agree(
        sum(objective.targets(batch) for batch in batches), *map(float, mine)
    )
    # Ranks that are no share of the batch of their own have the same rows as others.
    return round(total * mesh.data.world / mesh.world), [count > 0 for count in votes]


def train_step(
    module: nn.Module,
    objective: Objective,
    batches: Sequence[Batch],
    masters: Masters,
    optimizer: Optimizer,
    *,
    targets: int,
    clip_norm: float | None,
    compute: Compute,
    mesh: Mesh,
    before: Callable[[int, Batch], None] = lambda index, batch: None,
    spikes: Spikes | None = None,
) -> StepOutcome:
    """Take one step over `batches`, this rank's micro-batches; `targets` counts the whole global
    batch, all ranks.

    `before` hears the number of each micro-batch before it is computed: dropout is seeded there. A
    spike is not taken where `spikes` are watched.
    """
    total, told = _backward(module, objective, batches, masters, compute, mesh, before)
    loss, *means = (mesh.losses.all_sum(torch.stack([total, *told.values()])) / targets).unbind()
    masters.collect()
    per_target = sum_factor(module, mesh) / targets
    norm = masters.norm() * per_target
    wrong = ~(torch.isfinite(norm) & torch.isfinite(loss))
    skipped = (wrong if spikes is None else spikes.judge(norm, wrong)).float()
    scale = torch.full_like(norm, per_target)
    if clip_norm is not None:
        scale = scale * (clip_norm / (norm + 1e-6)).clamp(max=1.0)
    masters.scale(scale)
    # Fused kernels leave weights and state alone where this is 1; nothing waits for the device.
    optimizer.grad_scale, optimizer.found_inf = None, masters.told(skipped)  # type: ignore[attr-defined]
    optimizer.step()
    masters.publish()
    return StepOutcome(loss, norm, skipped, dict(zip(told, means, strict=True)))


def _backward(
    module: nn.Module,
    objective: Objective,
    batches: Sequence[Batch],
    masters: Masters,
    compute: Compute,
    mesh: Mesh,
    before: Callable[[int, Batch], None],
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sums of loss and metrics over this rank's micro-batches; their gradients are left with the
    parameters.
    """
    if isinstance(module, Pipeline):
        work = StagedBatches(objective, batches, compute, mesh.device, row_sharing(mesh), before)
        module.run(work, backward=True)
        return work.sums()
    total = torch.zeros((), device=mesh.device)
    told: dict[str, Tensor] = {}
    sharing = row_sharing(mesh)
    for index, batch in enumerate(batches):
        before(index, batch)
        with last_micro_batch(module, mesh, is_last=index == len(batches) - 1):
            loss_sum, metrics = forward(module, objective, batch, compute, mesh.device, sharing)
            loss_sum.backward()
        masters.accumulate()
        total += loss_sum.detach()
        told = {name: told.get(name, 0.0) + value for name, value in metrics.items()}
    return total, told
