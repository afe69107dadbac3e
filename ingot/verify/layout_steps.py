"""What a few steps of training give in one layout, on each of its ranks, and how far that is from
one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ingot.base.environment import Ranks, ranks
from ingot.config.shape import Degrees, degrees_of
from ingot.data.batches.loader import Batch, Loader
from ingot.data.columns.reader import IGNORE
from ingot.models.adapters.lora import lora_layers
from ingot.models.parameters import Slices, fill_normal, local_tensor, shard_slices
from ingot.parallel.mesh import Mesh, make_mesh
from ingot.train.build import TrainState, build_train_state
from ingot.train.reference import reference_tables
from ingot.train.setup import TrainSetup
from ingot.train.step import DropoutSeeds, StepContext, StepControl, train_step
from ingot.verify.layout_recipe import STEPS, SmallRun

CPU = torch.device("cpu")
ADAPTED_STD = 0.1
"""Of the adapter's second matrix, which begins as 0 and would hide the first one's gradient."""


class ParameterShard(NamedTuple):
    """What a rank has of a parameter, and where that lies in the whole."""

    shape: tuple[int, ...]
    slices: Slices
    values: Tensor


@dataclass(frozen=True)
class RankResult:
    """What one rank saw."""

    losses: list[float]
    norms: list[float]
    weights: list[dict[str, ParameterShard]]
    """This rank's part of what is trained, after each step."""
    local_sizes: dict[str, int]
    """Numbers of each parameter, trained or not, that lie on this rank."""
    targets: list[int]
    """This rank's own, in each step."""


def train_rank(shrunk: SmallRun) -> RankResult:
    """Train as `ingot train` does: the real trainee, loader and step. Every rank calls it, with the
    recipe in the layout of these ranks.
    """
    here = ranks()
    mesh = _mesh(here, degrees_of(shrunk.small.parallel, here.world))
    return _train_steps(shrunk.plan(mesh), mesh)


def train_alone(shrunk: SmallRun) -> RankResult:
    """The same in this process alone, all rows at once."""
    return _train_steps(shrunk.plan(Mesh(Ranks(), CPU)), Mesh(Ranks(), CPU))


@cache
def _mesh(here: Ranks, degrees: Degrees) -> Mesh:
    """Process groups are never given back, so layouts of the same degrees share them."""
    return make_mesh(here, CPU, degrees)


def _train_steps(plan: TrainSetup, mesh: Mesh) -> RankResult:
    trainee = build_train_state(plan, None, reference_tables(plan, mesh), mesh)
    _fill_adapter(trainee, plan.recipe.seed)
    loader = UnevenLoader(plan.rows, plan.order, plan.batch, mesh.data.rank)
    objective = trainee.objectives.training
    losses, norms, weights, targets = (
        list[float](),
        list[float](),
        list[dict[str, ParameterShard]](),
        list[int](),
    )

    def fetch(step: int) -> list[Batch]:
        batches = loader.step(step)
        targets.append(sum(objective.targets(batch) for batch in batches))
        return batches

    unclipped = StepContext(
        trainee.module,
        objective,
        trainee.masters,
        trainee.optimizer,
        mesh,
        StepControl(fetch, DropoutSeeds(trainee.model, plan.recipe.seed, mesh)),
        compute=plan.compute,
    )
    # Clipping takes a wrong scale away, and is itself wrong where the norm is: with and without it,
    # in turns.
    clipped = replace(unclipped, clip_norm=plan.recipe.train.clip_norm)
    try:
        for step in range(STEPS):
            outcome = train_step(clipped if step % 2 else unclipped, step)
            losses.append(float(outcome.loss))
            norms.append(float(outcome.grad_norm))
            weights.append(_parameter_shards(trainee))
    finally:
        loader.close()
    held = {
        name: local_tensor(parameter).numel()
        for name, parameter in trainee.model.named_parameters()
    }
    return RankResult(losses, norms, weights, held, targets)


@torch.no_grad()
def _fill_adapter(trainee: TrainState, seed: int) -> None:
    for name, layer in lora_layers(trainee.model).items():
        fill_normal(layer.lora_B, seed, f"{name}.lora_B", ADAPTED_STD)


def _parameter_shards(trainee: TrainState) -> dict[str, ParameterShard]:
    return {
        one.name: ParameterShard(
            tuple(one.parameter.shape), shard_slices(one.parameter), one.tensor.detach().clone()
        )
        for one in trainee.masters
    }


class UnevenLoader(Loader):
    """Takes targets away by the place of a sample in its global batch, so that no two ranks have
    equally many.

    In even steps the first sample keeps none and the last one all, the others a share; in odd ones
    the whole first half has none.
    """

    def step(self, i: int, meanwhile: Callable[[], bool] = lambda: False) -> list[Batch]:
        first, most = self._rank * self._plan.per_rank, self._plan.global_batch
        batches, made = super().step(i, meanwhile), []
        for batch in batches:
            places = [first + place for place in range(self._plan.micro_batch)]
            made.append(
                drop_targets(
                    batch,
                    [
                        0.0 if i % 2 and place < most // 2 else place / (most - 1)
                        for place in places
                    ],
                )
            )
            first = places[-1] + 1
        return made


