"""Trains a few steps in one layout, records the result of each rank, and compares it with one
process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ingot.base.environment import Ranks, ranks
from ingot.config.degrees import Degrees, degrees_of
from ingot.data.batches.loader import Batch, Loader
from ingot.data.columns.reader import IGNORE
from ingot.models.adapters.lora import lora_layers
from ingot.models.parameters import Slices, fill_normal, local_tensor, shard_slices
from ingot.parallel.mesh import Mesh, make_mesh
from ingot.train.build import TrainState, build_train_state
from ingot.train.reference import reference_tables
from ingot.train.setup import TrainSetup
from ingot.train.step import DropoutSeeds, StepContext, StepControl, train_step
from ingot.verify.layout.recipe import STEPS, SmallRun

CPU = torch.device("cpu")
ADAPTED_STD = 0.1
"""Standard deviation of the adapter's second matrix, which starts as 0 and would hide the first
one's gradient.
"""


EXPERTS = ".experts."
"""In the names of what the expert axis shares."""


class ParameterShard(NamedTuple):
    """A rank's shard of a parameter, and its slices in the full tensor."""

    shape: tuple[int, ...]
    slices: Slices
    values: Tensor


@dataclass(frozen=True)
class RankResult:
    """What one rank recorded."""

    losses: list[float]
    norms: list[float]
    weights: list[dict[str, ParameterShard]]
    """This rank's shards of the trained parameters after each step."""
    local_sizes: dict[str, int]
    """The number of elements of each parameter, trained or not, on this rank."""
    targets: list[int]
    """The number of targets of this rank in each step."""


def train_rank(shrunk: SmallRun) -> RankResult:
    """Train as `ingot train` does: the real training state, loader and step. Collective; the
    recipe has the layout of these ranks.
    """
    here = ranks()
    mesh = _mesh(here, degrees_of(shrunk.small.parallel, here.world))
    return _train_steps(shrunk.setup(mesh), mesh)


def train_alone(shrunk: SmallRun) -> RankResult:
    """Train the same in this process alone, with all rows in one micro-batch."""
    return _train_steps(shrunk.setup(Mesh(Ranks(), CPU)), Mesh(Ranks(), CPU))


@cache
def _mesh(here: Ranks, degrees: Degrees) -> Mesh:
    """Process groups are never destroyed, so layouts with the same degrees share them."""
    return make_mesh(here, CPU, degrees)


def _train_steps(setup: TrainSetup, mesh: Mesh) -> RankResult:
    train_state = build_train_state(setup, None, reference_tables(setup, mesh), mesh)
    _fill_adapter(train_state, setup.recipe.seed)
    loader = UnevenLoader(setup.rows, setup.order, setup.batch, mesh.data.rank)
    objective = train_state.objectives.training
    losses = list[float]()
    norms = list[float]()
    weights = list[dict[str, ParameterShard]]()
    targets = list[int]()

    def fetch(step: int) -> list[Batch]:
        batches = loader.step(step)
        targets.append(sum(objective.targets(batch) for batch in batches))
        return batches

    unclipped = StepContext(
        train_state.module,
        objective,
        train_state.masters,
        train_state.optimizer,
        mesh,
        StepControl(fetch, DropoutSeeds(train_state.model, setup.recipe.seed, mesh)),
        compute=setup.compute,
        balance=train_state.balance,
    )
    # Clipping hides a wrong scale of gradients but depends on the norm, so steps alternate with and
    # without it.
    clipped = replace(unclipped, clip_norm=setup.recipe.train.clip_norm)
    try:
        for step in range(STEPS):
            outcome = train_step(clipped if step % 2 else unclipped, step)
            losses.append(float(outcome.loss))
            norms.append(float(outcome.grad_norm))
            weights.append(_parameter_shards(train_state))
    finally:
        loader.close()
    held = {
        name: local_tensor(parameter).numel()
        for name, parameter in train_state.model.named_parameters()
    }
    return RankResult(losses, norms, weights, held, targets)


