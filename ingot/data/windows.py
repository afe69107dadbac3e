"""The order of a source in two levels: its parts in an order of their own, some of them at a time,
and the rows of these in any order.

Whoever reads in this order needs the files of a few parts at once, however large the corpus.
Memory: a number per part.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ingot.data.permutation import GOLDEN, Words, mix, permute


class _Pass(NamedTuple):
    """One pass over a source: its parts in the order of this pass, and the place at which each of
    its windows begins.
    """

    parts: Words
    begins: Words


class Windows:
    """A permutation of a source's rows per (key, pass), like `permutation.permute`, that draws from
    `window` parts at a time.

    Args:
        parts: rows of each part.
        window: how many parts are mixed with each other; the last window of a pass may have fewer.
    """

    def __init__(self, parts: Sequence[int], window: int) -> None:
        self._rows = np.array(parts, np.uint64)
        self._firsts = np.cumsum(self._rows) - self._rows
        self._window = window
        self._pass = lru_cache(4)(self._made)

    def __len__(self) -> int:
        """Windows of a pass."""
        return -(-len(self._rows) // self._window)

    def permute(self, places: Words, key: Words, epochs: Words) -> Words:
        """The row at each of the `places` of a pass."""
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
        """The window that a place lies in."""
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

    def _made(self, epoch: int, key: int) -> _Pass:
        numbers = np.arange(len(self._rows), dtype=np.uint64)
        parts = permute(
            numbers,
            len(numbers),
            np.array([key], np.uint64),
            np.full(len(numbers), epoch, np.uint64),
        )
        before = np.cumsum(self._rows[parts]) - self._rows[parts]
        return _Pass(parts, before[:: self._window])
