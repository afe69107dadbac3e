"""A function of whole matrices, applied to matrices that ranks hold in shards: the shards of each
are gathered on one rank, its owner, which computes and sends every rank its part of the result.

The matrices are dealt over the ranks in rounds, one each. A rank holds its matrix of one round
whole while that of the next is on its way, never the model. What is computed from one matrix has
the same bits as on one process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ingot.models.parameters import Slices, is_dtensor, shard_slices
from ingot.parallel.masters import Master
from ingot.parallel.mesh import Mesh

Place = tuple[Master, slice]
"""A matrix: a parameter `[A, B]`, or some of its rows; of a stack `[E, A, B]` one of its first
dimension.
"""


@dataclass(frozen=True)
class Matrix:
    """A matrix and this rank's part of it. Slices are relative to the matrix unless said."""

    master: Master
    shape: torch.Size
    """Of the matrix as a part of its parameter: that of a stack begins with 1."""
    owner: int
    rows: slice
    """This rank's part in the first dimension of the master's tensor."""
    part: Slices
    sends: bool
    """Whether the owner takes this rank's part, of the equal ones of several replicas."""
    parts: Sequence[tuple[Slices, bool]] = ()
    """On the owner: the part of every rank, and whether it is taken."""


def deal(places: Sequence[Place], ranks: Mesh) -> list[list[Matrix]]:
    """Rounds of as many matrices as there are ranks, each with another owner; those of a round are
    about equally large.
    """

    def size(place: Place) -> int:
        master, rows = place
        return math.prod((rows.stop - rows.start, *master.parameter.shape[1:]))

    ordered = sorted(places, key=size, reverse=True)
    dealt = [
        _matrix(master, rows, number % ranks.world, ranks)
        for number, (master, rows) in enumerate(ordered)
    ]
    return [dealt[first : first + ranks.world] for first in range(0, len(dealt), ranks.world)]


class WholeMatrices:
    """Applies a function to all matrices of `places`. Collective over `ranks`, which hold the same
    parameters, whole or in shards.

    Args:
        dtype: what the function takes and gives, and what is sent.
    """

    def __init__(self, places: Sequence[Place], ranks: Mesh, dtype: torch.dtype) -> None:
        self._rounds = deal(places, ranks)
        self._ranks = ranks
        self._nothing = torch.empty(0, dtype=dtype, device=ranks.device)

    def apply(
        self,
        part_of: Callable[[Matrix], Tensor],
        function: Callable[[Matrix, Tensor], Tensor],
        take: Callable[[Matrix, Tensor], None],
        meanwhile: Callable[[], None],
    ) -> None:
        """For each matrix: `part_of` gives this rank's part, `function` gets and gives the whole on
        its owner, `take` gets this rank's part of the result. `meanwhile` is called once, while the
        first matrices are on their way.
        """
        rounds, returning = self._rounds, None
        arriving = self._gather(rounds[0], part_of)
        meanwhile()
        for this, following in zip(rounds, [*rounds[1:], []], strict=True):
            mine, whole = self._mine(this), self._assemble(this, arriving)
            # Under way while this matrix is computed: the next one, and the last one's result.
            arriving = self._gather(following, part_of)
            result = None if mine is None or whole is None else function(mine, whole)
            if returning is not None:
                _take(*returning, take)
            returning = this, self._scatter(this, result)
        if returning is not None:
            _take(*returning, take)

    def _gather(self, matrices: list[Matrix], part_of: Callable[[Matrix], Tensor]) -> Exchange:
        parts = [part_of(one).to(self._nothing) for one in matrices]
        sent = [
            part.flatten() if one.sends else self._nothing
            for one, part in zip(matrices, parts, strict=True)
        ]
        mine = self._mine(matrices)
        sizes = [_numel(part) if taken else 0 for part, taken in mine.parts] if mine else []
        return Exchange(sent, sizes, self._ranks, self._nothing)

    def _assemble(self, matrices: list[Matrix], arriving: Exchange) -> Tensor | None:
        """The matrix of the round that this rank owns."""
        mine, pieces = self._mine(matrices), arriving.wait()
        if mine is None:
            return None
        whole = self._nothing.new_empty(mine.shape)
        for (part, taken), piece in zip(mine.parts, pieces, strict=True):
            if taken:
                whole[part] = piece.view(_shape(part))
        return whole

    def _scatter(self, matrices: list[Matrix], result: Tensor | None) -> Exchange:
        mine = self._mine(matrices)
        sent = [] if mine is None or result is None else [result[part] for part, _ in mine.parts]
        return Exchange(
            [one.flatten() for one in sent],
            [_numel(one.part) for one in matrices],
            self._ranks,
            self._nothing,
        )

    def _mine(self, matrices: list[Matrix]) -> Matrix | None:
        return next((one for one in matrices if one.owner == self._ranks.rank), None)


