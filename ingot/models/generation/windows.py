"""What the layers see of the cache in one forward pass.

On a GPU the heads of one query attend to many keys in parts, which are computed at once
(Flash-Decoding, Dao et al. 2023): a kernel with a mask goes through the keys of a head one block
after the other, and the few heads of a small batch leave most of a GPU idle, the longer the more
keys there are.

Shapes: B rows, H query heads, K key/value heads, G = H / K, T new tokens, S keys, E head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from ingot.base.errors import one_line
from ingot.base.progress import say
from ingot.models.native.attention import attend

QUERIES = 128
"""Queries of a block that attends together."""
PART = 512
"""Keys of a part."""
MANY_KEYS, FEW_HEADS, FEW_ROWS = 2048, 128, 16
"""From so many keys on, for no more key/value heads of all rows: an H100 computes 132 at once. Rows
have eight, often.
"""
MASKED = -1e30
"""Added to scores that are not seen. A part of which nothing is seen then counts for nothing; of
scores of minus infinity the kernel says that their sum is one.
"""
ROUNDING, LEAST = 4, 1e-5
"""Units in the last place that a result may differ by, in norm, when parts are tried; at least
LEAST.
"""


class StoredKeys(Protocol):
    """A cache of keys and values."""

    windows: Sequence[int | None]
    """How many tokens back each layer sees; None: all."""

    def store(self, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, each `[rows, K, length, E]`."""
        ...

    def read_by_a_step(self, rows: int, length: int) -> int:
        """How many tokens of each of some rows a recorded step reads that needs `length` of
        them.
        """
        ...


