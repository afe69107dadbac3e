"""The cache of keys and values that the native decoder generates with: a row for each running
request.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ingot.base.hostmemory import host_memory
from ingot.base.malloc import mapping_blocks
from ingot.models.generation.windows import FEW_ROWS, PART, CacheWindow

LEAST_LENGTH, SHORT_LENGTH = 32, 1024


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
        self._rows, self._length = self._sizes(rows, length)

    def _sizes(self, rows: int, length: int) -> tuple[int, int]:
        spare = self._spare
        # Recorded steps attend to many keys in parts.
        least = PART if spare and length > SHORT_LENGTH else LEAST_LENGTH
        return (
            _grown_size(self._rows, rows + spare, 1, self.max_rows + spare),
            _grown_size(self._length, length, least, self.max_length),
        )

    def growth(self, rows: int, length: int) -> int:
        """Bytes that room for so many rows of so many tokens takes beside what there is; 0 as long
        as no keys have arrived.
        """
        grown_rows, grown_length = self._sizes(rows, length)
        growth = 0
        for tensor in (tensor for store in self._stores for tensor in store or ()):
            had_rows, _, had_length, _ = tensor.shape
            a_token = tensor.nbytes // (had_rows * had_length)
            growth += a_token * (grown_rows * grown_length - had_rows * had_length)
        return max(0, growth)

    def shorten(self, rows: int, length: int) -> None:
        """Give back what a long request has left, where the first `rows` rows, which are in use,
        hold no more than `length` tokens, far less than there is room for.
        """
        if length >= self._length or self.fits(length):
            return
        self._rows = self._length = 0
        self.reserve(rows, length)
        for layer, old in enumerate(self._stores):
            if old is not None:
                self._stores[layer] = self._copied(old[0], old)

    def read_by_a_step(self, rows: int, length: int) -> int:
        """How many tokens of each of some rows a step reads that needs `length` of them: of few
        rows, where they are many, all that there is room for, which are whole parts, unless a
        longer request has left much more than that.
        """
        splits = rows <= FEW_ROWS and length > SHORT_LENGTH and 2 * self._length <= 3 * length
        return self._length if splits else length

    @property
    def spare_row(self) -> int:
        """The row that no request has, of a cache for recorded steps."""
        return self._rows - 1

    def store(self, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, each `[rows, K, length, E]`, large enough for every window
        handed out so far.
        """
        old = self._stores[layer]
        if old is None or old[0].shape[0] < self._rows or old[0].shape[2] < self._length:
            old = self._stores[layer] = self._copied(like, old)
        return old

    def _copied(self, like: Tensor, old: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer in the present size, with what the old ones hold."""
        _, heads, _, size = like.shape
        # Zeros, not uninitialised memory: masked probabilities are 0, but 0 times NaN is NaN.
        shape = self._rows, heads, self._length, size
        with mapping_blocks():  # smaller ones before it would stay as holes
            made = like.new_zeros(shape), like.new_zeros(shape)
        for new, had in zip(made, old or (), strict=False):
            # What the spare row holds is nobody's, and may not be finite.
            rows = min(len(new), len(had)) - self._spare
            length = min(new.shape[2], had.shape[2])
            new[:rows, :, :length] = had[:rows, :, :length]
        self.changes += 1
        return made

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


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on the device."""
    if device.type not in ("cuda", "xpu"):
        return host_memory().free
    kept = torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
    return torch.accelerator.get_memory_info(device)[0] + kept


def _grown_size(have: int, needed: int, least: int, most: int) -> int:
    """A size of at least `needed`, a multiple of `least`, a quarter larger than the present one, so
    that growing by ones is amortised.
    """
    if needed <= have:
        return have
    size = max(needed, have * 5 // 4)
    return min(-(-size // least) * least, most)
