"""Permutations of a source's rows computed by arithmetic: nothing is stored, and every place costs
the same.

Either over all rows, or in two levels: the parts are shuffled, then the rows within a window of
parts, so that a reader needs the files of only a few parts at a time. Memory: one number per part.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

ROUNDS = 8
CIRCLE = 1 << 64
# The golden ratio's share of the circle: steps of it spread points over the circle as evenly as any
# fixed step can.
GOLDEN = 0x9E3779B97F4A7C15


def mix(words: Words) -> Words:
    """A bijection of 64-bit words in which every input bit moves every output bit (the finalizer of
    SplitMix64).
    """
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def permute(places: Words, size: int, key: Words, epochs: Words) -> Words:
    """Map each place in [0, size) to another, a permutation per (key, epoch).

    A Feistel network permutes the next power of two; a result of `size` or more is permuted again
    until it is below (cycle walking), on average less than twice.
    """
    bits = max(1, (size - 1).bit_length())
    keys = mix(epochs * np.uint64(GOLDEN) + key)
    result = _feistel(places, bits, keys)
    while len(outside := np.flatnonzero(result >= np.uint64(size))):
        result[outside] = _feistel(result[outside], bits, keys[outside])
    return result


def _feistel(words: Words, bits: int, keys: Words) -> Words:
    """A permutation of [0, 2**bits): each half in turn is changed by a keyed hash of the other."""
    low_bits = np.uint64((bits + 1) // 2)
    low_mask = (np.uint64(1) << low_bits) - np.uint64(1)
    high_mask = (np.uint64(1) << np.uint64(bits // 2)) - np.uint64(1)
    high, low = words >> low_bits, words & low_mask
    for step in range(ROUNDS):
        key = keys + np.uint64(step * GOLDEN % CIRCLE)
        if step % 2:
            high = high ^ (mix(low + key) & high_mask)
        else:
            low = low ^ (mix(high + key) & low_mask)
    return (high << low_bits) | low


class _Epoch(NamedTuple):
    """One pass over a source: its parts in shuffled order, and the first place of each window."""

    parts: Words
    begins: Words


class WindowedPermutation:
    """A permutation of a source's rows per (key, pass), like `permute`, that draws from `window`
    parts at a time.

    Args:
        parts: rows of each part.
        window: how many parts are shuffled together; the last window of a pass may have fewer.
    """

    def __init__(self, parts: Sequence[int], window: int) -> None:
        self._rows = np.array(parts, np.uint64)
        self._firsts = np.cumsum(self._rows) - self._rows
        self._window = window
        self._pass = lru_cache(4)(self._made)

    def __len__(self) -> int:
        """Windows per pass."""
        return -(-len(self._rows) // self._window)

    def permute(self, places: Words, key: Words, epochs: Words) -> Words:
        """The rows at `places` of the passes `epochs`."""
        rows = np.empty_like(places)
        for epoch in np.unique(epochs).tolist():
            begins, at = self._pass(epoch, int(key[0])).begins, np.flatnonzero(epochs == epoch)
            windows = np.searchsorted(begins, places[at], side="right") - 1
            for window in np.unique(windows).tolist():
                mine = at[windows == window]
                rows[mine] = self._within(window, places[mine] - begins[window], epoch, key)
        return rows

    def parts(self, window: int, epoch: int, key: Words) -> list[int]:
        """The parts of a window."""
        members: list[int] = (
            self._pass(epoch, int(key[0]))
            .parts[window * self._window : (window + 1) * self._window]
            .tolist()
        )
        return members

    def at(self, place: int, epoch: int, key: Words) -> int:
        """The window that contains `place`."""
        return (
            int(
                np.searchsorted(
                    self._pass(epoch, int(key[0])).begins, np.uint64(place), side="right"
                )
            )
            - 1
        )

    def _within(self, window: int, places: Words, epoch: int, key: Words) -> Words:
        members = np.array(self.parts(window, epoch, key), np.int64)
        ends = np.cumsum(self._rows[members])
        own = mix(key + np.uint64((window + 1) * GOLDEN % 2**64))
        drawn = permute(places, int(ends[-1]), own, np.full(len(places), epoch, np.uint64))
        part = np.searchsorted(ends, drawn, side="right")
        return self._firsts[members[part]] + drawn - (ends[part] - self._rows[members[part]])

    def _made(self, epoch: int, key: int) -> _Epoch:
        numbers = np.arange(len(self._rows), dtype=np.uint64)
        parts = permute(
            numbers,
            len(numbers),
            np.array([key], np.uint64),
            np.full(len(numbers), epoch, np.uint64),
        )
        before = np.cumsum(self._rows[parts]) - self._rows[parts]
        return _Epoch(parts, before[:: self._window])
