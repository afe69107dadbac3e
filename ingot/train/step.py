"""The loop, and all that happens in an optimizer step, in order: fetch, forward and backward,
reduce, clip, update, hooks.

The loss is a *sum* over target tokens and its gradient is summed over micro-batches and ranks in
float32; both are divided once, by the target count of the whole global batch. So the split of a
batch, padding and packing never change the result.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ingot.base.errors import WrongInput
from ingot.base.markers import fingerprint
from ingot.data.batches.loader import Batch
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

SPIKE_DECAY = 0.95
"""Decay of the running mean of gradient norms: about the last 20 steps."""
SPIKE_WARMUP = 20
"""Steps that are taken before any can be a spike: gradients are large in the beginning."""


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
    """Further metrics of the objective, means over the targets of the global batch."""


@dataclass(frozen=True)
class StepInfo:
    """What hooks are given."""

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
    """Where the loop stood when it ended."""

    step: int
    """Steps done."""
    outcome: StepOutcome | None
    """Of the last step; None where none was done."""
    stopped: bool = False
    """Whether a request to stop ended it."""


class DropoutSeeds:
    """Seeds dropout before each micro-batch, so that a resumed run repeats its masks.

    The native model's masks (those of adapters) are a function of seed, step and sample. The models
    of transformers draw theirs from torch's generator, which is seeded here for each micro-batch:
    they depend on how the batch is dealt over ranks, but not on where the run was resumed.
    """

    def __init__(self, model: AnyModel, seed: int, mesh: Mesh) -> None:
        self._seed, self._mesh, self._is_native = seed, mesh, isinstance(model, Decoder)
        self._adapter = lora_state(model) if isinstance(model, Decoder) else None

    def begin_micro_batch(self, step: int, index: int, batch: Batch) -> None:
        """Micro-batch `index` of `step` (both from 0) is computed next."""
        if self._adapter is not None:
            # A preference has two rows of tensors, each with masks of its own.
            sides = len(batch.tokens) // len(batch.rows)
            rows = (batch.rows[:, None] * sides + torch.arange(sides)).flatten()  # [R]
            self._adapter.begin_batch(step, rows.to(self._mesh.device))
        elif not self._is_native:
            key = fingerprint([self._seed, step, index, self._mesh.rank])
            torch.manual_seed(int(key, 16) % 2**63)


class StepControl:
    """Where the micro-batches of a step come from, and what may stop the loop before it. This base
    class only fetches, which is enough for trials and proofs.
    """

    def __init__(
        self, fetch: Callable[[int], Sequence[Batch]], dropout: DropoutSeeds | None = None
    ) -> None:
        self._fetch, self._dropout = fetch, dropout

    def fetch(self, step: int) -> Sequence[Batch]:
        """This rank's micro-batches of `step`, on the host."""
        return self._fetch(step)

    def votes(self) -> Sequence[bool]:
        """What this rank has to tell all others before a step."""
        return ()

    def must_stop(self, votes: Sequence[bool]) -> bool:
        """Whether the loop ends before this step; of each vote, whether any rank said so."""
        return False

    def begin_micro_batch(self, step: int, index: int, batch: Batch) -> None:
        """Called before micro-batch `index` of `step` is computed."""
        if self._dropout is not None:
            self._dropout.begin_micro_batch(step, index, batch)


class SpikeDetector:
    """Tells spikes of the gradient norm from a running mean over the steps that were taken, on the
    device: nothing waits for the host. `state` makes a resumed run decide alike.
    """

    def __init__(
        self, factor: float, device: torch.device, state: Mapping[str, Any] | None = None
    ) -> None:
        self._factor = factor
        self._mean = torch.tensor(state["mean"] if state else 0.0, device=device)
        self._seen = torch.tensor(state["seen"] if state else 0.0, device=device)

    def judge(self, norm: Tensor, not_finite: Tensor) -> Tensor:
        """True where this step is not to be taken: because it is `not_finite`, or its norm is a
        spike. The norms of all other steps go into the mean.
        """
        spike = (self._seen >= SPIKE_WARMUP) & (norm > self._factor * self._mean)
        skipped = not_finite | spike
        # A plain mean over the first steps, then a decaying one.
        share = torch.where(
            self._seen < SPIKE_WARMUP, 1 / (self._seen + 1), torch.full_like(norm, 1 - SPIKE_DECAY)
        )
        mean = self._mean + share * (norm - self._mean)
        self._mean = torch.where(skipped, self._mean, mean)
        self._seen = torch.where(skipped, self._seen, self._seen + 1)
        return skipped

    def state(self) -> dict[str, float]:
        """For the checkpoint. Waits for the device."""
        return {"mean": float(self._mean), "seen": float(self._seen)}


@dataclass
class StepContext:
    """What all steps of a training share."""

    module: nn.Module
    """The wrapped model, which is called."""
    objective: Objective
    masters: Masters
    optimizer: Optimizer
    mesh: Mesh
    control: StepControl
    compute: Compute = "fp32"
    clip_norm: float | None = None
    learning_rate: Callable[[int], float] | None = None
    """Step (from 0) -> learning rate; None leaves the optimizer as it is."""
    spikes: SpikeDetector | None = None
    hooks: Sequence[Hook] = ()
    samples: int = 0
    """Sequences in a step, over all ranks."""
    tokens: int = 0
    """Tokens in a step, over all ranks, padding included."""

    def __post_init__(self) -> None:
        self.row_sharing = row_sharing(self.mesh)
        self.gradient_factor = sum_factor(self.module, self.mesh)
        """What turns the gradients that a wrapper leaves into sums over ranks."""


