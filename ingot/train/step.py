"""One optimizer step: micro-batches through model, head and objective, one division, clip, finite check, optimizer.

The loss is a *sum* over target tokens and its gradient is summed over micro-batches and ranks in float32; both are divided
once, by the target count of the whole global batch. So the split of a batch, padding and packing never change the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from ingot.data.loader import Batch
from ingot.models.device import Compute, computing_in
from ingot.objectives.pretrain import Pretrain
from ingot.parallel.apply import last_micro_batch, sum_factor
from ingot.parallel.mesh import Mesh


@dataclass(frozen=True)
class StepOutcome:
    """Numbers of one step, still on the device: reading one waits for the step."""

    loss: Tensor
    """Mean over the targets of the global batch, nats."""
    grad_norm: Tensor
    """Norm of the whole gradient before clipping."""
    skipped: Tensor
    """1.0 when loss or gradient were not finite and no weight was changed, else 0.0."""


def train_step(
    module: nn.Module, objective: Pretrain, batches: Sequence[Batch], optimizer: Optimizer, *,
    targets: int, clip_norm: float | None, compute: Compute, mesh: Mesh,
) -> StepOutcome:
    """Take one step over `batches`, this rank's micro-batches; `targets` counts the whole global batch, all ranks."""
    total = torch.zeros((), device=mesh.device)
    for index, batch in enumerate(batches):
        with last_micro_batch(module, is_last=index == len(batches) - 1):
            # A row that is one document needs no mask; decided on the host, where the batch still is.
            packed = bool((batch.segments != batch.segments[:, :1]).any())
            on_device = batch.to(mesh.device, non_blocking=True)
            with computing_in(compute, mesh.device):
                segments = on_device.segments if packed else None
                values = module(on_device.tokens, on_device.positions, segments, on_device.labels, objective.token)
            loss_sum, _ = objective.reduce(values, on_device, mesh.all_sum)
            loss_sum.backward()
            total += loss_sum.detach()
    loss = mesh.all_sum(total) / targets
    grads = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    per_target = sum_factor(module, mesh) / targets
    norm = get_total_norm(grads) * per_target
    skipped = (~(torch.isfinite(norm) & torch.isfinite(loss))).float()
    scale = torch.full_like(norm, per_target)
    if clip_norm is not None:
        scale = scale * (clip_norm / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(grads, scale)
    # Fused kernels leave weights and state alone where this is 1; nothing waits for the device.
    optimizer.grad_scale, optimizer.found_inf = None, skipped  # type: ignore[attr-defined]
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return StepOutcome(loss, norm, skipped)
