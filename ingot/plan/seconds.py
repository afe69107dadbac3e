"""The time of a training step, from what its ranks compute and communicate and what a device needs
for that. Every part is a range. Imports no torch.

Time of a kernel: its launch, and FLOPs over the rate at which the device computes or bytes over
the rate at which it reads and writes, whichever is longer; and what Python takes where it is in
between. Time of a collective: a latency, the bytes that a rank sends over the link of its group,
and what a rank on a shared processor waits for a later one. Communication of sharded weights and of
gradients may go on while the rank computes; all other communication waits. A thread makes the rows
of the next step meanwhile, which bounds a step that takes less.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from ingot.plan.devices.coefficients import PRODUCTS, WAITING, Coefficients
from ingot.plan.ranges import NOTHING, Range, worst
from ingot.plan.tracing.records import DISPATCH, SPREAD, Operator, RankTrace

PARTS = ("matmul", "attention", "memory")
COMPUTING = (*PARTS, "special", "softmax", "random")
"""Kinds of kernels; the last ones count as `memory`."""
KINDS = {
    "allreduce": "reduce",
    "all_reduce": "reduce",
    "allgather": "gather",
    "all_gather": "gather",
    "reduce_scatter": "gather",
    "alltoall": "gather",
    "all_to_all": "gather",
    "shard_dim_alltoall": "gather",
    "broadcast": "send",
    "scatter": "gather",
    "gather": "gather",
    "send": "send",
}
"""By the first words of a collective's name: what it does to the links."""
FREE = ("wait_tensor", "barrier", "monitored_barrier", "recv")
"""Waiting, which has no time of its own; what is received is counted where it is sent."""
IN_BACKGROUND = ("_allgather_base", "_reduce_scatter_base", "allreduce")
"""Collectives of sharded weights and of gradients, as sharding calls them. Tensor and context
parallelism use torch's functional collectives and wait for them.
"""
ZERO_BUBBLE = Range(0, 1 / 3, 2 / 3, "guessed")
"""What gradients of weights, computed late, leave of the bubble (Qi et al. 2023)."""
CROWDED = 0.15
"""How far from even towards the crowded trace the choices of routers likely bring a rank."""
UNEVEN = Range(1, 1, 1.3, "guessed")
"""How much longer a bubble becomes where stages or micro-batches take unequal time."""


@dataclass(frozen=True)
class StepLayout:
    """How the ranks of a job are laid out, as far as a step's time depends on it.

    ranks_per_node: ranks with neighbouring numbers that share a node. zero_bubble: whether the
    pipeline's schedule is that one. compiled: whether `train.compile` is set. attended: how much of
    causal attention's time attention takes, where documents that share a row do not see each other.
    loading: seconds in which a thread of each rank makes the rows of its next step.
    """

    ranks_per_node: int = 1
    pipeline: int = 1
    virtual: int = 1
    zero_bubble: bool = False
    compiled: bool = False
    attended: Range = NOTHING + 1.0
    loading: Range = NOTHING


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of a step of the slowest rank.

    matmul, attention, memory: kernels by kind; `memory` are those bound by the device's memory.
    within, between: collectives within a node and between nodes, hidden or not.
    hidden: of these, what goes on while the rank computes.
    bubble: waiting for other stages of the pipeline.
    loading: making the rows of the next step meanwhile.
    total: all of it without `hidden`, or `loading` where that takes longer.
    flops: of matrix products and attention on this rank.
    """

    matmul: Range
    attention: Range
    memory: Range
    within: Range
    between: Range
    hidden: Range
    bubble: Range
    loading: Range
    total: Range
    flops: float

    def share_of_peak(self, flops: float, peak: float) -> Range:
        """Share of the device's peak where a step needs `flops` of this rank."""
        return flops / peak / self.total


def step_seconds(
    ranks: Sequence[RankTrace], coefficients: Coefficients, layout: StepLayout
) -> StepSeconds:
    """The time of a step, given a rank of each kind that may be the slowest.

    Raises:
        WrongInput: nothing is known of a kernel that a rank calls.
    """
    times = [_with_crowding(rank, coefficients, layout) for rank in ranks]
    return max(times, key=lambda one: one.total.likely)


def _with_crowding(rank: RankTrace, coefficients: Coefficients, layout: StepLayout) -> StepSeconds:
    """Of ranks that share experts, between evenly chosen ones and those of the crowded trace."""
    even = _rank_seconds(rank, coefficients, layout)
    if rank.crowded is None:
        return even
    most = _rank_seconds(rank.crowded, coefficients, layout)

    def between(name: str) -> Range:
        one, other = getattr(even, name), getattr(most, name)
        likely = one.likely + CROWDED * max(0.0, other.likely - one.likely)
        return Range(one.low, likely, max(likely, one.high, other.high), "guessed")

    changed = {one.name: between(one.name) for one in fields(StepSeconds) if one.name != "flops"}
    return StepSeconds(**changed, flops=even.flops)


