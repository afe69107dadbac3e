"""How the ranks of the context axis share a row: which rank holds which tokens.

A row is split into 2W pieces for W ranks, and rank r holds pieces r and 2W-1-r: under a causal mask
the work of a piece grows with its number, and each such pair has the same work. Labels are already
shifted, so only attention crosses the cuts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ingot.base.errors import WrongInput
from ingot.parallel.collectives import sum_both
from ingot.parallel.mesh import Mesh


def split_rows(row: Tensor, rank: int, world: int, fill: int = 0, multiple: int = 1) -> Tensor:
    """The part of `row` that rank `rank` of `world` holds: `[B, T, ...]` -> `[B, S, ...]`.

    S is T / world. T is first padded on the right with `fill` where it does not divide into pieces,
    or where S is not a multiple of `multiple` (sequence parallelism splits S further); with a world
    of 1, only this padding is done.
    """
    pieces = 2 * world if world > 1 else 1
    missing = -row.shape[1] % math.lcm(pieces, world * multiple)
    if missing:
        row = functional.pad(row, (0, 0) * (row.dim() - 2) + (0, missing), value=fill)
    return row if world == 1 else chunk_pair(row, rank, world, dim=1)


def tensor_part(rows: Tensor, mesh: Mesh) -> Tensor:
    """The part that this rank's experts see, `[B, S / tensor]`, of the rows `[B, S]` that the ranks
    of a tensor axis share.
    """
    return rows.chunk(mesh.tensor.world, dim=1)[mesh.tensor.rank]


def chunk_size(share_length: int) -> int:
    """Tokens in each of the two pieces of a rank. Raises WrongInput for a length that `split_rows`
    does not produce.
    """
    if share_length % 2:
        raise WrongInput(
            f"a part of {share_length} tokens a row is not two pieces of one size; cut rows with"
            " ingot.parallel.rows.split_rows"
        )
    return share_length // 2


def chunk_pair(row: Tensor, rank: int, world: int, dim: int) -> Tensor:
    """Pieces `rank` and 2 `world` - 1 - `rank` of a row along `dim`, concatenated."""
    pieces = row.chunk(2 * world, dim)
    return torch.cat((pieces[rank], pieces[2 * world - 1 - rank]), dim)


def join_rows(shares: Sequence[Tensor], dim: int = 1) -> Tensor:
    """The row joined from the parts of all ranks in rank order: the inverse of `split_rows`, except
    that padding remains.
    """
    if len(shares) == 1:
        return shares[0]
    first, second = zip(*(each.chunk(2, dim) for each in shares), strict=True)
    return torch.cat((*first, *reversed(second)), dim)


@dataclass(frozen=True)
class ContextRowSharing:
    """Implements `ingot.objectives.protocol.RowSharing`."""

    mesh: Mesh

    @property
    def world(self) -> int:
        return self.mesh.context.world

    def share(self, tensor: Tensor, fill: int) -> Tensor:
        # Sequence parallelism splits this part once more.
        return split_rows(
            tensor, self.mesh.context.rank, self.world, fill, multiple=self.mesh.tensor.world
        )

    def total(self, part: Tensor) -> Tensor:
        return sum_both(part, self.mesh.context.group)

    def whole(self, part: Tensor, length: int) -> Tensor:
        """The rows of `length` tokens whose parts the ranks have, without the padding: the inverse
        of `share`, for numbers without a gradient. `[B, S]` -> `[B, T]`. Collective.
        """
        places = self.share(torch.arange(length)[None], length)[0].to(part.device)
        rows = part.new_zeros(len(part), length + 1)
        rows[:, places] = part  # the last place is that of padding
        return self.mesh.context.all_sum(rows)[:, :length]


def row_sharing(mesh: Mesh) -> ContextRowSharing | None:
    """How this job shares rows; None if every rank has whole rows."""
    return None if mesh.context.world == mesh.tensor.world == 1 else ContextRowSharing(mesh)
