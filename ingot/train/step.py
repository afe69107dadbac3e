"""The training loop and the whole of an optimizer step, in order: fetch, forward and backward,
reduce, clip, update, hooks.

The loss is a *sum* over target tokens, and its gradient is summed over micro-batches and ranks in
float32; both are divided once, by the target count of the global batch. Gradient accumulation, the
number of ranks, padding and packing therefore never change the result.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

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
from ingot.objectives.forward import PipelinedBatches, added, first_pass, forward
from ingot.objectives.protocol import Objective, TwoPassObjective
from ingot.parallel.apply import last_micro_batch, sum_factor
from ingot.parallel.masters import Masters
from ingot.parallel.mesh import Mesh
from ingot.parallel.pipeline import Pipeline
from ingot.parallel.rows import row_sharing
from ingot.train.balance import ExpertLoad, LoadBalance
from ingot.train.metrics import MetricNames

SPIKE_DECAY = 0.95
"""Decay of the running mean of gradient norms: about the last 20 steps."""
SPIKE_WARMUP = 20
"""Steps that are taken before any can be a spike: gradients are large in the beginning."""


@dataclass(frozen=True)
class StepOutcome:
    """Results of one step, still on the device: reading one synchronises with the device."""

    loss: Tensor
    """Mean over the targets of the global batch, in nats."""
    grad_norm: Tensor
    """Norm of the global gradient before clipping."""
    skipped: Tensor
    """1.0 if the step changed no weight because loss or gradient was not finite or the gradient
    norm was a spike, else 0.0.
    """
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """Further metrics of the objective, means over the targets of the global batch."""
    load: ExpertLoad | None = None
    """The load of experts; None without any."""


class BatchCounts(NamedTuple):
    """What is in a global batch: targets, tokens of text, and what the model reads with padding."""

    targets: int
    tokens: int
    positions: int


@dataclass(frozen=True)
class StepInfo:
    """What hooks receive after each step."""

    step: int
    """Steps done, including this one."""
    samples: int
    """Sequences in this step, over all ranks."""
    counts: BatchCounts
    """Of this step's batch, over all ranks."""
    outcome: StepOutcome
    lr: float


class Hook(Protocol):
    """A side effect of training."""

    def after_step(self, info: StepInfo) -> bool:
        """Called on every rank after every step. True ends training; all ranks must return the
        same.
        """
        ...

    def close(self) -> None:
        """Called once, in reverse order of the hooks, however training ends."""
        ...


@dataclass(frozen=True)
class LoopEnd:
    """The state of the loop when it ended."""

    step: int
    """Steps done."""
    outcome: StepOutcome | None
    """Of the last step; None if no step was done."""
    stopped: bool = False
    """Whether a request to stop ended the loop."""


class DropoutSeeds:
    """Seeds dropout and noise before each micro-batch, so that a resumed run repeats them.

    In the native model they are a function of seed, step and sample: masks of its adapters, noise
    of its embeddings. Transformers
    models draw from torch's generator, which is seeded here for each micro-batch: their masks
    depend on how the batch is divided among ranks, but not on where the run was resumed.
    """

    def __init__(self, model: AnyModel, seed: int, mesh: Mesh) -> None:
        self._seed, self._mesh, self._is_native = seed, mesh, isinstance(model, Decoder)
        self._adapter = lora_state(model) if isinstance(model, Decoder) else None
        self._noise = model.noise if isinstance(model, Decoder) else None

    def begin_micro_batch(self, step: int, index: int, batch: Batch) -> None:
        """Called before micro-batch `index` of `step` (both from 0) is computed."""
        if self._adapter is not None or self._noise is not None:
            # A preference sample is two rows of the batch, each with a mask of its own.
            sides = len(batch.tokens) // len(batch.rows)
            rows = (batch.rows[:, None] * sides + torch.arange(sides)).flatten()  # [R]
            rows = rows.to(self._mesh.device)
            if self._adapter is not None:
                self._adapter.begin_batch(step, rows)
            if self._noise is not None:
                self._noise.begin_batch(step, rows, batch.segments.to(self._mesh.device))
        if not self._is_native:
            key = fingerprint([self._seed, step, index, self._mesh.rank])
            torch.manual_seed(int(key, 16) % 2**63)


