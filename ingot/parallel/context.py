"""Context parallelism: several ranks share each row, and only attention communicates.

`ingot.parallel.rows` splits the rows; the decoder is given an attention that sees the whole row. No
other part of a decoder depends on more than one token. There are two ways.

Ring attention (Liu et al. 2023, arXiv 2310.01889): every rank keeps its queries while keys and
values travel once around the ring. In each of W steps a rank sends the keys and values that it
holds to the next rank, and computes attention of its queries over them while those of the previous
rank arrive; the parts are merged by their log-sums. Backward is a second round: keys and values
travel again, and their gradients follow one step behind, each rank adding its contribution, until
they return to their owner. The mask is that of dense attention over whole rows: no later token, no
other document, nothing outside the window. Since a row is split into 2W pieces, most pairs of
pieces are attended to entirely or not at all; only the others need a mask.

Ulysses (Jacobs et al. 2023, arXiv 2309.14509): tokens are exchanged for heads.

Shapes: T is this rank's part of a row, two pieces of P tokens each; the others as in
`ingot.parallel.blockwise`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from ingot.models.device import is_planned
from ingot.models.native.attention import AttnFn, AttnFnFactory, make_attn_fns
from ingot.parallel.blockwise import PartialAttention, merge
from ingot.parallel.collectives import exchange, gather
from ingot.parallel.fused_blocks import kernel_for
from ingot.parallel.rows import chunk_pair, chunk_size, join_rows


class RingAttention:
    """Attention over rows that the ranks of a group share.

    Excluded from compilation: the pairs that are skipped depend on the documents of each batch, and
    layers would be recompiled for each.
    """

    def __init__(self, group: ProcessGroup, rank: int, world: int) -> None:
        self.group, self.rank, self.world = group, rank, world
        # Not as decorators: those would import the compiler (a second) wherever this file is
        # imported.
        self.attend: Callable[..., Tensor] = torch.compiler.disable(_ring_attend)
        self._uncompiled: Callable[
            [Tensor, Tensor | None, Iterable[int | None]], dict[int | None, AttnFn]
        ] = torch.compiler.disable(self._make_attn_fns)

    def __call__(
        self, positions: Tensor, segments: Tensor | None, windows: Iterable[int | None]
    ) -> dict[int | None, AttnFn]:
        """positions, segments `[B, T]`. All ranks must agree on whether there are segments."""
        return self._uncompiled(positions, segments, windows)

    def _make_attn_fns(
        self, positions: Tensor, segments: Tensor | None, windows: Iterable[int | None]
    ) -> dict[int | None, AttnFn]:
        size = chunk_size(positions.shape[1])
        pieces = (
            None
            if segments is None
            else join_rows(gather(segments, self.group)).chunk(2 * self.world, dim=1)
        )  # each [B, P]
        made: dict[int | None, AttnFn] = {}
        attn_fns: dict[int | None, AttnFn] = {}
        for window in windows:
            reach = window if window is not None and window < 2 * self.world * size else None
            if reach not in made:
                made[reach] = _RingAttnFn(
                    plan_ring(
                        self,
                        size,
                        pieces,
                        reach,
                        positions.device,
                        peek=positions.device.type == "cpu" and not is_planned(),
                    )
                )
            attn_fns[window] = made[reach]
        return attn_fns


class _RingAttnFn:
    def __init__(self, schedule: RingSchedule) -> None:
        self._schedule = schedule

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        return self._schedule.ring.attend(self._schedule, q, k, v, sinks)


class BlockPair(NamedTuple):
    """One of this rank's two pieces of queries attends to one of the two pieces of keys present in
    a step; `mask` and `causal` as in `ingot.parallel.blockwise.BlockKernel`.
    """

    queries: int
    keys: int
    mask: Tensor | None
    causal: bool


class RingSchedule(NamedTuple):
    """The block pairs of each step of a round; the same in all layers, forward and backward."""

    ring: RingAttention
    steps: list[list[BlockPair]]


def plan_ring(
    ring: RingAttention,
    size: int,
    segments: Sequence[Tensor] | None,
    window: int | None,
    device: torch.device,
    *,
    peek: bool,
) -> RingSchedule:
    """The schedule of a round. In step s a rank holds the keys of the rank s places before it.

    Args:
        size: P.
        segments: the document numbers of all pieces of the row, each `[B, P]`.
        peek: read them, so that pairs without a common document cost nothing. On an accelerator
            that would synchronise.
    """
    own = _piece_numbers(ring.rank, ring.world)
    steps = []
    for step in range(ring.world):
        here = _piece_numbers((ring.rank - step) % ring.world, ring.world)
        pairs = []
        for queries, i in enumerate(own):
            for keys, j in enumerate(here):
                same = (
                    None
                    if segments is None
                    else segments[i][:, None, :, None] == segments[j][:, None, None, :]
                )  # [B, 1, P, P]
                seen = _pair_mask((i - j) * size, size, same, window, device, peek=peek)
                if seen is not None:
                    pairs.append(BlockPair(queries, keys, *seen))
        steps.append(pairs)
    return RingSchedule(ring, steps)


def _piece_numbers(rank: int, world: int) -> tuple[int, int]:
    """The numbers of the two pieces that a rank holds."""
    return rank, 2 * world - 1 - rank


def _pair_mask(
    ahead: int,
    size: int,
    same: Tensor | None,
    window: int | None,
    device: torch.device,
    *,
    peek: bool,
) -> tuple[Tensor | None, bool] | None:
    """`mask` and `causal` of a piece of queries that starts `ahead` tokens after a piece of keys;
    None if no query attends.

    `same` `[B, 1, P, P]`: whether query and key belong to one document.
    """
    if ahead < 0 or (window is not None and ahead - size + 1 >= window):
        return None
    if same is not None and peek:
        if not same.any():
            return None
        same = None if same.all() else same
    whole_window = window is None or ahead + size - 1 < window
    if same is None and whole_window:
        return None, ahead == 0
    place = torch.arange(size, device=device)
    distance = ahead + place[:, None] - place  # [P, P]
    mask = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    return (mask[None, None] if same is None else mask & same), False


def _ring_attend(
    schedule: RingSchedule, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
) -> Tensor:
    """q `[B, H, T, E]`, k and v `[B, K, T, E]`, sinks `[H]` -> `[B, H, T, E]`."""
    kind = q.device.type
    if torch.is_autocast_enabled(kind):
        q, k, v = (each.to(torch.get_autocast_dtype(kind)) for each in (q, k, v))
    out: Tensor = _Ring.apply(q, k, v, sinks, schedule)  # type: ignore[no-untyped-call]
    return out


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, schedule: RingSchedule
    ) -> Tensor:
        ring, steps = schedule
        ours = q.chunk(2, 2)
        parts: list[PartialAttention | None] = [None, None]
        travelling = torch.stack((k, v))  # [2, B, K, T, E]
        with torch.autocast(q.device.type, enabled=False):
            for step, pairs in enumerate(steps):
                arriving, under_way = _pass_on(ring, [travelling] if step + 1 < ring.world else [])
                here = travelling.chunk(2, 3)
                for queries, keys, mask, causal in pairs:
                    query, (key, value) = ours[queries], here[keys]
                    kernel = kernel_for(query, key, mask)
                    parts[queries] = merge(
                        parts[queries], kernel.forward(query, key, value, mask, causal)
                    )
                _wait(under_way)
                travelling = arriving[0] if arriving else travelling
        # Neither part is None: every query sees itself in the first step.
        out, logsum = (
            torch.cat(halves, 2)
            for halves in zip(*(part for part in parts if part is not None), strict=True)
        )
        if sinks is not None:  # one more block, of one key without a value
            whole = torch.logaddexp(logsum, sinks.float()[:, None])  # [B, H, T]
            out, logsum = out * (logsum - whole).exp()[..., None], whole
        out = out.to(q.dtype)
        ctx.schedule = schedule
        ctx.save_for_backward(q, k, v, out, logsum, sinks)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, logsum, sinks = ctx.saved_tensors
        ring, steps = ctx.schedule
        ours = list(zip(*(each.chunk(2, 2) for each in (gradient, q, out, logsum)), strict=True))
        dq = torch.zeros_like(q, dtype=torch.float32)
        travelling = torch.stack((k, v))
        behind: list[
            Tensor
        ] = []  # the gradient of the keys and values that were here a step ago, [2, B, K, T, E]
        with torch.autocast(q.device.type, enabled=False):
            for step, pairs in enumerate(steps):
                arriving, under_way = _pass_on(
                    ring, ([travelling] if step + 1 < ring.world else []) + behind
                )
                here = travelling.chunk(2, 3)
                dkv = torch.zeros_like(travelling, dtype=torch.float32)
                for queries, keys, mask, causal in pairs:
                    (grad, query, *seen), (key, value) = ours[queries], here[keys]
                    whole = PartialAttention(*seen)
                    found = kernel_for(query, key, mask).backward(
                        grad, query, key, value, whole, mask, causal
                    )
                    for total, part in zip(
                        (dq.chunk(2, 2)[queries], *dkv.chunk(2, 3)[keys]), found, strict=True
                    ):
                        total += part
                _wait(under_way)
                if behind:
                    dkv += arriving.pop()
                behind = [dkv]
                travelling = arriving[0] if arriving else travelling
            (home,), under_way = _pass_on(ring, behind)
            _wait(under_way)
        dsinks = None
        if sinks is not None:
            mean = (gradient.float() * out.float()).sum(-1)  # [B, H, T]
            dsinks = -((sinks.float()[:, None] - logsum).exp() * mean).sum((0, 2)).to(sinks.dtype)
        return dq.to(q.dtype), home[0].to(k.dtype), home[1].to(v.dtype), dsinks, None


def _pass_on(ring: RingAttention, leaving: list[Tensor]) -> tuple[list[Tensor], list[Work]]:
    """Start sending tensors to the next rank, and receiving the same number and shapes from the
    previous one.
    """
    arriving = [torch.empty_like(each) for each in leaving]
    after, before = (ring.rank + 1) % ring.world, (ring.rank - 1) % ring.world
    sent = [dist.P2POp(dist.isend, each, group=ring.group, group_peer=after) for each in leaving]
    received = [
        dist.P2POp(dist.irecv, each, group=ring.group, group_peer=before) for each in arriving
    ]
    return arriving, dist.batch_isend_irecv(sent + received) if leaving else []


def _wait(under_way: list[Work]) -> None:
    for work in under_way:
        work.wait()


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

    def _attend(
        self, attn_fn: AttnFn, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """q `[B, H, T, E]`, k and v `[B, K, T, E]`, sinks `[H]` -> `[B, H, T, E]`."""
        more = {}
        if sinks is not None:
            more["sinks"] = sinks.chunk(self.world)[dist.get_rank(self.group)]
        heads = (self._to_heads(q), self._to_heads(k), self._to_heads(v))
        return self._to_tokens(attn_fn(*heads, **more))

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