class Exchange:
    """An all-to-all under way: tensor j of `sent` goes to rank j, `sizes` of what comes from each
    rank. Missing ones at the end are empty.
    """

    def __init__(
        self, sent: Sequence[Tensor], sizes: Sequence[int], ranks: Mesh, nothing: Tensor
    ) -> None:
        self._work: dist.Work | None = None
        self._arrived = list(sent)
        if ranks.world == 1 or not (sent or sizes):
            return
        out_sizes = [one.numel() for one in sent] + [0] * (ranks.world - len(sent))
        in_sizes = [*sizes, *[0] * (ranks.world - len(sizes))]
        self._sent = torch.cat([nothing, *sent])  # held until it is sent
        buffer = nothing.new_empty(sum(in_sizes))
        self._work = dist.all_to_all_single(
            buffer, self._sent, in_sizes, out_sizes, group=ranks.group, async_op=True
        )
        self._arrived = list(buffer.split(in_sizes))

    def wait(self) -> list[Tensor]:
        """What has arrived from each rank, flat."""
        if self._work is not None:
            self._work.wait()
        return self._arrived


def _take(
    matrices: list[Matrix], returning: Exchange, take: Callable[[Matrix, Tensor], None]
) -> None:
    for matrix, piece in zip(matrices, returning.wait(), strict=False):
        take(matrix, piece.view(_shape(matrix.part)))


def _matrix(master: Master, rows: slice, owner: int, ranks: Mesh) -> Matrix:
    parameter = master.parameter

    def held_by(rank: int) -> tuple[Slices, int]:
        """A rank's part of the matrix, and where it begins in that rank's shard."""
        first, *others = shard_slices(parameter, _coordinate(parameter, rank))
        low = min(max(first.start, rows.start), rows.stop)
        high = max(low, min(first.stop, rows.stop))
        part = slice(low - rows.start, high - rows.start)
        return (part, *others), low - first.start

    def taken(rank: int) -> bool:
        return _replica(parameter, rank) == _replica(parameter, owner)

    part, begin = held_by(ranks.rank)
    every = range(ranks.world) if owner == ranks.rank else ()
    return Matrix(
        master,
        torch.Size((rows.stop - rows.start, *parameter.shape[1:])),
        owner,
        slice(begin, begin + part[0].stop - part[0].start),
        part,
        taken(ranks.rank),
        [(held_by(rank)[0], taken(rank)) for rank in every],
    )


def _coordinate(parameter: Tensor, rank: int) -> list[int]:
    """The place of a rank on the mesh of a sharded parameter, in which ranks are in order; of a
    parameter that is whole on each rank, none.
    """
    place: list[int] = []
    for size in reversed(parameter.device_mesh.shape if is_dtensor(parameter) else ()):
        rank, along = divmod(rank, size)
        place.insert(0, along)
    return place


def _replica(parameter: Tensor, rank: int) -> list[int]:
    """Which of several equal copies a rank has a shard of."""
    if not is_dtensor(parameter):
        return [rank]
    place = zip(_coordinate(parameter, rank), parameter.placements, strict=True)
    return [along for along, placement in place if placement.is_replicate()]


def _shape(part: Slices) -> tuple[int, ...]:
    return tuple(one.stop - one.start for one in part)


def _numel(part: Slices) -> int:
    return math.prod(_shape(part))