class StepControl:
    """Supplies the micro-batches of a step and may stop the loop before it. This base class only
    fetches, which is enough for trial steps and proofs.
    """

    def __init__(
        self, fetch: Callable[[int], Sequence[Batch]], dropout: DropoutSeeds | None = None
    ) -> None:
        self._fetch, self._dropout = fetch, dropout

    def fetch(self, step: int) -> Sequence[Batch]:
        """This rank's micro-batches of `step`, in host memory."""
        return self._fetch(step)

    def votes(self) -> Sequence[bool]:
        """Flags of this rank that are combined over all ranks before a step."""
        return ()

    def must_stop(self, votes: Sequence[bool]) -> bool:
        """Whether to end the loop before this step. `votes`: each flag, true if any rank set it."""
        return False

    def begin_micro_batch(self, step: int, index: int, batch: Batch) -> None:
        """Called before micro-batch `index` of `step` is computed."""
        if self._dropout is not None:
            self._dropout.begin_micro_batch(step, index, batch)


class SpikeDetector:
    """Detects spikes of the gradient norm against a running mean over the steps taken. It works on
    the device without synchronising; `state` makes a resumed run decide the same way.
    """

    def __init__(
        self, factor: float, device: torch.device, state: Mapping[str, Any] | None = None
    ) -> None:
        self._factor = factor
        self._mean = torch.tensor(state["mean"] if state else 0.0, device=device)
        self._seen = torch.tensor(state["seen"] if state else 0.0, device=device)

    def judge(self, norm: Tensor, not_finite: Tensor) -> Tensor:
        """True if this step must be skipped: it is `not_finite`, or its norm is a spike. The norms
        of all other steps enter the running mean, but for those of 0: answers of equal rewards give
        no gradient, and beside them each real one would be a spike.
        """
        spike = (self._seen >= SPIKE_WARMUP) & (norm > self._factor * self._mean)
        skipped = not_finite | spike
        # A plain mean over the first steps, then an exponentially decaying one.
        share = torch.where(
            self._seen < SPIKE_WARMUP, 1 / (self._seen + 1), torch.full_like(norm, 1 - SPIKE_DECAY)
        )
        mean = self._mean + share * (norm - self._mean)
        left_out = skipped | (norm == 0)
        self._mean = torch.where(left_out, self._mean, mean)
        self._seen = torch.where(left_out, self._seen, self._seen + 1)
        return skipped

    def state(self) -> dict[str, float]:
        """The values to store in the checkpoint. Synchronises with the device."""
        return {"mean": float(self._mean), "seen": float(self._seen)}


@dataclass
class StepContext:
    """What all steps of a training share."""

    module: nn.Module
    """The wrapped model, whose forward is called."""
    objective: Objective
    masters: Masters
    optimizer: Optimizer
    mesh: Mesh
    control: StepControl
    compute: Compute = "fp32"
    clip_norm: float | None = None
    learning_rate: Callable[[int], float] | None = None
    """Maps the step (from 0) to the learning rate; None leaves the optimizer's rate as it is."""
    spikes: SpikeDetector | None = None
    balance: LoadBalance | None = None
    """None for a model without experts."""
    hooks: Sequence[Hook] = ()
    samples: int = 0
    """Sequences in a step, over all ranks."""
    metrics: MetricNames = field(default_factory=MetricNames)

    def __post_init__(self) -> None:
        self.row_sharing = row_sharing(self.mesh)
        self.gradient_factor = sum_factor(self.module, self.mesh)
        """Factor that turns the gradients left by the wrapper into sums over ranks."""


