"""The layouts that a search considers: which there are of so many devices, which of them training
accepts, and whose weights alone fit. Imports no torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from ingot.base.errors import WrongInput
from ingot.config.automatic import with_degrees
from ingot.config.degrees import Degrees
from ingot.config.models.family import sizes
from ingot.config.models.source import trained_kind
from ingot.config.recipe import Recipe
from ingot.config.sections.layout import Parallel
from ingot.config.shape import batch_plan, check_layout, check_pipeline, expert_parameters
from ingot.plan.ranges import GIB, Range
from ingot.plan.storage import model_size, state_bytes

LONG_ROW = 32_768
"""Tokens in a row from which sharing rows among ranks is considered."""
RECOMPUTE = ("none", "selective", "full")
SEARCHED = ("replicate", "shard", "tensor", "pipeline", "context", "expert")
"""The degrees that a candidate gives."""
NAMED = ("tensor", "pipeline", "context", "shard", "expert", "replicate")
"""The same in the order in which people are told of a candidate."""
FROZEN_BYTES = {"nf4": 0.5, "int8": 1.0}
"""Bytes of a weight that is not trained, at least, by the kind of `model.quantize`."""


@dataclass(frozen=True)
class Candidate:
    """A layout with what is recomputed and the rows of a micro-batch."""

    layout: Degrees
    recompute: str
    micro_batch: int

    @property
    def overrides(self) -> list[str]:
        """What makes a recipe this candidate, as typed on the command line."""
        return [
            "parallel.degrees=given",
            *(f"parallel.{axis}={getattr(self.layout, axis)}" for axis in SEARCHED),
            f"memory.recompute.kind={self.recompute}",
            f"train.micro_batch={self.micro_batch}",
        ]

    def text(self) -> str:
        """For people: `8 devices: shard 8, micro-batch 2, selective recomputation`."""
        again = "no" if self.recompute == "none" else self.recompute
        return f"{named(self.layout)}, micro-batch {self.micro_batch}, {again} recomputation"

    def of(self, recipe: Recipe) -> Recipe:
        """The recipe with this candidate's knobs."""
        again = recipe.memory.recompute.model_copy(update={"kind": self.recompute})
        return with_degrees(recipe, self.layout).model_copy(
            update={
                "memory": recipe.memory.model_copy(update={"recompute": again}),
                "train": recipe.train.model_copy(update={"micro_batch": self.micro_batch}),
            }
        )


@dataclass(frozen=True)
class Freedom:
    """What is searched beside the layout: kinds of recomputation, and the rows of a micro-batch
    unless they are given.
    """

    recompute: tuple[str, ...] = RECOMPUTE
    micro_batch: int | None = None


ALL_FREE = Freedom()


