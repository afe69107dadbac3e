"""What a few steps of training give in one layout, on each of its ranks, and how far that is from one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ingot.base.environment import Ranks, ranks
from ingot.config.layout import Parallel
from ingot.config.shape import BatchPlan, Degrees, degrees_of
from ingot.data.loader import Batch, Loader
from ingot.data.opened import IGNORE
from ingot.data.order import Order
from ingot.models.initial import fill_normal
from ingot.models.lora import lora_layers
from ingot.models.placed import local
from ingot.objectives.objective import Objective
from ingot.parallel.mesh import Mesh, make_mesh
from ingot.train.build import Trainee, build_trainee
from ingot.train.dropout import seed_dropout
from ingot.train.plan import Plan
from ingot.train.reference import reference_tables
from ingot.train.step import train_step
from ingot.verify.shrunk import STEPS, Shrunk

CPU = torch.device("cpu")
ADAPTED_STD = 0.1
"""Of the adapter's second matrix, which begins as 0 and would hide the first one's gradient."""


@dataclass(frozen=True)
class Measured:
    """What one rank saw. Weights are whole, as far as this rank has a part of them; the sizes are those of what it holds itself."""

    losses: list[float]
    norms: list[float]
    weights: list[dict[str, Tensor]]
    """After each step."""
    holds: dict[str, int]
    """Numbers of each parameter, trained or not, that lie on this rank."""
    targets: list[int]
    """This rank's own, in each step."""


def measure(shrunk: Shrunk) -> Measured:
    """Train as `ingot train` does: the real trainee, loader and step. Every rank calls it, with the recipe in the layout of these ranks."""
    here = ranks()
    mesh = _mesh(here, degrees_of(shrunk.small.parallel, here.world))
    return _steps(shrunk.plan(mesh), mesh)


def measure_alone(shrunk: Shrunk) -> Measured:
    """The same in this process alone, all rows at once."""
    return _steps(shrunk.plan(Mesh(Ranks(), CPU)), Mesh(Ranks(), CPU))


@cache
def _mesh(here: Ranks, degrees: Degrees) -> Mesh:
    """Process groups are never given back, so layouts of the same degrees share them."""
    return make_mesh(here, CPU, degrees)


def _steps(plan: Plan, mesh: Mesh) -> Measured:
    trainee = build_trainee(plan, None, reference_tables(plan, mesh), mesh)
    _wake_adapter(trainee, plan.recipe.seed)
    loader = UnevenLoader(plan.rows, Order(plan.rows.sizes, plan.recipe.seed, plan.rows.weights), plan.batch, mesh.data.rank)
    objective = trainee.objectives.training
    losses, norms, weights, targets = list[float](), list[float](), list[dict[str, Tensor]](), list[int]()
    try:
        for step in range(STEPS):
            batches = loader.step(step)
            targets.append(sum(objective.targets(batch) for batch in batches))
            outcome = train_step(
                trainee.module, objective, batches, trainee.masters, trainee.optimizer, targets=_agreed(mesh, targets[-1]),
                clip_norm=plan.recipe.train.clip_norm, compute=plan.compute, mesh=mesh, before=_seeding(trainee, plan, step, mesh),
            )
            losses.append(float(outcome.loss))
            norms.append(float(outcome.grad_norm))
            weights.append(_whole_weights(trainee))
    finally:
        loader.close()
    held = {name: local(parameter).numel() for name, parameter in trainee.model.named_parameters()}
    return Measured(losses, norms, weights, held, targets)


def _agreed(mesh: Mesh, targets: int) -> int:
    """Targets of the global batch, each counted once."""
    [total] = mesh.agree(targets)
    return round(total * mesh.data.world / mesh.world)


def _seeding(trainee: Trainee, plan: Plan, step: int, mesh: Mesh) -> Any:
    return lambda index, batch: seed_dropout(trainee.model, plan.recipe.seed, step, index, batch, mesh)


@torch.no_grad()
def _wake_adapter(trainee: Trainee, seed: int) -> None:
    for name, layer in lora_layers(trainee.model).items():
        fill_normal(layer.lora_B, seed, f"{name}.lora_B", ADAPTED_STD)


def _whole_weights(trainee: Trainee) -> dict[str, Tensor]:
    """Every trained parameter of which this rank has a part; all ranks call it."""
    whole = {}
    for master in trainee.masters:
        tensor = master.spread(master.tensor.detach())
        whole[master.name] = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()
    return whole