def run_steps(context: StepContext, first: int, last: int) -> LoopEnd:
    """Run optimizer steps `first` to `last` - 1 (from 0; `first` are already done), unless a hook
    ends training or the control stops it. The whole of a step is in this function, in order.

    Raises:
        WrongInput: the global batch of a step has no target, or ranks have different metrics.
        LateMetric: on all ranks, before the step after one that brought a further metric.
    """
    mesh, objective, optimizer = context.mesh, context.objective, context.optimizer
    masters, control = context.masters, context.control
    outcome: StepOutcome | None = None
    for step in range(first, last):
        # Fetch this rank's micro-batches. The ranks sum the target count of the global batch and
        # combine stop votes on the host, without synchronising with a device.
        batches = control.fetch(step)
        is_late = context.metrics.late is not None
        counts, (late, *votes) = global_counts(objective, batches, mesh, is_late, *control.votes())
        if control.must_stop(votes):
            return LoopEnd(step, outcome, stopped=True)
        context.metrics.refuse_late(late, step)
        if not (targets := counts.targets):
            raise WrongInput(
                f"step {step + 1:,} has not one target in its {context.samples} rows; run"
                " `ingot show mask` on the recipe"
            )
        if isinstance(objective, TwoPassObjective):
            batches = take_first_pass(context, objective, batches, targets)

        # Forward and backward, micro-batch by micro-batch: sums over this rank's targets.
        if context.balance is not None:
            context.balance.begin_step(batches, targets)
        rate = context.learning_rate and context.learning_rate(step)
        for group in optimizer.param_groups if rate is not None else ():
            group["lr"] = rate * group.get("lr_factor", 1.0)
        loss_sum, metric_sums = accumulate_gradients(context, step, batches)
        metric_sums = context.metrics.complete(step, metric_sums, mesh)

        # Reduce: sums over ranks, divided once by the targets of the global batch.
        sums = mesh.losses.all_sum(torch.stack([loss_sum, *metric_sums.values()]))
        loss, *means = (sums / targets).unbind()
        masters.collect()
        per_target = context.gradient_factor / targets
        norm = masters.norm() * per_target

        # Clip, and decide on the device whether this step is taken.
        skipped = ~(torch.isfinite(norm) & torch.isfinite(loss))
        if context.spikes is not None:
            skipped = context.spikes.judge(norm, skipped)
        scale = torch.full_like(norm, per_target)
        if context.clip_norm is not None:
            scale = scale * (context.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        masters.scale(scale)

        # Update. Fused optimizers leave weights and state unchanged where `found_inf` is 1.
        found_inf = masters.flag_for_optimizer(skipped.float())
        optimizer.grad_scale, optimizer.found_inf = None, found_inf  # type: ignore[attr-defined]
        optimizer.step()
        masters.publish()
        load = None if context.balance is None else context.balance.end_step(skipped.float())
        outcome = StepOutcome(
            loss, norm, skipped.float(), dict(zip(metric_sums, means, strict=True)), load
        )

        # Hooks: all of them run, even if one asks to end training.
        lr = float(optimizer.param_groups[0]["lr"]) if rate is None else rate
        info = StepInfo(step + 1, context.samples, counts, outcome, lr)
        answers = [hook.after_step(info) for hook in context.hooks]
        if any(answers):
            return LoopEnd(step + 1, outcome)
    return LoopEnd(last, outcome)


def train_step(context: StepContext, step: int = 0) -> StepOutcome:
    """Run step `step` alone, outside of a training."""
    outcome = run_steps(context, step, step + 1).outcome
    assert outcome is not None, "the control stopped a step that was asked for"
    return outcome


def global_counts(
    objective: Objective, batches: Sequence[Batch], mesh: Mesh, *mine: bool
) -> tuple[BatchCounts, list[bool]]:
    """The counts of the global batch, everything counted once, and for each flag of `mine` whether
    any rank set it. A host collective; the same on all ranks.
    """
    targets, tokens, positions, *votes = mesh.agree(
        sum(objective.targets(batch) for batch in batches),
        sum(batch.text_tokens for batch in batches),
        sum(batch.tokens.numel() for batch in batches),
        *map(float, mine),
    )
    # Ranks that share rows (context, tensor, pipeline axes) have all counted the same ones.
    share = mesh.data.world / mesh.world
    counts = (round(total * share) for total in (targets, tokens, positions))
    return BatchCounts(*counts), [count > 0 for count in votes]


def take_first_pass(
    context: StepContext, objective: TwoPassObjective, batches: Sequence[Batch], targets: int
) -> list[Batch]:
    """Give the objective its mean over the global batch; returns the rows that the loss is computed
    of.
    """
    mesh, sharing = context.mesh, context.row_sharing
    mine = first_pass(context.module, objective, batches, context.compute, mesh.device, sharing)
    objective.finish_first_pass(mesh.losses.all_sum(mine) / targets)
    return [objective.second_rows(batch) for batch in batches]


def accumulate_gradients(
    context: StepContext, step: int, batches: Sequence[Batch]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and metrics summed over this rank's micro-batches; the gradients are accumulated in the
    parameters.
    """
    module, objective, mesh = context.module, context.objective, context.mesh
    device, sharing = mesh.device, context.row_sharing
    if isinstance(module, Pipeline):
        begin = partial(_begin_micro_batch, context, step)
        work = PipelinedBatches(objective, batches, context.compute, device, sharing, begin)
        module.run(work, backward=True)
        return work.sums()
    total = torch.zeros((), device=device)
    metric_sums: dict[str, Tensor] = {}
    read = context.masters.read_each
    for index, batch in enumerate(batches):
        _begin_micro_batch(context, step, index, batch)
        with (  # the step of a single process is read without what wraps several
            last_micro_batch(module, mesh, is_last=index == len(batches) - 1, read=read)
            if mesh.world > 1
            else contextlib.nullcontext()
        ):
            loss_sum, metrics = forward(module, objective, batch, context.compute, device, sharing)
            loss_sum.backward()
        context.masters.accumulate()
        total += loss_sum.detach()
        metric_sums = added(metric_sums, metrics)
    return total, metric_sums


def _begin_micro_batch(context: StepContext, step: int, index: int, batch: Batch) -> None:
    context.control.begin_micro_batch(step, index, batch)
    if context.balance is not None:
        context.balance.begin_micro_batch(batch)
