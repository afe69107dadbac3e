"""Keys and values of the tokens that a model has read, one row per request; the storage grows as
requests do.

Rows in use are kept next to each other, so that attention reads them in place.
Shapes: B rows of one pass, K key/value heads, T new tokens, S tokens to attend over, E head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

LEAST_LENGTH = 64


class KVCache:
    """Rows for up to `max_rows` requests of up to `max_length` tokens, for layers that see
    `windows` tokens back (None: all).

    Nothing is allocated before the first keys arrive: their heads, type and device decide, so that
    a sharded model and any number format are served alike. Rows and lengths double when they run
    out.
    """

    def __init__(self, windows: Sequence[int | None], max_rows: int, max_length: int) -> None:
        self.windows, self.max_rows, self.max_length = windows, max_rows, max_length
        self._rows, self._length = 0, 0
        self._stores: list[tuple[Tensor, Tensor] | None] = [None] * len(windows)

    def window(
        self, first: int, starts: Sequence[int], time: int, device: torch.device
    ) -> CacheWindow:
        """What one pass of the model needs: rows `first`, `first + 1`, ... each get `time` tokens
        from position `starts[i]` on.
        """
        needed = max(starts) + time
        if first + len(starts) > self.max_rows or needed > self.max_length:
            raise ValueError(
                f"rows {first} to {first + len(starts)} of {needed} tokens, {self.max_rows} of"
                f" {self.max_length} fit"
            )
        self._rows = _room(self._rows, first + len(starts), 1, self.max_rows)
        self._length = _room(self._length, needed, LEAST_LENGTH, self.max_length)
        return CacheWindow(self, first, starts, time, device)

    def store(self, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, each `[rows, K, length, E]`, large enough for every window
        handed out.
        """
        _, heads, _, size = like.shape
        old = self._stores[layer]
        if old is None or old[0].shape[0] < self._rows or old[0].shape[2] < self._length:
            # Zeros, not whatever memory holds: masked scores are 0, but 0 times a stray NaN is NaN.
            made = tuple(like.new_zeros(self._rows, heads, self._length, size) for _ in range(2))
            if old is not None:
                rows, _, length, _ = old[0].shape
                for new, had in zip(made, old, strict=True):
                    new[:rows, :, :length] = had
            old = self._stores[layer] = (made[0], made[1])
        return old

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of row `source` into row `target`."""
        for store in self._stores:
            for tensor in store or ():
                tensor[target, :, :length] = tensor[source, :, :length]

    def wipe(self, row: int) -> None:
        """Zero a row whose numbers were not finite, so that the next request in it is not poisoned
        by what is masked.
        """
        for store in self._stores:
            for tensor in store or ():
                tensor[row].zero_()


class CacheWindow:
    """The cache as the layers of one forward pass see it."""

    def __init__(
        self, cache: KVCache, first: int, starts: Sequence[int], time: int, device: torch.device
    ) -> None:
        self._cache, self._length = cache, max(starts) + time
        self._first, self._last = first, first + len(starts)
        begin = torch.tensor(starts, device=device)
        self.positions = begin[:, None] + torch.arange(time, device=device)  # [B, T]
        self._rows = torch.arange(self._first, self._last, device=device)[:, None]  # [B, 1]
        self._seen = {window: self._view(window, min(starts)) for window in set(cache.windows)}

    def _view(self, window: int | None, earliest: int) -> tuple[int, Tensor]:
        """The first stored token that any query of a layer with this window sees, and the mask `[B,
        1, T, S]` from there on.
        """
        begin = 0 if window is None else max(0, earliest - window + 1)
        distance = self.positions[:, None, :, None] - torch.arange(
            begin, self._length, device=self.positions.device
        )
        return begin, distance >= 0 if window is None else (distance >= 0) & (distance < window)

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Store new keys and values `[B, K, T, E]`; answer what the rows see, `[B, K, S, E]`, and
        the mask `[B, 1, T, S]`.
        """
        keys, values = self._cache.store(layer, k)
        keys[self._rows, :, self.positions] = k.transpose(1, 2)
        values[self._rows, :, self.positions] = v.transpose(1, 2)
        here = slice(self._first, self._last)
        begin, mask = self._seen[self._cache.windows[layer]]
        return keys[here, :, begin : self._length], values[here, :, begin : self._length], mask


def _room(have: int, needed: int, least: int, most: int) -> int:
    """A size that holds `needed`: doubled from what there is, so that growing by ones stays
    cheap.
    """
    if needed <= have:
        return have
    size = max(least, have)
    while size < needed:
        size *= 2
    return min(size, most)