def drop_targets(batch: Batch, shares: Sequence[float]) -> Batch:
    """A copy of the batch with a share of each sample's targets, the first ones; of samples that
    have but one target, that or none.
    """
    if len(batch.tokens) == 2 * len(batch.rows):  # preferences
        return Batch(
            batch.tokens,
            batch.labels,
            batch.positions,
            batch.segments,
            torch.where(torch.tensor(shares) < 0.5, -1, batch.rows),
        )
    labels = batch.labels.view(len(batch.rows), -1)
    there = labels != IGNORE
    kept = there & (
        there.cumsum(1) <= (torch.tensor(shares)[:, None] * there.sum(1, keepdim=True)).round()
    )
    return Batch(
        batch.tokens,
        torch.where(kept, labels, IGNORE).view_as(batch.labels),
        batch.positions,
        batch.segments,
        batch.rows,
    )


SHARE_SLACK = 0.02
"""What a rank may hold beyond its share: sizes that do not divide."""
ROUNDING_NOISE = 1e-6
"""Relative difference of all weights up to which a step is not the first that differs."""
INFINITE = float("inf")


@dataclass(frozen=True)
class LayoutDifference:
    """The largest differences of any rank and step."""

    loss: float
    """Nats."""
    norm: float
    """Of the gradient, relative."""
    weights: float
    """Relative, in norm over all updated weights."""
    share: float
    """The most that a rank holds of all weights, where 1 is all."""
    share_bound: float
    where: str
    """`step 2: model.norm.weight differs most, by 1.2e-03 of its norm`."""


def compare(
    found: Sequence[RankResult], alone: RankResult, degrees: Degrees, virtual: int
) -> LayoutDifference:
    """The ranks of a layout with one process; `virtual` counts the stages of a rank."""
    loss = max(
        _distance(a, b) for one in found for a, b in zip(one.losses, alone.losses, strict=True)
    )
    norm = max(
        _distance(a, b) / b for one in found for a, b in zip(one.norms, alone.norms, strict=True)
    )
    whole = [{name: piece.values for name, piece in weights.items()} for weights in alone.weights]
    steps = [
        _squared_distances([one.weights[step] for one in found], weights)
        for step, weights in enumerate(whole)
    ]
    totals = [
        (sum(squares.values()) / _squared_norm(weights.values())) ** 0.5
        for squares, weights in zip(steps, whole, strict=True)
    ]
    share = max(sum(one.local_sizes.values()) for one in found) / sum(alone.local_sizes.values())
    return LayoutDifference(
        loss,
        norm,
        max(totals),
        share,
        share_bound(alone, degrees, virtual),
        _describe_first_difference(steps, totals, whole),
    )


def _distance(one: float, other: float) -> float:
    """Their distance; what is no number is infinitely far."""
    return abs(one - other) if one == one else INFINITE


def _squared_norm(tensors: Iterable[Tensor]) -> float:
    return sum(float(tensor.double().square().sum()) for tensor in tensors)


def _squared_distances(
    found: Sequence[Mapping[str, ParameterShard]], alone: Mapping[str, Tensor]
) -> dict[str, float]:
    """The square of each parameter's distance, each of its numbers taken from the rank where it is
    farthest off.

    Infinite for a parameter of another name or shape, and for one of which a number is on no rank.
    """
    squares = {name: INFINITE for pieces in found for name in pieces if name not in alone}
    for name, tensor in alone.items():
        farthest = torch.full(tensor.shape, -1.0, dtype=torch.float64)
        for piece in (pieces[name] for pieces in found if name in pieces):
            if piece.shape != tensor.shape:
                return {**squares, name: INFINITE}
            distance = (
                (piece.values - tensor[piece.slices]).double().abs().nan_to_num(INFINITE, INFINITE)
            )
            farthest[piece.slices] = torch.maximum(farthest[piece.slices], distance)
        squares[name] = float(farthest.square().sum()) if bool((farthest >= 0).all()) else INFINITE
    return squares


def _describe_first_difference(
    steps: Sequence[Mapping[str, float]],
    totals: Sequence[float],
    whole: Sequence[Mapping[str, Tensor]],
) -> str:
    """The first step that differs, and the parameter that differs most in it."""
    step = next(
        (number for number, total in enumerate(totals) if not total <= ROUNDING_NOISE),
        len(totals) - 1,
    )
    name = max(steps[step], key=lambda key: steps[step][key])
    if steps[step][name] == INFINITE:
        return (
            f"step {step + 1}: {name} is not the same tensor: its name, its shape, a part that no"
            " rank has, or a value that is no number"
        )
    own = _squared_norm([whole[step][name]]) ** 0.5
    return (
        f"step {step + 1}: {name} differs most, by {steps[step][name] ** 0.5 / max(own, 1e-30):.1e}"
        " of its norm"
    )


def share_bound(alone: RankResult, degrees: Degrees, virtual: int) -> float:
    """The largest share of all numbers that a rank may hold.

    Vectors and the small matrices of adapters may be whole on every rank of `tensor`; of a pipeline
    a rank has its part of the layers, and an end (with several stages a rank perhaps both).
    """
    shards = degrees.shard * (degrees.context if degrees.shard > 1 else 1)
    shapes = {name: piece.shape for name, piece in alone.weights[-1].items()}
    layers, ends = 0.0, list[float]()
    for name, count in alone.local_sizes.items():
        cut = "lora_" not in name and len(shapes.get(name, (1, 1))) > 1
        mine = count / (degrees.tensor if cut else 1)
        if ".layers." in name:
            layers += mine
        else:
            ends.append(mine)
    outer = sum(ends) if degrees.pipeline == 1 or virtual > 1 else max(ends)
    return min(
        1.0,
        (layers / degrees.pipeline + outer) / shards / sum(alone.local_sizes.values())
        + SHARE_SLACK,
    )
