"""The cache of keys and values that the native decoder generates with: a row for each running
request, and the view of it that the layers see in one forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

LEAST_LENGTH = 64


class KVCache:
    """Rows for up to `max_rows` requests of up to `max_length` tokens, for layers that see
    `windows` tokens back (None: all).

    Nothing is allocated before the first keys arrive: their heads, dtype and device decide, so that
    sharded models and any number format work. Rows and lengths double when they run out. Rows in
    use are kept contiguous, so that attention reads them in place.

    Shapes: B rows of one pass, K key/value heads, T new tokens, S tokens to attend over, E head
    size.
    """

    def __init__(self, windows: Sequence[int | None], max_rows: int, max_length: int) -> None:
        self.windows, self.max_rows, self.max_length = windows, max_rows, max_length
        self._rows, self._length = 0, 0
        self._stores: list[tuple[Tensor, Tensor] | None] = [None] * len(windows)

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
        self._reserve(first + len(starts), needed)
        return CacheWindow(self, first, starts, time, device)

    def _reserve(self, rows: int, length: int) -> None:
        """Let `store` make room for so many rows of so many tokens."""
        self._rows = _grown_size(self._rows, rows, 1, self.max_rows)
        self._length = _grown_size(self._length, length, LEAST_LENGTH, self.max_length)

    def store(self, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, each `[rows, K, length, E]`, large enough for every window
        handed out so far.
        """
        _, heads, _, size = like.shape
        old = self._stores[layer]
        if old is None or old[0].shape[0] < self._rows or old[0].shape[2] < self._length:
            # Zeros, not uninitialised memory: masked probabilities are 0, but 0 times NaN is NaN.
            made = tuple(like.new_zeros(self._rows, heads, self._length, size) for _ in range(2))
            if old is not None:
                rows, _, length, _ = old[0].shape
                for new, had in zip(made, old, strict=True):
                    new[:rows, :, :length] = had
            old = self._stores[layer] = (made[0], made[1])
        return old

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
        self._reserve(row + 1, length)
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


class CacheWindow:
    """The cache as the layers see it in one forward pass."""

    def __init__(
        self, cache: KVCache, first: int, starts: Sequence[int], time: int, device: torch.device
    ) -> None:
        self._cache, self._length = cache, max(starts) + time
        self._first, self._last = first, first + len(starts)
        begin = torch.tensor(starts, device=device)
        self.positions = begin[:, None] + torch.arange(time, device=device)  # [B, T]
        self._rows = torch.arange(self._first, self._last, device=device)[:, None]  # [B, 1]
        self._masks = {window: self._view(window, min(starts)) for window in set(cache.windows)}

    def _view(self, window: int | None, earliest: int) -> tuple[int, Tensor]:
        """The first stored token that any query of a layer with this window sees, and the mask
        `[B, 1, T, S]` from there on.
        """
        begin = 0 if window is None else max(0, earliest - window + 1)
        distance = self.positions[:, None, :, None] - torch.arange(
            begin, self._length, device=self.positions.device
        )
        return begin, distance >= 0 if window is None else (distance >= 0) & (distance < window)

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Store new keys and values `[B, K, T, E]`; returns the visible keys and values,
        `[B, K, S, E]` each, and the mask `[B, 1, T, S]`.
        """
        keys, values = self._cache.store(layer, k)
        keys[self._rows, :, self.positions] = k.transpose(1, 2)
        values[self._rows, :, self.positions] = v.transpose(1, 2)
        here = slice(self._first, self._last)
        begin, mask = self._masks[self._cache.windows[layer]]
        return keys[here, :, begin : self._length], values[here, :, begin : self._length], mask


def _grown_size(have: int, needed: int, least: int, most: int) -> int:
    """A size of at least `needed`, doubled from the present one, so that growing by ones is
    amortised.
    """
    if needed <= have:
        return have
    size = max(least, have)
    while size < needed:
        size *= 2
    return min(size, most)
