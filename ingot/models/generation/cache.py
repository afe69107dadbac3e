"""The cache of keys and values that the native decoder generates with: a row for each running
request, and the view of it that the layers see in one forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ingot.base.malloc import mapping_blocks
from ingot.models.generation.split_keys import MASKED, PART, attend_one
from ingot.models.native.attention import attend

LEAST_LENGTH, SHORT_LENGTH = 32, 1024
OWN_BYTES = 2**20
"""From this size on keys and values are mapped alone, so that those that they outgrow are the
system's again.
"""
QUERIES = 128
"""Queries of a block that attends together."""


class KVCache:
    """Rows for up to `max_rows` requests of up to `max_length` tokens, for layers that see
    `windows` tokens back (None: all).

    Nothing is allocated before the first keys arrive: their heads, dtype and device decide, so that
    sharded models and any number format work. Rows and lengths grow by a quarter when they run out.
    Rows in use are kept contiguous, so that attention reads them in place.

    `recorded`: steps that write here are recorded, with the addresses that they write to. There is
    one row more, the last, for what a recorded step writes of rows that it has too many.

    Shapes: B rows of one pass, K key/value heads, T new tokens, S tokens to attend over, E head
    size.
    """

    def __init__(
        self,
        windows: Sequence[int | None],
        max_rows: int,
        max_length: int,
        *,
        recorded: bool = False,
    ) -> None:
        self.windows, self.max_rows, self.max_length = windows, max_rows, max_length
        self._spare = int(recorded)
        self._rows = self._length = 0
        self._stores: list[tuple[Tensor, Tensor] | None] = [None] * len(windows)
        self.changes = 0
        """How often addresses have changed."""

    def window(
        self, first: int, starts: Sequence[int], time: int, device: torch.device
    ) -> CacheWindow:
        """The view of the cache for one forward pass: rows `first`, `first + 1`, ... each get
        `time` tokens from position `starts[i]` on.
        """
        needed = max(starts) + time
        if first + len(starts) > self.max_rows or needed > self.max_length:
            raise ValueError(
                f"rows {first} to {first + len(starts)} of {needed} tokens, {self.max_rows} of"
                f" {self.max_length} fit"
            )
        self.reserve(first + len(starts), needed)
        return CacheWindow(self, first, starts, time, device)

    def reserve(self, rows: int, length: int) -> None:
        """Let `store` make room for so many rows of so many tokens."""
        spare = self._spare
        self._rows = _grown_size(self._rows, rows + spare, 1, self.max_rows + spare)
        # Recorded steps attend to many keys in parts.
        least = PART if spare and length > SHORT_LENGTH else LEAST_LENGTH
        self._length = _grown_size(self._length, length, least, self.max_length)

    def read_by_a_step(self, length: int) -> int:
        """How many tokens of a row a step reads that needs `length` of them: where they are many,
        all that there is room for, which are whole parts.
        """
        return self._length if length > SHORT_LENGTH else length

    @property
    def spare_row(self) -> int:
        """The row that no request has, of a cache for recorded steps."""
        return self._rows - 1

    def store(self, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, each `[rows, K, length, E]`, large enough for every window
        handed out so far.
        """
        _, heads, _, size = like.shape
        old = self._stores[layer]
        if old is None or old[0].shape[0] < self._rows or old[0].shape[2] < self._length:
            # Zeros, not uninitialised memory: masked probabilities are 0, but 0 times NaN is NaN.
            shape = self._rows, heads, self._length, size
            with mapping_blocks(OWN_BYTES):  # smaller ones before it would stay as holes
                made = like.new_zeros(shape), like.new_zeros(shape)
            if old is not None:
                rows, _, length, _ = old[0].shape
                rows -= self._spare  # what that one holds is nobody's, and may not be finite
                for new, had in zip(made, old, strict=True):
                    new[:rows, :, :length] = had[:rows]
            old = self._stores[layer] = made
            self.changes += 1
        return old

    def release(self) -> None:
        """Give the memory back; for use while no row is in use."""
        self._rows = self._length = 0
        self._stores = [None] * len(self.windows)
        self.changes += 1

    def fits(self, length: int) -> bool:
        """Whether what there is has room for a prompt of so many tokens and is not much longer."""
        return length < self._length <= max(4 * length, SHORT_LENGTH)

    def saved(self, row: int, start: int, end: int) -> Tensor:
        """A copy of the keys and values of tokens `start` to `end` of a row,
        `[layers, 2, K, end - start, E]`.
        """
        return torch.stack(
            [
                torch.stack([tensor[row, :, start:end] for tensor in store])
                for store in self._stores
                if store is not None
            ]
        )

    def restore(self, row: int, saved: Tensor) -> None:
        """Make `saved` the first tokens of a row."""
        length = saved.shape[3]
        self.reserve(row + 1, length)
        for layer, pair in enumerate(saved):
            for tensor, kept in zip(self.store(layer, pair[:1]), pair, strict=True):
                tensor[row, :, :length] = kept

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of row `source` to row `target`."""
        for store in self._stores:
            for tensor in store or ():
                tensor[target, :, :length] = tensor[source, :, :length]

    def wipe(self, row: int) -> None:
        """Zero a row that holds non-finite numbers, which would reach the next request in it even
        through the mask.
        """
        for store in self._stores:
            for tensor in store or ():
                tensor[row].zero_()


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
        self, cache: KVCache, first: int, starts: Sequence[int], time: int, device: torch.device
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

    def __init__(self, cache: KVCache, rows: Tensor, positions: Tensor, length: int) -> None:
        self._cache, self._length = cache, cache.read_by_a_step(length)
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


def _grown_size(have: int, needed: int, least: int, most: int) -> int:
    """A size of at least `needed`, a multiple of `least`, a quarter larger than the present one, so
    that growing by ones is amortised.
    """
    if needed <= have:
        return have
    size = max(needed, have * 5 // 4)
    return min(-(-size // least) * least, most)
