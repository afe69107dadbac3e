"""Searches for the layouts, micro-batches and recomputation with which a training is fastest or
cheapest on devices of one type. Imports no torch: ranks are traced in processes.

Every candidate is a recipe that training would accept, and what training refuses is refused here
with the same words. Memory decides first: what weights, gradients and optimizer take alone is
arithmetic; the rest is traced with one row and with two, from which the largest micro-batch that
surely fits follows, and that one is traced again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ingot.base.errors import WrongInput
from ingot.config.model_source import KIND_FOR_DOCUMENTS
from ingot.config.recipe import Recipe
from ingot.config.shape import (
    Degrees,
    batch_plan,
    check_layout,
    check_pipeline,
    degrees_of,
    lora_parameters,
    parameter_count,
)
from ingot.plan.ranges import Range
from ingot.plan.seconds import StepSeconds
from ingot.plan.tracing.memory import RankMemory, kinds_of_ranks, rank_memory, worst_fit
from ingot.plan.tracing.workers import Tracer, TraceRequest

MOST_LAYOUTS = 6
"""Layouts that are traced for each number of devices: those that communicate least."""
ENOUGH_TOKENS = 16_384
"""Tokens in a micro-batch of a rank beyond which a device computes no faster."""
LONG_ROW = 32_768
"""Tokens in a row from which sharing rows among ranks is considered."""
RECOMPUTE = ("none", "selective", "full")
OPTIMIZER_BYTES = 16
"""Bytes for each trained parameter: float32 weight and gradient, two moments."""
FROZEN_BYTES = 4
GIB = 2**30

Seconds = Callable[[Recipe, int, tuple[RankMemory, ...]], StepSeconds]
"""The time of a step of a recipe on so many devices."""


class SearchedLayout(NamedTuple):
    """Degrees of the axes on a number of devices."""

    world: int
    tensor: int
    pipeline: int
    context: int
    shard: int

    @property
    def replicate(self) -> int:
        return self.world // (self.tensor * self.pipeline * self.context * self.shard)

    @property
    def knobs(self) -> dict[str, int]:
        """The axes with more than one rank, as knobs of `parallel`."""
        degrees = {**self._asdict(), "replicate": self.replicate}
        return {name: count for name, count in degrees.items() if name != "world" and count > 1}


@dataclass(frozen=True)
class Candidate:
    """A layout with what is recomputed and the rows of a micro-batch."""

    layout: SearchedLayout
    recompute: str
    micro_batch: int

    @property
    def overrides(self) -> list[str]:
        """What makes a recipe this candidate, as typed on the command line."""
        degrees = {"replicate": 1, "shard": 1, "tensor": 1, "pipeline": 1, "context": 1}
        return [
            *(f"parallel.{axis}={count}" for axis, count in (degrees | self.layout.knobs).items()),
            f"memory.recompute.kind={self.recompute}",
            f"train.micro_batch={self.micro_batch}",
        ]

    def told(self) -> str:
        """For people: `8 devices: shard 8, micro-batch 2, selective recomputation`."""
        again = "no" if self.recompute == "none" else self.recompute
        return f"{_named(self.layout)}, micro-batch {self.micro_batch}, {again} recomputation"

    def of(self, recipe: Recipe) -> Recipe:
        """The recipe with this candidate's knobs."""
        degrees = {"replicate": 1, "shard": 1, "tensor": 1, "pipeline": 1, "context": 1}
        parallel = recipe.parallel.model_copy(update=degrees | self.layout.knobs)
        again = recipe.memory.recompute.model_copy(
            update={"kind": self.recompute, "method": "uniform", "layers": 1}
        )
        return recipe.model_copy(
            update={
                "parallel": parallel,
                "memory": recipe.memory.model_copy(update={"recompute": again}),
                "train": recipe.train.model_copy(update={"micro_batch": self.micro_batch}),
            }
        )


@dataclass(frozen=True)
class Judged:
    """A candidate that surely fits, with the time of its step."""

    candidate: Candidate
    memory: tuple[RankMemory, ...]
    step: StepSeconds

    @property
    def peak(self) -> Range:
        """Of the rank that takes most."""
        return max((one.peak for one in self.memory), key=lambda peak: peak.high)

    def is_tied(self, other: Judged) -> bool:
        """Whether it cannot be told which of the two is faster: within their ranges the device
        decides. What the two have in common is equally fast or slow in both, so their bounds are
        compared one by one.
        """
        mine, its = self.step.total, other.step.total
        ahead = [getattr(mine, bound) < getattr(its, bound) for bound in ("low", "likely", "high")]
        return len(set(ahead)) > 1


