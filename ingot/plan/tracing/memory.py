"""The memory of each kind of rank: what its tensors take, by a trace of its step, and what a device
needs beside them. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from ingot.base.errors import WrongInput
from ingot.config.degrees import Degrees, degrees_of
from ingot.config.recipe import Recipe
from ingot.plan.devices.types import allowances
from ingot.plan.ranges import NOTHING, Range
from ingot.plan.tracing.records import RankTrace
from ingot.plan.tracing.workers import TraceRequest, trace_all

Fit = Literal["fits", "may not fit", "does not fit"]
UNEVEN = Range(0.0, 0.15, 1.0, "guessed")
"""How far from even towards `RankTrace.crowded` the choices of routers bring a rank."""


@dataclass(frozen=True)
class RankMemory:
    """The memory of the ranks that are alike.

    ranks: which these are, for people; rank: the traced one.
    other: bytes of the device that no tensor takes.
    """

    ranks: str
    rank: int
    trace: RankTrace
    other: Range

    @property
    def peak(self) -> Range:
        """Bytes of the device at the highest use in a step."""
        return self.trace.peak.total + self.other

    def fit(self, has: Range) -> Fit:
        """Whether it fits into a device that has so many bytes: told only where every value within
        the ranges says the same.
        """
        if self.peak.high <= has.low:
            return "fits"
        return "may not fit" if self.peak.low <= has.high else "does not fit"


def kinds_of_ranks(degrees: Degrees) -> list[tuple[str, int]]:
    """The ranks that differ in what they hold, and one of each: the first and the last stage of a
    pipeline, and of those between the first, which holds the most micro-batches.
    """
    per_stage = degrees.world // degrees.pipeline
    if degrees.pipeline == 1:
        return [("every rank" if degrees.world > 1 else "this process", 0)]
    between = [("stages between", per_stage)] if degrees.pipeline > 2 else []
    return [("first stage", 0), *between, ("last stage", degrees.world - per_stage)]


def plan_memory(recipe: Recipe, world: int, kind: str) -> list[RankMemory]:
    """The memory of `recipe` on `world` devices of type `kind` (`cpu`, `cuda`, ...), one for each
    kind of rank. Processes trace them; nothing is read but configurations.

    Raises:
        WrongInput: recipe, model and ranks do not fit together.
    """
    degrees = degrees_of(recipe.parallel, world)
    ranks = kinds_of_ranks(degrees)
    traces = trace_all([TraceRequest(recipe, world, rank, kind) for _, rank in ranks])
    return [
        rank_memory(*one, trace, degrees, kind) for one, trace in zip(ranks, traces, strict=True)
    ]


def rank_memory(
    ranks: str, rank: int, trace: RankTrace | WrongInput, degrees: Degrees, kind: str
) -> RankMemory:
    """A trace with what the device needs beside it. Raises the error that stands in its place."""
    if isinstance(trace, WrongInput):
        raise trace
    return RankMemory(ranks, rank, trace, _beside(trace, degrees, kind))


def _beside(trace: RankTrace, degrees: Degrees, kind: str) -> Range:
    known, crowded = allowances(kind), _crowded(trace)
    if known is None:
        return crowded
    sizes = (
        degrees.pipeline,
        degrees.data,
        degrees.context,
        degrees.tensor,
        degrees.expert,
    )
    # One communicator for each axis that has several ranks, and that of the whole job.
    communicators = sum(size > 1 for size in sizes) + (degrees.world > 1)
    # Of a few layers, a guess of those of many: it rests on two series of figures (docs/LOG.md).
    pieces = Range(*trace.pieces, "guessed" if trace.extended else "modelled")
    return known.context + known.cublas + communicators * known.nccl + pieces + crowded


def _crowded(trace: RankTrace) -> Range:
    """What rows of other ranks take beyond the average, where ranks share experts."""
    if trace.crowded is None:
        return NOTHING
    most = max(0, trace.crowded.peak.total - trace.peak.total)
    return UNEVEN * float(most)


def highest_peak(ranks: Iterable[RankMemory]) -> Range:
    """Of the rank that takes most."""
    return max((one.peak for one in ranks), key=lambda peak: peak.high)


def worst_fit(ranks: Sequence[RankMemory], has: Range) -> Fit:
    """Whether all ranks fit into devices that have so many bytes."""
    fits = [one.fit(has) for one in ranks]
    order: tuple[Fit, ...] = ("fits", "may not fit", "does not fit")
    return max(fits, key=order.index)