class UnevenLoader(Loader):
    """Takes targets away by the place of a sample in its global batch, so that no two ranks have equally many.

    In even steps the first sample keeps none and the last one all, the others a share; in odd ones the whole first half has none.
    """

    def step(self, i: int) -> list[Batch]:
        first, most = self._rank * self._plan.per_rank, self._plan.global_batch
        batches, made = super().step(i), []
        for batch in batches:
            places = [first + place for place in range(self._plan.micro_batch)]
            made.append(thinned(batch, [0.0 if i % 2 and place < most // 2 else place / (most - 1) for place in places]))
            first = places[-1] + 1
        return made


def thinned(batch: Batch, shares: Sequence[float]) -> Batch:
    """A copy of the batch with a share of each sample's targets, the first ones; of samples that have but one target, that or none."""
    if len(batch.tokens) == 2 * len(batch.rows):  # preferences
        return Batch(batch.tokens, batch.labels, batch.positions, batch.segments, torch.where(torch.tensor(shares) < 0.5, -1, batch.rows))
    labels = batch.labels.view(len(batch.rows), -1)
    there = labels != IGNORE
    kept = there & (there.cumsum(1) <= (torch.tensor(shares)[:, None] * there.sum(1, keepdim=True)).round())
    return Batch(batch.tokens, torch.where(kept, labels, IGNORE).view_as(batch.labels), batch.positions, batch.segments, batch.rows)


@dataclass(frozen=True)
class Difference:
    """The largest differences of any rank and step to one process, and where the first that counts lies."""

    loss: float
    """Nats."""
    norm: float
    """Relative."""
    weights: float
    """Relative, in norm over all weights."""
    share: float
    """The most that a rank holds of all weights, where 1 is all."""
    share_bound: float
    where: str
    """`step 2: model.norm.weight differs most, by 1.2e-03 of its norm`."""


def compare(found: Sequence[Measured], alone: Measured, degrees: Degrees, parallel: Parallel) -> Difference:
    """The ranks of a layout with one process."""
    held = [sum(one.holds.values()) for one in found]
    whole = sum(alone.holds.values())
    loss = max(_far(a, b) for one in found for a, b in zip(one.losses, alone.losses, strict=True))
    norm = max(_far(a, b) / b for one in found for a, b in zip(one.norms, alone.norms, strict=True))
    steps = [_apart([one.weights[step] for one in found], alone.weights[step]) for step in range(len(alone.weights))]
    totals = [sum(squares.values()) ** 0.5 / _norm(alone.weights[step]) for step, squares in enumerate(steps)]
    return Difference(loss, norm, max(totals), max(held) / whole, share_bound(alone, degrees, parallel), _where(steps, totals, alone))


def _far(one: float, other: float) -> float:
    """Their distance; what is no number is infinitely far."""
    return abs(one - other) if one == one else float("inf")


def _apart(found: Sequence[Mapping[str, Tensor]], alone: Mapping[str, Tensor]) -> dict[str, float]:
    """The square of each parameter's distance, on the rank where it is largest; infinite for one that no rank has, or that one process has not."""
    squares = {name: float("inf") for name in alone.keys() | {name for weights in found for name in weights}}
    for name, tensor in alone.items():
        of = [float((weights[name] - tensor).double().square().sum()) for weights in found if name in weights]
        if of:
            squares[name] = max(value if value == value else float("inf") for value in of)
    return squares


def _norm(weights: Mapping[str, Tensor]) -> float:
    return sum(float(tensor.double().square().sum()) for tensor in weights.values()) ** 0.5


NOISE = 1e-6
"""Relative difference of all weights below which a step is not the first that differs."""


def _where(steps: Sequence[Mapping[str, float]], totals: Sequence[float], alone: Measured) -> str:
    step = next((number for number, total in enumerate(totals) if total > NOISE), len(totals) - 1)
    name = max(steps[step], key=lambda key: steps[step][key])
    if name not in alone.weights[step]:
        return f"step {step + 1}: {name}, which one process has not"
    if steps[step][name] == float("inf"):
        return f"step {step + 1}: {name} is not a number, or on no rank"
    own = float(alone.weights[step][name].double().norm())
    return f"step {step + 1}: {name} differs most, by {steps[step][name] ** 0.5 / max(own, 1e-30):.1e} of its norm"


SLACK = 0.02
"""What a rank may hold beyond its share: sizes that do not divide."""


def share_bound(alone: Measured, degrees: Degrees, parallel: Parallel) -> float:
    """The largest share of all numbers that a rank of this layout may hold.

    Vectors and the small matrices of adapters are whole on every rank of `tensor`; of a pipeline a rank has its part of the layers, and an end
    (with several stages a rank perhaps both).
    """
    shards = degrees.shard * (degrees.context if degrees.shard > 1 else 1)
    shapes = alone.weights[-1]
    total, layers, ends = sum(alone.holds.values()), 0.0, list[float]()
    for name, count in alone.holds.items():
        shared = degrees.tensor if "lora_" not in name and (name not in shapes or shapes[name].ndim > 1) else 1
        if ".layers." in name:
            layers += count / shared
        else:
            ends.append(count / shared)
    outer = sum(ends) if degrees.pipeline == 1 or parallel.virtual > 1 else max(ends)
    return min(1.0, (layers / degrees.pipeline + outer) / shards / total + SLACK)