@torch.no_grad()
def _fill_adapter(train_state: TrainState, seed: int) -> None:
    for name, layer in lora_layers(train_state.model).items():
        fill_normal(layer.lora_B, seed, f"{name}.lora_B", ADAPTED_STD)


def _parameter_shards(train_state: TrainState) -> dict[str, ParameterShard]:
    shards = {
        one.name: ParameterShard(
            tuple(one.parameter.shape), shard_slices(one.parameter), one.tensor.detach().clone()
        )
        for one in train_state.masters
    }
    return shards | {
        name: ParameterShard(tuple(buffer.shape), shard_slices(buffer), buffer.clone())
        for name, buffer in train_state.masters.buffers.items()
    }


class UnevenLoader(Loader):
    """Removes targets depending on a sample's place in the global batch, so that no two ranks have
    equally many.

    In even steps the first sample keeps none, the last one all and the others a share; in odd ones
    the first half has none.
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
    """A copy of the batch that keeps a share of each sample's targets, the first ones; of a single
    target, it or none.
    """
    if len(batch.tokens) == 2 * len(batch.rows):  # answers
        return replace(batch, rows=torch.where(torch.tensor(shares) < 0.5, -1, batch.rows))
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
"""What a rank may hold beyond its share, for sizes that do not divide."""
ROUNDING_NOISE = 1e-6
"""Relative difference of all weights up to which a step counts as equal."""
INFINITE = float("inf")


@dataclass(frozen=True)
class LayoutDifference:
    """The largest differences over all ranks and steps."""

    loss: float
    """Nats."""
    norm: float
    """Of the gradient, relative."""
    weights: float
    """Relative, in norm over all updated weights."""
    share: float
    """The largest share of all weights that a rank holds."""
    share_bound: float
    where: str
    """`step 2: model.norm.weight differs most, by 1.2e-03 of its norm`."""


def compare(
    found: Sequence[RankResult], alone: RankResult, degrees: Degrees, virtual: int
) -> LayoutDifference:
    """Compare the ranks of a layout with one process; `virtual` is the number of stages per
    rank.
    """
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
    """The absolute difference; infinite for NaN."""
    return abs(one - other) if one == one else INFINITE


def _squared_norm(tensors: Iterable[Tensor]) -> float:
    return sum(float(tensor.double().square().sum()) for tensor in tensors)


def _squared_distances(
    found: Sequence[Mapping[str, ParameterShard]], alone: Mapping[str, Tensor]
) -> dict[str, float]:
    """The squared distance of each parameter, with each element taken from the rank where it is
    farthest off.

    Infinite for a parameter of another name or shape, and for one with an element that is on no
    rank.
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
    """Describe the first step that differs, and the parameter that differs most in it."""
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
    """The largest share of all weights that a rank may hold.

    Vectors and an adapter's small matrices may be whole on every rank of `tensor`; a pipeline rank
    has its part of the layers, and one end (with several stages per rank possibly both).
    """
    shapes = {name: piece.shape for name, piece in alone.weights[-1].items()}
    layers, ends = dict[str, float](), list[float]()
    for name, count in alone.local_sizes.items():
        cut = "lora_" not in name and len(shapes.get(name, (1, 1))) > 1
        mine = count / (
            degrees.expert * degrees.expert_shards
            if EXPERTS in name
            else degrees.shards * (degrees.tensor if cut else 1)
        )
        if ".layers." in name:
            layer = name.partition(".layers.")[2].partition(".")[0]
            layers[layer] = layers.get(layer, 0.0) + mine
        else:
            ends.append(mine)
    outer = sum(ends) if degrees.pipeline == 1 or virtual > 1 else max(ends)
    largest = sorted(layers.values(), reverse=True)
    return min(
        1.0,
        (sum(largest[: math.ceil(len(largest) / degrees.pipeline)]) + outer)
        / sum(alone.local_sizes.values())
        + SHARE_SLACK,
    )