@dataclass(frozen=True)
class SearchResult:
    """Candidates that fit, the fastest first, and why others lose: what, and the reason."""

    found: list[Judged]
    others: list[tuple[str, str]]


def search(
    recipe: Recipe,
    config: Mapping[str, Any],
    worlds: Iterable[int],
    per_node: int,
    kind: str,
    has: Range,
    seconds: Seconds,
) -> SearchResult:
    """Search on each number of devices of `worlds`, of which nodes have `per_node`.

    Args:
        config: the configuration of the model to train.
        kind: the type of device as torch calls it.
        has: bytes of memory of a device.
        seconds: tells the time of a step.
    """
    others: list[tuple[str, str]] = []
    layouts: list[SearchedLayout] = []
    for world in worlds:
        fitting = list(_layouts(recipe, config, world, per_node, has, others))
        # Sharding alone communicates least where it is enough; then less of what waits.
        fitting.sort(key=lambda one: (one.tensor * one.pipeline * one.context, one.replicate))
        layouts += fitting[:MOST_LAYOUTS]
        others += [
            (_named(layout), "not tried: it communicates more than those that were")
            for layout in fitting[MOST_LAYOUTS:]
        ]
    judged: list[Judged] = []
    waiting = layouts
    with Tracer() as tracer:
        bench = _Bench(tracer, recipe, kind, has, others)
        for again in RECOMPUTE:
            grown = bench.grown(waiting, again)
            judged += [
                Judged(one, memory, seconds(one.of(recipe), one.layout.world, memory))
                for one, memory in grown.items()
            ]
            # Recomputing more is only slower where micro-batches are large enough already.
            done = {one.layout for one in grown if one.micro_batch >= _enough(recipe, one.layout)}
            waiting = [layout for layout in waiting if layout not in done]
    judged.sort(key=lambda one: one.step.total.likely)
    best: dict[SearchedLayout, Judged] = {}
    for one in judged:
        faster = best.setdefault(one.candidate.layout, one)
        if faster is not one:
            lost = f"{one.step.total.told()} s a step; faster is {faster.candidate.told()}"
            others.append((one.candidate.told(), lost))
    return SearchResult(list(best.values()), others)


