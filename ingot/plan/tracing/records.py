"""What tracing a step yields. Imports no torch, so that results can be read where there is none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, get_args

Role = Literal[
    "weights", "masters", "optimizer", "gradients", "gathered", "activations", "temporary"
]
"""What a block of memory holds.

weights: the model's parameters and buffers, this rank's share.
masters: float32 copies of weights that are held in another dtype.
optimizer: the optimizer's state.
gradients: of the trained weights.
gathered: whole weights gathered from all ranks.
activations: made in the forward pass and kept for the backward pass.
temporary: all that does not outlive the pass in which it was made.
"""
ROLES: tuple[Role, ...] = get_args(Role)


class Operator(NamedTuple):
    """A kernel or collective that was called, as far as its time depends on it.

    kind: `matmul`, `attention`, or the name of a collective; of other kernels `memory`, and
        `special`, `softmax` or `random` for those that also compute much for each byte.
    dtype: `float32`, `bfloat16`, ... of the largest operand; of a product, of its factors.
    flops: floating-point operations; 0 for kernels that are bound by memory.
    bytes: bytes read and written; of a collective, those of its largest tensor.
    group: size of the collective's group, and the distance between the numbers of its ranks.
    """

    kind: str
    dtype: str
    flops: float
    bytes: int
    group: tuple[int, int] = (1, 1)


DISPATCH = Operator("dispatch", "float32", 0.0, 0)
"""An operator of a layer that is recomputed selectively: a mode in Python decides what is kept of
it, forward, and what is taken from there, in backward.
"""
SPREAD = Operator("dispatch of shards", "float32", 0.0, 0)
"""An operator on a tensor that is divided among ranks, which Python code of torch divides."""


@dataclass(frozen=True)
class MemoryUse:
    """Bytes held at one moment, by role."""

    bytes: Mapping[Role, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.bytes.values())

    def plus(self, role: Role, size: int) -> MemoryUse:
        """With more bytes of a role."""
        return MemoryUse({**self.bytes, role: self.bytes[role] + size})


@dataclass(frozen=True)
class RankTrace:
    """What one rank of a job does in a step.

    windows: the highest use of memory in each stretch of the step, in order: forward passes, the
        ends of backward passes, the update. In each of them memory grows linearly with layers.
    lengths: changes of memory in each of these stretches.
    between: memory held between two steps.
    build: the highest use before the first step.
    micro_batch: kernels and collectives of one micro-batch, forward and backward, and how often
        each is called, on average.
    update: the same for what is done once a step: reduce, clip, update.
    micro_steps: micro-batches of a step.
    layers: layers of the model that this rank holds.
    pieces: of a GPU, bytes that its allocator reserves and that lie in no block: at least, likely,
        at most.
    """

    rank: int
    windows: tuple[MemoryUse, ...]
    between: MemoryUse
    build: MemoryUse
    micro_batch: Mapping[Operator, float]
    update: Mapping[Operator, float]
    micro_steps: int
    layers: int
    pieces: tuple[int, int, int] = (0, 0, 0)
    lengths: tuple[int, ...] = ()
    extended: bool = False
    """Whether it follows from traces of models with fewer layers."""
    crowded: RankTrace | None = None
    """Where ranks share experts, the trace of one whose experts are chosen more often."""

    @property
    def peak(self) -> MemoryUse:
        """Memory at the highest use in a step; the optimizer's state exists already."""
        return max(self.windows, key=lambda use: use.total)

    def with_layers(self, layers: int, more: RankTrace) -> RankTrace:
        """The same rank with another number of layers, on the line through this trace and that of a
        model with `more` layers.
        """
        by = (layers - self.layers) / (more.layers - self.layers)
        windows = zip(self.windows, more.windows, strict=True)
        return replace(
            self,
            windows=tuple(_extended(few, many, by) for few, many in windows),
            between=_extended(self.between, more.between, by),
            build=_extended(self.build, more.build, by),
            micro_batch=_more_operators(self.micro_batch, more.micro_batch, by),
            update=_more_operators(self.update, more.update, by),
            layers=layers,
            pieces=_many_pieces(self.pieces, more.pieces),
            extended=True,
        )


def _many_pieces(few: tuple[int, int, int], more: tuple[int, int, int]) -> tuple[int, int, int]:
    """Of a model with many layers. What is lost depends on the largest blocks, not on how many
    layers there are, and follows no line: with 16 layers of an 8B it was 0.4 to 1.2 times that of
    two.
    """
    likely = max(few[1], more[1])
    return likely // 4, likely, max(few[2], more[2], likely * 3 // 2)


def _extended(few: MemoryUse, many: MemoryUse, by: float) -> MemoryUse:
    return MemoryUse(
        {role: round(few.bytes[role] + by * (many.bytes[role] - few.bytes[role])) for role in ROLES}
    )


def _more_operators(
    few: Mapping[Operator, float], many: Mapping[Operator, float], by: float
) -> dict[Operator, float]:
    """Operators that depend on the number of layers by their size, such as an optimizer's, are
    taken together by kind; so are all of a kind of which some become rarer than none.
    """
    line = {one: few[one] + by * (many[one] - few[one]) for one in few.keys() & many.keys()}
    rarer = {_kind(one) for one, count in line.items() if count < 0}
    found = {one: count for one, count in line.items() if _kind(one) not in rarer}
    kinds: dict[tuple[str, str, tuple[int, int]], list[float]] = {}
    for operators, weight in ((few, 1 - by), (many, by)):
        for one in operators.keys() - found.keys():
            sums = kinds.setdefault(_kind(one), [0.0, 0.0, 0.0])
            count = operators[one]
            for place, value in enumerate((count, count * one.flops, count * one.bytes)):
                sums[place] += weight * value
    for (kind, dtype, group), (count, flops, size) in kinds.items():
        # Sizes that grow leave their number as it is.
        number = max(1.0, count)
        each = max(0.0, flops / number), max(0, round(size / number))
        found[Operator(kind, dtype, *each, group)] = number
    return found


def _kind(operator: Operator) -> tuple[str, str, tuple[int, int]]:
    return operator.kind, operator.dtype, operator.group
