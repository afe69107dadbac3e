"""Searches for the layouts, micro-batches and recomputation with which a training is fastest or
cheapest on devices of one type. Imports no torch: ranks are traced in processes.

Every candidate is a recipe that training would accept, and what training refuses is refused here
with the same words. Memory decides first: what weights, gradients and optimizer take alone is
arithmetic; the rest is traced with one row and with two, from which the largest micro-batch that
surely fits follows, and that one is traced again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ingot.base.errors import WrongInput
from ingot.config.degrees import Degrees, degrees_of
from ingot.config.recipe import Recipe
from ingot.plan.layouts import (
    ALL_FREE,
    Candidate,
    Freedom,
    named,
    possible_layouts,
    powers,
)
from ingot.plan.ranges import Range, gib
from ingot.plan.seconds import StepSeconds
from ingot.plan.tracing.memory import (
    RankMemory,
    highest_peak,
    kinds_of_ranks,
    rank_memory,
    worst_fit,
)
from ingot.plan.tracing.workers import Tracer, TraceRequest

MOST_LAYOUTS = 6
"""Layouts that are traced for each number of devices: those that communicate least."""
SAME = 0.02
"""Seconds of two steps that differ by no more than this share are the same: no plan of a layout has
been that exact.
"""
ENOUGH_TOKENS = 16_384
"""Tokens in a micro-batch of a rank beyond which a device computes no faster."""

Seconds = Callable[[Recipe, int, tuple[RankMemory, ...]], StepSeconds]
"""The time of a step of a recipe on so many devices."""


@dataclass(frozen=True)
class Judged:
    """A candidate that surely fits, with the time of its step."""

    candidate: Candidate
    memory: tuple[RankMemory, ...]
    step: StepSeconds

    @property
    def peak(self) -> Range:
        """Of the rank that takes most."""
        return highest_peak(self.memory)

    def is_tied(self, other: Judged) -> bool:
        """Whether it cannot be told which of the two is faster: within their ranges the device
        decides. What the two have in common is equally fast or slow in both, so their bounds are
        compared one by one; closer than SAME they do not tell anything either.
        """
        mine, its = self.step.total, other.step.total
        both = [(getattr(mine, bound), getattr(its, bound)) for bound in ("low", "likely", "high")]
        if all(abs(one - another) <= SAME * another for one, another in both):
            return True
        return len({one < another for one, another in both}) > 1


@dataclass(frozen=True)
class SearchResult:
    """Candidates that surely fit, the fastest first; those that may fit, the smallest first; and
    why others lose: what, and the reason.
    """

    found: list[Judged]
    perhaps: list[tuple[Candidate, tuple[RankMemory, ...]]]
    others: list[tuple[str, str]]


def search(
    recipe: Recipe,
    config: Mapping[str, Any],
    worlds: Iterable[int],
    per_node: int,
    kind: str,
    has: Range,
    seconds: Seconds,
    free: Freedom = ALL_FREE,
) -> SearchResult:
    """Search on each number of devices of `worlds`, of which nodes have `per_node`.

    Args:
        config: the configuration of the model to train.
        kind: the type of device as torch calls it.
        has: bytes of memory of a device.
        seconds: tells the time of a step.
    """
    others: list[tuple[str, str]] = []
    layouts: list[Degrees] = []
    for world in worlds:
        fitting = list(possible_layouts(recipe, config, world, per_node, has, free, others))
        # Sharding alone communicates least where it is enough; then less of what waits. Whether
        # the weights of experts travel or the tokens, only a trace tells.
        fitting.sort(key=lambda one: (one.tensor * one.pipeline * one.context, one.replicate))
        layouts += fitting[:MOST_LAYOUTS]
        others += [
            (named(layout), "not tried: it communicates more than those that were")
            for layout in fitting[MOST_LAYOUTS:]
        ]
    judged: list[Judged] = []
    waiting = layouts
    with Tracer() as tracer:
        bench = _Bench(tracer, recipe, kind, has, others, free)
        for again in free.recompute:
            grown = bench.grown(waiting, again)
            judged += [
                Judged(one, memory, seconds(one.of(recipe), one.layout.world, memory))
                for one, memory in grown.items()
            ]
            # Recomputing more is only slower where micro-batches are large enough already.
            done = {one.layout for one in grown if one.micro_batch >= _enough(recipe, one.layout)}
            waiting = [layout for layout in waiting if layout not in done]
    judged.sort(key=lambda one: one.step.total.likely)
    best: dict[Degrees, Judged] = {}
    for one in judged:
        faster = best.setdefault(one.candidate.layout, one)
        if faster is not one:
            lost = f"{one.step.total.text()} s a step; faster is {faster.candidate.text()}"
            others.append((one.candidate.text(), lost))
    perhaps = sorted(bench.perhaps.items(), key=lambda one: highest_peak(one[1]).high)
    return SearchResult(list(best.values()), perhaps, others)


def most_rows(recipe: Recipe, layout: Degrees, kind: str, has: Range) -> int | None:
    """The rows of a micro-batch that surely fit into `has` bytes, as far as more are faster; None
    if none do.
    """
    again = recipe.memory.recompute.kind
    with Tracer() as tracer:
        grown = _Bench(tracer, recipe, kind, has, []).grown([layout], again)
    return max((one.micro_batch for one in grown), default=None)


class _Bench:
    """Traces candidates of one recipe; what does not fit or is refused goes to `others`."""

    def __init__(
        self,
        tracer: Tracer,
        recipe: Recipe,
        kind: str,
        has: Range,
        others: list[tuple[str, str]],
        free: Freedom = ALL_FREE,
    ) -> None:
        self._tracer, self._recipe, self._kind = tracer, recipe, kind
        self._has, self._free, self._others = has, free, others
        self.perhaps: dict[Candidate, tuple[RankMemory, ...]] = {}

    def grown(
        self, layouts: Sequence[Degrees], again: str
    ) -> dict[Candidate, tuple[RankMemory, ...]]:
        """The candidates of these layouts that surely fit, with as many rows in a micro-batch as
        do.
        """
        recipe, has, given = self._recipe, self._has, self._free.micro_batch
        if given is not None:
            all_given = [Candidate(layout, again, given) for layout in layouts]
            return self._fitting(all_given, self._others)
        ones = self._fitting([Candidate(layout, again, 1) for layout in layouts], self._others)
        more = [replace(one, micro_batch=2) for one in ones if _enough(recipe, one.layout) >= 2]
        found, largest = dict(ones), []
        for two, memory in self._fitting(more, []).items():
            one = replace(two, micro_batch=1)
            slope = max(1.0, highest_peak(memory).high - highest_peak(ones[one]).high)
            room = int((has.low - highest_peak(ones[one]).high) // slope) + 1
            size = _size_below(min(room, _enough(recipe, two.layout)), _rows(recipe, two.layout))
            if size >= 2:
                del found[one]
                found[two] = memory
            if size > 2:
                largest.append(replace(two, micro_batch=size))
        while largest:  # memory does not always grow evenly: half of what did not fit may
            fitting = self._fitting(largest, [])
            for one, memory in fitting.items():
                del found[replace(one, micro_batch=2)]
                found[one] = memory
            too_large = (one for one in largest if one not in fitting and one.micro_batch > 4)
            largest = [replace(one, micro_batch=one.micro_batch // 2) for one in too_large]
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
                if fit == "may not fit":
                    self.perhaps[one] = memory
                reason = f"{fit}: {highest_peak(memory).text(gib)} of {gib(has.likely)} GiB"
                others.append((one.text(), reason))
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
        others += [(one.text(), reason) for one, reason in refused.items()]
        return {one: tuple(memory) for one, memory in found.items() if one not in refused}


def _rows(recipe: Recipe, layout: Degrees) -> int:
    """Rows of a rank in a step, for which a micro-batch must leave the pipeline enough of them."""
    per_rank = recipe.train.global_batch // (layout.shard * layout.replicate)
    return max(1, per_rank // layout.pipeline)


def _enough(recipe: Recipe, layout: Degrees) -> int:
    """Rows in a micro-batch beyond which a device computes no faster."""
    tokens = recipe.data.seq_len // layout.context
    return min(_rows(recipe, layout), max(1, ENOUGH_TOKENS // tokens))


def _size_below(most: int, rows: int) -> int:
    """The largest power of two that is at most `most` and divides the rows evenly."""
    return max(size for size in powers(max(1, most)) if rows % size == 0)