def _layouts(
    recipe: Recipe,
    config: Mapping[str, Any],
    world: int,
    per_node: int,
    has: Range,
    others: list[tuple[str, str]],
) -> Iterable[SearchedLayout]:
    """The layouts of `world` devices that training accepts and whose weights, gradients and
    optimizer alone leave room.
    """
    native = KIND_FOR_DOCUMENTS[recipe.documents] == "decoder"
    # Tensor parallelism waits for every layer: within a node only.
    tensor = _divisors(per_node) if native else [1]
    # A pipeline is for what a node cannot hold: its stages lie in different nodes.
    pipeline = _powers(max(1, world // per_node)) if native else [1]
    context = _powers(per_node) if native and recipe.data.seq_len >= LONG_ROW else [1]
    for t, p, c in itertools.product(tensor, pipeline, context):
        data = world // (t * p * c)
        if data == 0 or data * t * p * c != world:
            continue
        # Whole replicas; shards within a node, and replicas of nodes; shards over all.
        for shard in sorted({1, min(data, max(1, per_node // (t * c))), data}):
            if data % shard:
                continue
            layout = SearchedLayout(world, t, p, c, shard)
            try:
                _check(Candidate(layout, "none", 1).of(recipe), config, world, native=native)
            except WrongInput as error:
                others.append((_named(layout), str(error)))
                continue
            least = _least_bytes(recipe, config, layout) if native else 0
            if least > has.high:
                reason = f"weights, gradients and optimizer alone take {least / GIB:.1f} GiB a rank"
                others.append((_named(layout), f"does not fit: {reason}"))
                continue
            yield layout


def _check(recipe: Recipe, config: Mapping[str, Any], world: int, *, native: bool) -> None:
    """Raises the WrongInput of training, if it refuses."""
    batch_plan(recipe.train, recipe.parallel, world)
    if native:
        check_layout(recipe.parallel, world, config, recipe.data.seq_len)
    dropout = recipe.model.lora.dropout if recipe.model.lora else 0.0
    check_pipeline(recipe.parallel, recipe.memory, compiled=recipe.train.compile, dropout=dropout)
    if recipe.train.compile and recipe.parallel.tensor > 1:
        raise WrongInput("train.compile is not for parallel.tensor")


def _least_bytes(recipe: Recipe, config: Mapping[str, Any], layout: SearchedLayout) -> float:
    weights = parameter_count(config)
    lora = recipe.model.lora
    trained = weights if lora is None else lora_parameters(config, lora.rank)
    shards = layout.tensor * layout.pipeline * layout.shard
    if layout.shard > 1:
        shards *= layout.context
    frozen = 0 if lora is None else weights * FROZEN_BYTES
    return (trained * OPTIMIZER_BYTES + frozen) / shards


class _Bench:
    """Traces candidates of one recipe; what does not fit or is refused goes to `others`."""

    def __init__(
        self,
        tracer: Tracer,
        recipe: Recipe,
        kind: str,
        has: Range,
        others: list[tuple[str, str]],
    ) -> None:
        self._tracer, self._recipe, self._kind = tracer, recipe, kind
        self._has, self._others = has, others

    def grown(
        self, layouts: Sequence[SearchedLayout], again: str
    ) -> dict[Candidate, tuple[RankMemory, ...]]:
        """The candidates of these layouts that surely fit, with as many rows in a micro-batch as
        do.
        """
        recipe, has = self._recipe, self._has
        ones = self._fitting([Candidate(layout, again, 1) for layout in layouts], self._others)
        more = [replace(one, micro_batch=2) for one in ones if _enough(recipe, one.layout) >= 2]
        found, largest = dict(ones), []
        for two, memory in self._fitting(more, []).items():
            one = replace(two, micro_batch=1)
            slope = max(1.0, _peak(memory).high - _peak(ones[one]).high)
            room = int((has.low - _peak(ones[one]).high) // slope) + 1
            size = _size_below(min(room, _enough(recipe, two.layout)), _rows(recipe, two.layout))
            if size >= 2:
                del found[one]
                found[two] = memory
            if size > 2:
                largest.append(replace(two, micro_batch=size))
        for one, memory in self._fitting(largest, []).items():
            del found[replace(one, micro_batch=2)]
            found[one] = memory
        return found

    def _fitting(
        self, candidates: Sequence[Candidate], others: list[tuple[str, str]]
    ) -> dict[Candidate, tuple[RankMemory, ...]]:
        traced, has = self._traced(candidates, others), self._has
        fitting = {}
        for one, memory in traced.items():
            if (fit := worst_fit(memory, has)) == "fits":
                fitting[one] = memory
            else:
                reason = f"{fit}: {_peak(memory).told(_gib)} of {_gib(has.likely)} GiB"
                others.append((one.told(), reason))
        return fitting

    def _traced(
        self, candidates: Sequence[Candidate], others: list[tuple[str, str]]
    ) -> dict[Candidate, tuple[RankMemory, ...]]:
        asked: list[tuple[Candidate, Degrees, str, TraceRequest]] = []
        for one in candidates:
            changed, world = one.of(self._recipe), one.layout.world
            degrees = degrees_of(changed.parallel, world)
            asked += [
                (one, degrees, ranks, TraceRequest(changed, world, rank, self._kind))
                for ranks, rank in kinds_of_ranks(degrees)
            ]
        traces = self._tracer.traces([request for *_, request in asked])
        found: dict[Candidate, list[RankMemory]] = {}
        refused: dict[Candidate, str] = {}
        for (one, degrees, ranks, request), trace in zip(asked, traces, strict=True):
            if isinstance(trace, WrongInput):
                refused[one] = str(trace)
            else:
                memory = rank_memory(ranks, request.rank, trace, degrees, self._kind)
                found.setdefault(one, []).append(memory)
        others += [(one.told(), reason) for one, reason in refused.items()]
        return {one: tuple(memory) for one, memory in found.items() if one not in refused}


def _rows(recipe: Recipe, layout: SearchedLayout) -> int:
    """Rows of a rank in a step, for which a micro-batch must leave the pipeline enough of them."""
    per_rank = recipe.train.global_batch // (layout.shard * layout.replicate)
    return max(1, per_rank // layout.pipeline)


def _enough(recipe: Recipe, layout: SearchedLayout) -> int:
    """Rows in a micro-batch beyond which a device computes no faster."""
    tokens = recipe.data.seq_len // layout.context
    return min(_rows(recipe, layout), max(1, ENOUGH_TOKENS // tokens))


def _size_below(most: int, rows: int) -> int:
    """The largest power of two that is at most `most` and divides the rows evenly."""
    return max(size for size in _powers(max(1, most)) if rows % size == 0)


def _peak(memory: Sequence[RankMemory]) -> Range:
    return max((one.peak for one in memory), key=lambda peak: peak.high)


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}"


def _named(layout: SearchedLayout) -> str:
    axes = " x ".join(f"{axis} {count}" for axis, count in layout.knobs.items())
    return f"{layout.world} devices: {axes or 'one process'}"


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]


def _powers(most: int) -> list[int]:
    """Powers of two up to a number."""
    return [2**power for power in range(most.bit_length())]
