"""One optimizer step: micro-batches through model, head and objective, one division, clip, finite
check, optimizer.

The loss is a *sum* over target tokens and its gradient is summed over micro-batches and ranks in
float32; both are divided once, by the target count of the whole global batch. So the split of a
batch, padding and packing never change the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ingot.base.markers import fingerprint
from ingot.data.loader import Batch
from ingot.models.adapters.lora import lora_state
from ingot.models.device import Compute
from ingot.models.kinds import AnyModel
from ingot.models.native.decoder import Decoder
from ingot.objectives.forward import PipelinedBatches, forward
from ingot.objectives.protocol import Objective
from ingot.parallel.apply import last_micro_batch, sum_factor
from ingot.parallel.masters import Masters
from ingot.parallel.mesh import Mesh
from ingot.parallel.pipeline import Pipeline
from ingot.parallel.rows import row_sharing


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
        work = PipelinedBatches(objective, batches, compute, mesh.device, row_sharing(mesh), before)
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


@dataclass(frozen=True)
class Work:
    """What one step needs: this rank's micro-batches, and what all ranks agreed on."""

    batches: Sequence[Batch]
    targets: int
    """Target tokens of the whole global batch."""
    signum: int
    """The signal that asked some rank to stop, or 0."""
    began: float
    """Monotonic time at which the step began, before its data was there."""


@dataclass(frozen=True)
class StepInfo:
    """What hooks are told."""

    step: int
    """Steps done, this one included."""
    samples: int
    """Sequences in this step, over all ranks."""
    tokens: int
    """Tokens in this step, over all ranks, padding included."""
    outcome: StepOutcome
    lr: float
    seconds: float
    """From the start of the step to its end on the host, waiting for data included."""


class Hook(Protocol):
    """A side effect of training."""

    def after_step(self, info: StepInfo) -> bool:
        """Called on every rank after every step; True ends training, and every rank must say the
        same.
        """
        ...

    def close(self) -> None:
        """Called once, in reverse order, however training ends."""
        ...


@dataclass(frozen=True)
class LoopEnd:
    """Where the loop stood when it ended; `signum` is 0 unless a signal ended it."""

    step: int
    signum: int


def run_loop(
    first: int,
    last: int,
    fetch: Callable[[int], Work],
    do_step: Callable[[int, Work], StepInfo],
    hooks: Sequence[Hook],
    judge: Callable[[int, StepOutcome], None] = lambda step, outcome: None,
) -> LoopEnd:
    """Turn from step `first` (so many are done) until `last` are done, a hook ends it, or a signal
    came on any rank.

    `judge` hears the number (from 0) and the outcome of each step while the next one runs, so that
    the device never waits for the host.
    """
    before: StepOutcome | None = None
    for step in range(first, last):
        work = fetch(step)
        if work.signum:
            return LoopEnd(step, work.signum)
        info = do_step(step, work)
        if before is not None:
            judge(step - 1, before)
        before = info.outcome
        over = [
            hook.after_step(info) for hook in hooks
        ]  # every hook acts, whatever another one says
        if any(over):
            return LoopEnd(info.step, 0)
    return LoopEnd(last, 0)


def seed_dropout(
    model: AnyModel, seed: int, step: int, micro_batch: int, batch: Batch, mesh: Mesh
) -> None:
    """Say which micro-batch comes next.

    The native model's masks (those of adapters) depend on the sample alone. The models of
    transformers draw theirs from torch's generator, which is seeded anew here, so that they depend
    on how the batch was dealt, but not on where the run was resumed.
    """
    if isinstance(model, Decoder):
        if (state := lora_state(model)) is not None:
            state.begin_batch(step, _row_of_each(batch).to(mesh.device))
        return
    torch.manual_seed(int(fingerprint([seed, step, micro_batch, mesh.rank]), 16) % 2**63)


def _row_of_each(batch: Batch) -> Tensor:
    """A number for each row of tensors, `[R]`, the same wherever its sample is computed; a
    preference has two rows.
    """
    sides = len(batch.tokens) // len(batch.rows)
    return (batch.rows[:, None] * sides + torch.arange(sides)).flatten()


DECAY = 0.95
"""Of the running mean: about the last 20 steps."""


FIRST = 20
"""Steps that are taken before any can be a spike: gradients are large in the beginning."""


class Spikes:
    """Follows the norms of the steps that are taken. `state` makes a resumed run decide alike."""

    def __init__(
        self, factor: float, device: torch.device, state: Mapping[str, Any] | None = None
    ) -> None:
        self._factor = factor
        self._mean = torch.tensor(state["mean"] if state else 0.0, device=device)
        self._seen = torch.tensor(state["seen"] if state else 0.0, device=device)

    def judge(self, norm: Tensor, wrong: Tensor) -> Tensor:
        """True where this step is not to be taken: because it is `wrong` anyway, or its norm is a
        spike. The others count for the mean.
        """
        spike = (self._seen >= FIRST) & (norm > self._factor * self._mean)
        skipped = wrong | spike
        share = torch.where(
            self._seen < FIRST, 1 / (self._seen + 1), torch.full_like(norm, 1 - DECAY)
        )  # a plain mean to begin with
        mean = self._mean + share * (norm - self._mean)
        self._mean = torch.where(skipped, self._mean, mean)
        self._seen = torch.where(skipped, self._seen, self._seen + 1)
        return skipped

    def state(self) -> dict[str, float]:
        """Waits for the device."""
        return {"mean": float(self._mean), "seen": float(self._seen)}
