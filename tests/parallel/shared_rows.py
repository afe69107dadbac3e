"""Rows of documents, and attention over them on ranks that share them, beside attention over whole
rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ingot.models.native.attention import AttnFn, AttnFnFactory, make_attn_fns
from ingot.models.native.head import IGNORE
from ingot.parallel.rows import chunk_pair, split_rows

ROWS = ((5, 19, 24), (40, 3), (48,), ())
"""Lengths of the documents of each row of 48 tokens: some cross all pieces, some lie in one; the
second has padding behind, the last is dead.
"""
LENGTH = 48


class Rows(NamedTuple):
    """A batch as `data` makes it, each `[B, T]`; segments None where rows are one document."""

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    segments: Tensor | None

    def shared(self, rank: int, world: int) -> Rows:
        tokens, labels, positions = (
            split_rows(each, rank, world, fill)
            for each, fill in zip(self[:3], (0, IGNORE, 0), strict=True)
        )
        return Rows(
            tokens,
            labels,
            positions,
            None if self.segments is None else split_rows(self.segments, rank, world),
        )


def make_rows(
    documents: Sequence[Sequence[int]] = ROWS, length: int = LENGTH, vocab: int = 61
) -> Rows:
    """Rows of the same tokens on each rank, with the labels and positions that `data` would give
    them.
    """
    tokens = torch.randint(
        1, vocab, (len(documents), length), generator=torch.Generator().manual_seed(3)
    )
    labels, positions, segments = (
        torch.full_like(tokens, IGNORE),
        torch.zeros_like(tokens),
        torch.zeros_like(tokens),
    )
    for row, lengths in enumerate(documents):
        begin = 0
        for number, count in enumerate(lengths, start=1):
            end = begin + count
            labels[row, begin : end - 1] = tokens[row, begin + 1 : end]
            positions[row, begin:end], segments[row, begin:end] = torch.arange(count), number
            begin = end
        tokens[row, begin:] = 0
    return Rows(tokens, labels, positions, segments)


def plain_rows(length: int = LENGTH) -> Rows:
    """Two rows of one document each."""
    return make_rows([[length]] * 2, length)._replace(segments=None)


def differences(
    attention: AttnFnFactory,
    rows: Rows,
    windows: Sequence[int | None],
    heads: tuple[int, int],
    rank: int,
    world: int,
    dtype: torch.dtype = torch.float32,
    sum_over_ranks: Callable[[Tensor], Tensor] | None = None,
) -> dict[str, float]:
    """The largest difference (see `_relative`) of the output and of each gradient, over windows, to
    float32 attention over whole rows.

    `heads`: of queries, and of keys and values. `sum_over_ranks`: attention has sinks, whose
    gradient is the sum over ranks.
    """
    full = rows.shared(0, 1) if rows.tokens.shape[1] % (2 * world) == 0 else _filled(rows, world)
    mine = rows.shared(rank, world)
    generator = torch.Generator().manual_seed(5)
    q, k, v, gradient = (
        torch.randn(len(rows.tokens), count, full.tokens.shape[1], 8, generator=generator).to(dtype)
        for count in (heads[0], heads[1], heads[1], heads[0])
    )
    sinks = None if sum_over_ranks is None else torch.randn(heads[0], generator=generator)
    found: dict[str, float] = {}
    looks, dense_looks = (
        attention(mine.positions, mine.segments, windows),
        make_attn_fns(full.positions, full.segments, windows),
    )
    for window in windows:
        expected = _results(
            dense_looks[window], *(each.float() for each in (q, k, v, gradient)), sinks
        )
        got = _results(
            looks[window],
            *(chunk_pair(each, rank, world, 2) for each in (q, k, v, gradient)),
            sinks,
        )
        if sum_over_ranks is not None:
            total, whole = sum_over_ranks(got[4]), expected[4]
            found["sinks"] = max(
                found.get("sinks", 0.0), float((total - whole).norm() / whole.norm())
            )
        for name, a, b in zip(("output", "q", "k", "v"), got, expected, strict=False):
            assert a.dtype == dtype
            found[name] = max(
                found.get(name, 0.0),
                _relative(a, chunk_pair(b, rank, world, 2), chunk_pair(gradient, rank, world, 2)),
            )
    return found


def _filled(rows: Rows, world: int) -> Rows:
    """Rows as long as those that the ranks share: `split_rows` of one rank alone with the multiple that
    they need.
    """
    tokens, labels, positions = (
        split_rows(each, 0, 1, fill, 2 * world)
        for each, fill in zip(rows[:3], (0, IGNORE, 0), strict=True)
    )
    return Rows(
        tokens,
        labels,
        positions,
        None if rows.segments is None else split_rows(rows.segments, 0, 1, 0, 2 * world),
    )


def _results(
    look: AttnFn, q: Tensor, k: Tensor, v: Tensor, gradient: Tensor, sinks: Tensor | None
) -> tuple[Tensor, ...]:
    """The output, and the gradients of q, k, v and, where there are any, of the sinks."""
    given = (q, k, v) if sinks is None else (q, k, v, sinks)
    leaves = [each.clone().requires_grad_() for each in given]
    out = look(*leaves) if sinks is None else look(*leaves[:3], sinks=leaves[3])
    return out.detach(), *torch.autograd.grad(out, leaves, gradient)


def _relative(a: Tensor, b: Tensor, gradient: Tensor) -> float:
    """The norm of a - b, by that of b and of the gradient that came in; infinite where a is not
    finite.

    A query that sees itself alone has a gradient of 0, which is computed as the difference of two
    numbers of that size.
    """
    return (
        float((a.float() - b).norm() / (b.norm() + gradient.float().norm()))
        if a.isfinite().all()
        else float("inf")
    )