def _rank_seconds(rank: RankTrace, coefficients: Coefficients, layout: StepLayout) -> StepSeconds:
    again = _Work(coefficients, layout).add(rank.micro_batch)
    # What is done once a step is not compiled.
    once = _Work(coefficients, replace(layout, compiled=False)).add(rank.update)
    steps = float(rank.micro_steps)
    parts = {name: again.parts[name] * steps + once.parts[name] for name in again.parts}
    computing = parts["matmul"] + parts["attention"] + parts["memory"]
    background = again.background * steps + once.background
    waiting = again.waiting * steps + once.waiting
    meetings = again.meetings * steps + once.meetings
    if meetings and (unequal := coefficients.curves.get(WAITING)) is not None:
        # Ranks on the same cores are never equally fast: at each collective one waits.
        late = unequal.seconds(computing.likely / meetings) * meetings
        parts["within"] += late
        waiting += late
    exposed = _exposed(computing, background, coefficients.exposed)
    bubble = (again.computing + again.waiting) * _bubble(layout)
    total = _beside(computing + waiting + exposed + bubble, layout.loading)
    hidden = Range(
        0,
        max(0.0, background.likely - exposed.likely),
        background.high,
        background.origin,
    )
    return StepSeconds(
        **parts,
        hidden=hidden,
        bubble=bubble,
        loading=layout.loading,
        total=total,
        flops=again.flops * steps + once.flops,
    )


class _Work:
    """The time of some operators, by part."""

    def __init__(self, coefficients: Coefficients, layout: StepLayout) -> None:
        self._coefficients, self._layout = coefficients, layout
        self.parts = dict.fromkeys((*PARTS, "within", "between"), NOTHING)
        self.background = self.waiting = NOTHING
        self.meetings = 0.0
        self.flops = 0.0

    @property
    def computing(self) -> Range:
        return self.parts["matmul"] + self.parts["attention"] + self.parts["memory"]

    def add(self, operators: Mapping[Operator, float]) -> _Work:
        for operator, times in operators.items():
            if operator.kind in COMPUTING:
                part = operator.kind if operator.kind in PARTS else "memory"
                self.parts[part] += self._kernel(operator) * times
                self.flops += operator.flops * times
            elif operator in (DISPATCH, SPREAD):
                self.parts["memory"] += self._coefficients.seconds(operator.kind, "", 0) * times
            elif operator.group[0] > 1 and not _starts(operator.kind, FREE):
                self._communicate(operator, times)
        return self

    def _kernel(self, operator: Operator) -> Range:
        took = self._coefficients.kernel_seconds(operator)
        if self._layout.compiled and operator.kind not in PRODUCTS:
            took *= self._coefficients.compiled
        return took * self._layout.attended if operator.kind == "attention" else took

    def _communicate(self, operator: Operator, times: float) -> None:
        size, stride = operator.group
        where = "within" if size * stride <= self._layout.ranks_per_node else "between"
        kind = next((KINDS[start] for start in KINDS if _starts(operator.kind, (start,))), "gather")
        sent = sent_bytes(kind, operator.bytes, size)
        if where == "between" and kind != "send":
            # A ring goes once through each node, over the networks of all its ranks there.
            sent /= max(1, min(size, self._layout.ranks_per_node // stride))
        took = self._coefficients.seconds(f"{where} {kind}", "", sent)
        if kind != "send":
            took += self._coefficients.hop_s * (size - 2)
            self.meetings += times
        took *= times
        self.parts[where] += took
        if _starts(operator.kind, IN_BACKGROUND) and operator.kind != "all_reduce":
            self.background += took
        else:
            self.waiting += took


def sent_bytes(kind: str, size: float, ranks: int) -> float:
    """Bytes that each rank sends in a collective over a ring whose largest tensor has `size`
    bytes.
    """
    if kind == "send":
        return size
    return size * (ranks - 1) / ranks * (2 if kind == "reduce" else 1)


def _starts(name: str, with_any: Iterable[str]) -> bool:
    return any(name.startswith(one) or name.lstrip("_").startswith(one) for one in with_any)


def _exposed(computing: Range, background: Range, share: Range) -> Range:
    """What communication in the background adds: at least what is longer than the computing that
    could hide it, and the share of it that is usually not hidden.
    """

    def left(communicating: float, computing: float, share: float) -> float:
        return max(communicating - computing, share * communicating)

    return Range(
        left(background.low, computing.low, share.low),
        left(background.likely, computing.likely, share.likely),
        max(background.high * share.high, left(background.likely, computing.likely, share.likely)),
        worst((background.origin, share.origin)) if background.high else "measured",
    )


def _beside(step: Range, loading: Range) -> Range:
    """The time of a step and of what goes on beside it, whichever is longer; both at the worst,
    where the thread takes the processor or the interpreter from the one that calls kernels.
    """
    binds = loading.likely > step.likely
    return Range(
        max(step.low, loading.low),
        max(step.likely, loading.likely),
        step.high + loading.high,
        worst((step.origin, loading.origin)) if binds else step.origin,
    )


def _bubble(layout: StepLayout) -> Range:
    """Idle time in units of a micro-batch: each rank waits for the others to fill and to empty the
    pipeline, and the less the more stages it holds (Narayanan et al. 2021, section 2.2).
    """
    if layout.pipeline == 1:
        return NOTHING
    idle = (layout.pipeline - 1) / layout.virtual
    return idle * (ZERO_BUBBLE if layout.zero_bubble else UNEVEN)
