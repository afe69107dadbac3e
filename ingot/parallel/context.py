"""Context parallelism: several ranks share each row, and only attention communicates.

`ingot.parallel.rows` splits the rows; the decoder is given an attention that sees the whole row. No
other part of a decoder depends on more than one token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ingot.models.native.attention import AttnFn, AttnFnFactory, make_attn_fns
from ingot.parallel.collectives import exchange, gather
from ingot.parallel.ring import RingAttention
from ingot.parallel.rows import chunk_pair, chunk_size, join_rows


@dataclass(frozen=True)
class UlyssesAttention:
    """Attention over rows that the ranks of a group share, by exchanging tokens for heads (Jacobs
    et al. 2023, arXiv 2309.14509). Shapes: T is a rank's part of a row, W the number of ranks.
    """

    group: ProcessGroup
    world: int

    def __call__(
        self, positions: Tensor, segments: Tensor | None, windows: Iterable[int | None]
    ) -> dict[int | None, AttnFn]:
        """positions, segments `[B, T]`. All ranks must agree on whether there are segments."""
        chunk_size(positions.shape[1])
        attn_fns = make_attn_fns(
            self._row(positions), None if segments is None else self._row(segments), windows
        )
        return {window: partial(self._attend, attn_fn) for window, attn_fn in attn_fns.items()}

    def _row(self, numbers: Tensor) -> Tensor:
        """`[B, T]` -> `[B, WT]`."""
        return join_rows(gather(numbers, self.group))

    def _attend(self, attn_fn: AttnFn, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q `[B, H, T, E]`, k and v `[B, K, T, E]` -> `[B, H, T, E]`."""
        return self._to_tokens(attn_fn(self._to_heads(q), self._to_heads(k), self._to_heads(v)))

    def _to_heads(self, x: Tensor) -> Tensor:
        """`[B, H, T, E]`, this rank's tokens of all heads -> `[B, H/W, WT, E]`, all tokens of this
        rank's heads, in row order.
        """
        return join_rows(exchange(torch.stack(x.chunk(self.world, 1)), self.group).unbind(), dim=2)

    def _to_tokens(self, x: Tensor) -> Tensor:
        """`[B, H/W, WT, E]` -> `[B, H, T, E]`."""
        shares = torch.stack([chunk_pair(x, rank, self.world, dim=2) for rank in range(self.world)])
        return torch.cat(exchange(shares, self.group).unbind(), 1)


def context_attention(
    kind: Literal["ring", "ulysses"], group: ProcessGroup | None, rank: int, world: int
) -> AttnFnFactory:
    """The replacement of `make_attn_fns` in a decoder whose rows are shared by the `world` ranks of
    `group`; `rank` is the rank within it.

    `ring` passes keys and values around and takes any number of heads; `ulysses` exchanges tokens
    for heads and needs both head counts divisible by `world`.
    """
    if group is None or world == 1:
        return make_attn_fns
    if kind == "ring":
        return RingAttention(group, rank, world)
    if kind == "ulysses":
        return UlyssesAttention(group, world)
    raise ValueError(f"parallel.context_by {kind!r} is not ring or ulysses")