@dataclass
class _View:
    """What some queries of a pass see: the places of both, and bool `[B, 1, t, S]`, None where they
    see all of it, or, of whole rows (`causal`), each itself and those before it.
    """

    queries: slice
    stored: slice
    seen: Tensor | None
    causal: bool = False
    _added: Tensor | None = None

    def added(self, like: Tensor) -> Tensor | None:
        """What the mask adds to scores, in the dtype of `like`; made once for all layers."""
        if self._added is None and self.seen is not None:
            self._added = like.new_zeros(()).masked_fill(~self.seen, MASKED)
        return self._added

    def attend(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """These queries q `[B, H, t, E]`, and what is stored there, k and v `[B, K, S, E]`;
        `[B, H, t, E]`.
        """
        if sinks is not None:
            return attend(q, k, v, self.seen, sinks)
        added, shared = self.added(q), q.shape[1] != k.shape[1]
        if added is not None and skips_masked(q.device):
            # The kernel for masks does not know heads that share keys, and the one for all else has
            # each score in float32.
            if q.shape[2] == 1:
                grouped = q.reshape(len(q), k.shape[1], -1, q.shape[3])  # as so many queries
                return attend_one(grouped, k, v, added).reshape(q.shape)
            if shared:
                k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
            return _scaled(q, k, v, added)
        return _scaled(q, k, v, added, is_causal=self.causal, enable_gqa=shared)


_scaled = functional.scaled_dot_product_attention


def skips_masked(device: torch.device) -> bool:
    """Whether kernels of this device do not compute scores that a causal mask hides."""
    return device.type != "cpu"


class CacheWindow:
    """The cache as the layers see it in one forward pass."""

    def __init__(
        self, cache: StoredKeys, first: int, starts: Sequence[int], time: int, device: torch.device
    ) -> None:
        self._cache, self._here = cache, slice(first, first + len(starts))
        begin = torch.tensor(starts, device=device)
        self.positions = begin[:, None] + torch.arange(time, device=device)  # [B, T]
        # Where new keys and values belong: one place in all rows, or one in each.
        self._together = min(starts) == max(starts)
        self._place: tuple[slice | Tensor, slice, slice | Tensor] = (
            (self._here, slice(None), slice(starts[0], starts[0] + time))
            if self._together
            else (
                torch.arange(first, first + len(starts), device=device)[:, None],  # [B, 1]
                slice(None),
                self.positions,
            )
        )
        self._views = {
            window: list(self._seen(window, min(starts), max(starts), time))
            for window in set(cache.windows)
        }

    def _seen(self, window: int | None, least: int, most: int, time: int) -> Iterator[_View]:
        """What a layer with this window sees. On a CPU, which computes masked scores as well, block
        by block of queries.
        """
        skips = skips_masked(self.positions.device)
        if skips and most == 0 and time > 1 and (window is None or window >= time):
            yield _View(slice(0, time), slice(0, time), None, causal=True)
            return
        step = time if skips else QUERIES
        for first in range(0, time, step):
            end = min(first + step, time)
            stored = slice(0 if window is None else max(0, least + first - window + 1), most + end)
            seen = None
            if end - first > 1 or least != most:
                keys = torch.arange(stored.start, stored.stop, device=self.positions.device)
                seen = _reached(self.positions[:, None, first:end, None] - keys, window)
            yield _View(slice(first, end), stored, seen)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Store new keys and values `[B, K, T, E]`, and attend with q `[B, H, T, E]` over all that
        each query sees, computing in the type of q; `[B, H, T, E]`.
        """
        stores = self._cache.store(layer, k)
        for store, new in zip(stores, (k, v), strict=True):
            store[self._place] = new if self._together else new.transpose(1, 2)
        views = self._views[self._cache.windows[layer]]
        end = views[-1].stored.stop
        keys, values = (store[self._here, :, :end].to(q.dtype) for store in stores)
        mixed = []
        for view in views:
            k, v = keys[:, :, view.stored], values[:, :, view.stored]
            mixed.append(view.attend(q[:, :, view.queries], k, v, sinks))
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed, dim=2)


class StepWindow:
    """The cache as the layers see it in a step of one token of each of the first rows, in which
    everything that differs from step to step is a tensor: what can be recorded, and played again.

    Args:
        rows: `[B]` the row that each token belongs to: its own place, or the spare row.
        positions: `[B, 1]`.
        length: how many of the stored tokens are needed; all `positions` are below it.
    """

    def __init__(self, cache: StoredKeys, rows: Tensor, positions: Tensor, length: int) -> None:
        self._cache, self._length = cache, cache.read_by_a_step(len(rows), length)
        self._place = rows[:, None], slice(None), positions
        keys = torch.arange(self._length, device=positions.device)
        distance = positions[:, None, :, None] - keys  # [B, 1, 1, S]
        self._views = {
            window: _View(
                slice(0, 1),
                slice(0, self._length),
                _reached(distance, window),
            )
            for window in set(cache.windows)
        }

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """As `CacheWindow.attend`, of one token."""
        stores = self._cache.store(layer, k)
        for store, new in zip(stores, (k, v), strict=True):
            store[self._place] = new.transpose(1, 2)
        keys, values = (store[: len(q), :, : self._length].to(q.dtype) for store in stores)
        return self._views[self._cache.windows[layer]].attend(q, keys, values, sinks)


def _reached(distance: Tensor, window: int | None) -> Tensor:
    """Whether keys are seen that are so far before their query."""
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def attend_one(q: Tensor, k: Tensor, v: Tensor, added: Tensor) -> Tensor:
    """q `[B, K, G, E]`, the heads of one query; k, v `[B, K, S, E]`; `added` `[B, 1, 1, S]` to
    scores; `[B, K, G, E]`.
    """
    rows, shared, _, size = q.shape
    if (
        q.device.type != "cpu"
        and k.shape[2] >= MANY_KEYS
        and rows * shared <= FEW_HEADS
        and _splits(k)
        and _is_right(_Kind(q.device, q.dtype, q.shape[2], size))
    ):
        return in_parts(q, k, v, added)
    return functional.scaled_dot_product_attention(q, k, v, added)


def _splits(k: Tensor) -> bool:
    """Whether keys lie in memory so that parts of them are heads."""
    return k.shape[2] % PART == 0 and k.stride(1) == k.shape[2] * k.stride(2)


def in_parts(q: Tensor, k: Tensor, v: Tensor, added: Tensor) -> Tensor:
    """As `attend_one`, of keys that are whole parts."""
    shared, together = q.shape[1], q.shape[2]
    count = k.shape[2] // PART
    keys, values = (x.unflatten(2, (count, PART)).flatten(1, 2) for x in (k, v))  # [B, K C, P, E]
    queries = q[:, :, None].expand(-1, -1, count, -1, -1).flatten(1, 2)  # [B, K C, G, E]
    mask = added.unflatten(-1, (count, PART)).transpose(2, 3).expand(-1, shared, -1, -1, -1)
    mask = mask.flatten(1, 2).expand(-1, -1, together, -1)  # [B, K C, G, P]
    out, logsum = _kernel(queries, keys, values, mask)
    weights = logsum[..., :together].unflatten(1, (shared, count)).softmax(2)  # [B, K, C, G]
    mixed: Tensor = (out.unflatten(1, (shared, count)) * weights[..., None]).sum(2)
    return mixed.to(q.dtype)


def _kernel(q: Tensor, k: Tensor, v: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
    """Output and, float32, log-sum of each query."""
    aten = torch.ops.aten
    out, logsum, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, added, True, 0.0, False)
    return out, logsum


class _Kind(NamedTuple):
    """What decides whether the kernel can be used."""

    device: torch.device
    dtype: torch.dtype
    together: int
    size: int


@cache
def _is_right(kind: _Kind) -> bool:
    """Whether parts give what plain products give; tried on three, one of which nobody sees."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, 2, length, kind.size, generator=draw).to(kind.device, kind.dtype)
        for length in (kind.together, 3 * PART, 3 * PART)
    )
    seen = torch.arange(3 * PART, device=kind.device) < torch.tensor(
        [[PART - 7], [2 * PART]], device=kind.device
    )
    added = q.new_zeros(()).masked_fill(~seen[:, None, None], MASKED)
    scores = q.float() @ k.float().mT * kind.size**-0.5 + added.float()
    wanted = scores.softmax(-1) @ v.float()
    try:
        apart = float((in_parts(q, k, v, added).float() - wanted).norm() / wanted.norm())
    except RuntimeError as error:
        return _left_out(one_line(error, 120))
    bound = max(ROUNDING * torch.finfo(kind.dtype).eps, LEAST)
    return apart <= bound or _left_out(f"it is {apart:.1g} off")


def _left_out(why: str) -> bool:
    say(f"keys cannot be attended to in parts here ({why}); long texts take longer for it")
    return False