def run_steps(context: StepContext, first: int, last: int) -> LoopEnd:
    """Do the optimizer steps from `first` (so many are done) until `last` are done, a hook ends
    training, or the control stops it. This function is the whole of a step, in its order.

    Raises:
        WrongInput: a step has no target in its global batch.
    """
    mesh, objective, optimizer = context.mesh, context.objective, context.optimizer
    masters, control = context.masters, context.control
    outcome: StepOutcome | None = None
    for step in range(first, last):
        began = time.monotonic()

        # Fetch this rank's micro-batches. The hosts agree on the targets of the global batch, and
        # on whether to stop, without waiting for a device.
        batches = control.fetch(step)
        targets, votes = global_targets(objective, batches, mesh, *control.votes())
        if control.must_stop(votes):
            return LoopEnd(step, outcome, stopped=True)
        if not targets:
            raise WrongInput(
                f"step {step + 1:,} has not one target in its {context.samples} rows; run"
                " `ingot show mask` on the recipe"
            )

        # Forward and backward, micro-batch by micro-batch: sums over this rank's targets.
        if context.learning_rate is not None:
            for group in optimizer.param_groups:
                group["lr"] = context.learning_rate(step)
        loss_sum, metric_sums = accumulate_gradients(context, step, batches)

        # Reduce: sums over ranks, divided once by the targets of the global batch.
        sums = mesh.losses.all_sum(torch.stack([loss_sum, *metric_sums.values()]))
        loss, *means = (sums / targets).unbind()
        masters.collect()
        per_target = context.gradient_factor / targets
        norm = masters.norm() * per_target

        # Clip; and decide, on the device, whether this step is taken.
        skipped = ~(torch.isfinite(norm) & torch.isfinite(loss))
        if context.spikes is not None:
            skipped = context.spikes.judge(norm, skipped)
        scale = torch.full_like(norm, per_target)
        if context.clip_norm is not None:
            scale = scale * (context.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        masters.scale(scale)

        # Update. Fused kernels leave weights and state alone where `found_inf` is 1.
        found_inf = masters.flag_for_optimizer(skipped.float())
        optimizer.grad_scale, optimizer.found_inf = None, found_inf  # type: ignore[attr-defined]
        optimizer.step()
        masters.publish()
        outcome = StepOutcome(
            loss, norm, skipped.float(), dict(zip(metric_sums, means, strict=True))
        )

        # Hooks: every one acts, whatever another one answers.
        lr, seconds = float(optimizer.param_groups[0]["lr"]), time.monotonic() - began
        info = StepInfo(step + 1, context.samples, context.tokens, outcome, lr, seconds)
        answers = [hook.after_step(info) for hook in context.hooks]
        if any(answers):
            return LoopEnd(step + 1, outcome)
    return LoopEnd(last, outcome)


def train_step(context: StepContext, step: int = 0) -> StepOutcome:
    """Step `step` alone, outside of a training."""
    outcome = run_steps(context, step, step + 1).outcome
    assert outcome is not None, "the control stopped a step that was asked for"
    return outcome


def global_targets(
    objective: Objective, batches: Sequence[Batch], mesh: Mesh, *mine: bool
) -> tuple[int, list[bool]]:
    """Targets of the global batch, each counted once, and for each vote of `mine` whether any rank
    says so. Between hosts; the same on all ranks.
    """
    total, *votes = mesh.agree(
        sum(objective.targets(batch) for batch in batches), *map(float, mine)
    )
    # Ranks that share the rows of others (context, tensor, pipeline) have counted the same targets.
    return round(total * mesh.data.world / mesh.world), [count > 0 for count in votes]


def accumulate_gradients(
    context: StepContext, step: int, batches: Sequence[Batch]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sums of loss and metrics over this rank's micro-batches; their gradients are left with the
    parameters.
    """
    module, objective, mesh = context.module, context.objective, context.mesh
    device, sharing = mesh.device, context.row_sharing
    if isinstance(module, Pipeline):
        begin = partial(context.control.begin_micro_batch, step)
        work = PipelinedBatches(objective, batches, context.compute, device, sharing, begin)
        module.run(work, backward=True)
        return work.sums()
    total = torch.zeros((), device=device)
    metric_sums: dict[str, Tensor] = {}
    for index, batch in enumerate(batches):
        context.control.begin_micro_batch(step, index, batch)
        with (
            last_micro_batch(module, mesh, is_last=index == len(batches) - 1)
            if mesh.world > 1
            else contextlib.nullcontext()
        ):
            loss_sum, metrics = forward(module, objective, batch, context.compute, device, sharing)
            loss_sum.backward()
        context.masters.accumulate()
        total += loss_sum.detach()
        metric_sums = {name: metric_sums.get(name, 0.0) + value for name, value in metrics.items()}
    return total, metric_sums