def possible_layouts(
    recipe: Recipe,
    config: Mapping[str, Any],
    world: int,
    per_node: int,
    has: Range,
    free: Freedom,
    others: list[tuple[str, str]],
) -> Iterable[Degrees]:
    """The layouts of `world` devices that training accepts and whose weights, gradients and
    optimizer alone leave room.
    """
    native = trained_kind(recipe) == "decoder"
    # Tensor parallelism waits for every layer: within a node only.
    tensor = _divisors(per_node) if native else [1]
    # A pipeline is for what a node cannot hold: its stages lie in different nodes.
    pipeline = powers(max(1, world // per_node)) if native else [1]
    context = powers(per_node) if native and recipe.data.seq_len >= LONG_ROW else [1]
    experts = _experts(config) if native else 1
    for t, p, c in itertools.product(tensor, pipeline, context):
        data = world // (t * p * c)
        if data == 0 or data * t * p * c != world:
            continue
        # Whole replicas; shards within a node, and replicas of nodes; shards over all.
        within = min(data, max(1, per_node // (t * c)))
        sharing = _expert_degrees(experts, t, within * c, data * c)
        for shard, expert in itertools.product(sorted({1, within, data}), sharing):
            if data % shard:
                continue
            layout = Degrees(p, data // shard, shard, c, t, expert)
            try:
                one = Candidate(layout, free.recompute[0], free.micro_batch or 1)
                _check(one.of(recipe), config, world, native=native)
            except WrongInput as error:
                others.append((named(layout), str(error)))
                continue
            least = _least_bytes(recipe, config, layout)
            if least > has.high:
                reason = f"weights, gradients and optimizer alone take {least / GIB:.1f} GiB a rank"
                others.append((named(layout), f"does not fit: {reason}"))
                continue
            yield layout


def _check(recipe: Recipe, config: Mapping[str, Any], world: int, *, native: bool) -> None:
    """Raises the WrongInput of training, if it refuses."""
    try:
        Parallel.model_validate(recipe.parallel.model_dump())
        recipe.check_parallel()
    except ValidationError as error:
        raise WrongInput(error.errors()[0]["msg"].removeprefix("Value error, ")) from None
    except ValueError as error:
        raise WrongInput(str(error)) from None
    batch_plan(recipe.train, recipe.parallel, world)
    if native:
        check_layout(recipe.parallel, world, config, recipe.data.seq_len)
    dropout = recipe.model.lora.dropout if recipe.model.lora else 0.0
    check_pipeline(recipe.parallel, recipe.memory, compiled=recipe.train.compile, dropout=dropout)
    if recipe.train.compile and recipe.parallel.tensor > 1:
        raise WrongInput("train.compile is not for parallel.tensor")


def _least_bytes(recipe: Recipe, config: Mapping[str, Any], layout: Degrees) -> float:
    """What a rank holds between two steps at least; 0 where nothing is known of the model, or where
    some of it waits on the host.
    """
    size, offload = model_size(recipe, config), recipe.memory.offload
    if size is None or offload.weights or offload.optimizer:
        return 0.0
    lora = recipe.model.lora
    trained = size.trained if lora is None or size.exact else 0
    gradient = 2 if recipe.precision.master == "stochastic" else 4
    quantize = recipe.model.quantize
    each = _frozen_bytes(recipe) if quantize is None else FROZEN_BYTES[quantize.kind]
    frozen = 0 if lora is None else size.weights * each
    all_bytes = trained * (state_bytes(recipe).low + gradient) + frozen
    # Where adapters are trained, experts are frozen.
    of_each = each if lora is not None else state_bytes(recipe).low + gradient
    of_experts = expert_parameters(config) * of_each if size.exact else 0.0
    shared = layout.expert * layout.expert_shards
    dense = (all_bytes - of_experts) / (layout.shards * layout.tensor)
    return (dense + of_experts / shared) / layout.pipeline


def _frozen_bytes(recipe: Recipe) -> float:
    """Of a frozen weight that is not quantised: a decoder's are kept as they are computed."""
    wide = recipe.precision.compute == "fp32" or trained_kind(recipe) != "decoder"
    return 4.0 if wide else 2.0


def _experts(config: Mapping[str, Any]) -> int:
    """The experts of a sparse layer; 1 where there are none, or where sizes are missing."""
    try:
        found = sizes(config).experts
    except (KeyError, TypeError, ValueError, WrongInput):
        return 1
    return 1 if found is None else found.count


def _expert_degrees(experts: int, tensor: int, within: int, ranks: int) -> list[int]:
    """Only tensor ranks share experts, or none do; those of a node; as many ranks as can."""
    if experts == 1:
        return [1]
    each = {1, math.gcd(experts // tensor, within), math.gcd(experts // tensor, ranks)}
    return sorted(tensor * one for one in each)


def named(layout: Degrees) -> str:
    degrees = {axis: getattr(layout, axis) for axis in NAMED}
    axes = " x ".join(f"{axis} {count}" for axis, count in degrees.items() if count > 1)
    return f"{layout.world} devices: {axes or 'one process'}"


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]


def powers(most: int) -> list[int]:
    """Powers of two up to a number."""
    return [2**power for power in range(most.bit_length())]
