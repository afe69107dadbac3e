"""Which row is sample number s: pure arithmetic of (seed, sizes, weights, s), without an index or
state.

The number of processes does not enter it: any number of them sees the same global batches, and a
run resumes at any position at once.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from ingot.base.errors import WrongInput
from ingot.config.recipe import Recipe
from ingot.data.batches.permutation import CIRCLE, GOLDEN, WindowedPermutation, Words, mix, permute
from ingot.data.columns.reader import PreparedSplit


class SampleOrder:
    """An endless sequence of row ids.

    Without weights it is one pass over all rows after the other, each in an order of its own, every
    row once per pass. With weights, sample s falls to the source in whose arc of a circle the s-th
    golden-ratio step lies, so that after any number of samples each source has had its share to
    within a few samples; and each source passes over its own rows as above.

    Args:
        sizes: rows of each source; row ids count through the sources in this order.
        seed: another seed gives another order.
        weights: shares of the sources, relative to their sum; None for one pass over everything.
        parts: rows of each part of each source; `window` of them are drawn from at a time, None for
            all.
        skipped: ranges [begin, end) of the sequence that are left out on purpose. Samples then are
            counted without them, so
            that the position still is one number: how many were seen.
        begin: the sample that is the first of the sequence; none before it is asked for.

    Raises:
        WrongInput: there is nothing to choose from, a weighted source has no rows, or a skipped
            range is none.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        seed: int,
        weights: Sequence[float] | None = None,
        skipped: Sequence[tuple[int, int]] = (),
        *,
        parts: Sequence[Sequence[int]] = (),
        window: int | None = None,
        begin: int = 0,
    ) -> None:
        if sum(sizes) == 0:
            raise WrongInput("there are 0 training rows; add documents or lower data.seq_len")
        if weights is not None and any(size == 0 for size in sizes):
            raise WrongInput(
                f"data.train[{list(sizes).index(0)}] has a weight but not one row; add documents or"
                " lower data.seq_len"
            )
        self._seed = seed
        self._sizes = [int(size) for size in sizes] if weights is not None else [int(sum(sizes))]
        self._firsts = [sum(self._sizes[:source]) for source in range(len(self._sizes))]
        self._offset = int(mix(np.array([seed], np.uint64))[0])
        self._edges = [0, CIRCLE] if weights is None else _edges(weights)
        self._gaps, self._shifts = _gaps(skipped)
        self._begin = self.place(begin - 1) + 1  # a range skipped from there on is skipped
        of_each = parts if weights is not None else [[rows for source in parts for rows in source]]
        self._windows = (
            [WindowedPermutation(rows, window) for rows in of_each] if window is not None else []
        )
        self._numbers = [sum(map(len, of_each[:source])) for source in range(len(of_each))]

    def rows(self, first_sample: int, count: int) -> npt.NDArray[np.int64]:
        """Row ids of samples `first_sample` to `first_sample + count`, [count]. The cost does not
        depend on `first_sample`.
        """
        return np.concatenate(
            [
                np.empty(0, np.int64),
                *(self._rows(begin, count) for begin, count in self._pieces(first_sample, count)),
            ]
        )

    def _pieces(self, sample: int, count: int) -> Iterator[tuple[int, int]]:
        """Split samples [sample, sample + count) at skipped ranges: (place in the sequence, length)
        of each contiguous piece.
        """
        end = sample + count
        while sample < end:
            gap = bisect.bisect_right(self._gaps, sample)
            until = min([end, *self._gaps[gap : gap + 1]])
            yield sample + self._shifts[gap] - self._begin, until - sample
            sample = until

    def place(self, sample: int) -> int:
        """The place of `sample` in the whole sequence, which includes the skipped ranges before
        it.
        """
        return _place(sample, self._gaps, self._shifts)

    def _rows(self, first_sample: int, count: int) -> npt.NDArray[np.int64]:
        """`rows` for a piece of the sequence without skipped ranges."""
        source = self._sources(first_sample, count)
        rows = np.empty(count, np.int64)
        for number, (size, first) in enumerate(zip(self._sizes, self._firsts, strict=True)):
            mine = np.flatnonzero(source == number)
            if len(mine):
                begin = self.drawn(number, first_sample)
                # Sample numbers of a source are Python integers until they are split, so that
                # nothing overflows.
                epoch, place = divmod(begin, size)
                epochs, places = np.divmod(
                    np.arange(len(mine), dtype=np.uint64) + np.uint64(place), np.uint64(size)
                )
                rows[mine] = first + self._permuted(
                    number, places, epochs + np.uint64(epoch)
                ).astype(np.int64)
        return rows

    def _permuted(self, source: int, places: Words, epochs: Words) -> Words:
        if self._windows:
            return self._windows[source].permute(places, self._key(source), epochs)
        return permute(places, self._sizes[source], self._key(source), epochs)

    @property
    def windowed(self) -> bool:
        """Whether samples are drawn from a window of parts at a time."""
        return bool(self._windows)

    def parts(self, samples: range, *, before: int = 0, after: int = 0) -> list[int]:
        """The parts (numbered across the sources) that `samples` are drawn from, and those of
        `before` windows before and `after` windows after; [] when not windowed.
        """
        found: dict[int, None] = {}
        for begin, count in self._pieces(samples.start, len(samples)):
            for source, (size, those) in enumerate(
                zip(self._sizes, self._windows, strict=bool(self._windows))
            ):
                key, window = self._key(source), list[int]()
                for place in (begin, begin + count - 1):
                    epoch, at = divmod(self.drawn(source, place), size)
                    window.append(epoch * len(those) + those.at(at, epoch, key))
                for number in range(max(0, window[0] - before), window[1] + after + 1):
                    found.update(
                        (self._numbers[source] + part, None)
                        for part in those.parts(number % len(those), number // len(those), key)
                    )
        return list(found)

    def drawn(self, source: int, samples: int) -> int:
        """How many of the first `samples` samples of the sequence, skipped ones included, come from
        `source`; computed in closed form.
        """
        if len(self._sizes) == 1:
            return samples
        below = [_below(samples, self._offset, edge) for edge in self._edges[source : source + 2]]
        return below[1] - below[0]

    def passes(self, samples: range) -> list[float]:
        """How many times over `samples` take the rows of each weighted source; one number where
        there are no weights.
        """
        first, after = samples.start - self._begin, samples.stop - self._begin
        return [
            (self.drawn(source, after) - self.drawn(source, first)) / size
            for source, size in enumerate(self._sizes)
        ]

    def _sources(self, first_sample: int, count: int) -> npt.NDArray[np.int64]:
        """The source of each sample."""
        if len(self._sizes) == 1:
            return np.zeros(count, np.int64)
        begin = np.uint64((self._offset + first_sample * GOLDEN) % CIRCLE)
        points = np.arange(count, dtype=np.uint64) * np.uint64(GOLDEN) + begin
        return np.searchsorted(np.array(self._edges[1:-1], np.uint64), points, side="right")

    def _key(self, source: int) -> Words:
        return mix(np.array([self._seed ^ ((source + 1) * GOLDEN % CIRCLE)], np.uint64))


def sequence_position(sample: int, skipped: Sequence[tuple[int, int]]) -> int:
    """`SampleOrder.place` given only the skipped ranges."""
    return _place(sample, *_gaps(skipped))


def _place(sample: int, gaps: Sequence[int], shifts: Sequence[int]) -> int:
    return sample + shifts[bisect.bisect_right(gaps, sample)]


def order_of(recipe: Recipe, rows: PreparedSplit, begin: int = 0) -> SampleOrder:
    """The order in which the recipe trains on `rows`, from sample `begin` on."""
    data = recipe.data
    return SampleOrder(
        rows.sizes,
        recipe.seed,
        rows.weights,
        data.skip,
        parts=rows.part_rows,
        window=data.window,
        begin=begin,
    )


def _gaps(skipped: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """The sample numbers (not counting skipped ones) at which a gap begins, and the total number of
    skipped samples before each stretch.

    The second list is longer by one: its first entry, 0, is for samples before any gap.
    """
    gaps, shifts, end = list[int](), [0], 0
    for first, last in sorted(skipped):
        if not 0 <= first < last:
            raise WrongInput(
                f"{first:,} to {last:,} is no range of samples to skip; the first is at least 0 and"
                " less than the second"
            )
        new = last - max(first, end)
        if new <= 0:
            continue
        begin = max(first, end) - shifts[-1]
        if gaps and gaps[-1] == begin:
            shifts[-1] += new
        else:
            gaps.append(begin)
            shifts.append(shifts[-1] + new)
        end = last
    return gaps, shifts


def _edges(weights: Sequence[float]) -> list[int]:
    """Boundaries of each source's arc on the circle, [sources + 1]."""
    total = float(sum(weights))
    cumulative = np.cumsum(np.array(weights, np.float64)) / total
    return [
        0,
        *(min(int(edge * 2**53), 2**53 - 1) << (64 - 53) for edge in cumulative[:-1]),
        CIRCLE,
    ]


def _below(count: int, offset: int, edge: int) -> int:
    """How many of the points offset + i * GOLDEN (mod CIRCLE), i < count, lie below `edge`.

    [x mod m < c] is floor(x / m) - floor((x - c) / m), and both sums over an arithmetic progression
    have a closed form.
    """
    shifted = _floor_sum(count, CIRCLE, GOLDEN, offset + CIRCLE - edge) - count
    return _floor_sum(count, CIRCLE, GOLDEN, offset) - shifted


def _floor_sum(n: int, m: int, a: int, b: int) -> int:
    """The sum of floor((a * i + b) / m) over i < n, in O(log m) steps as in Euclid's algorithm."""
    total = 0
    while n:
        total += n * (n - 1) // 2 * (a // m) + n * (b // m)
        a, b = a % m, b % m
        top = a * n + b
        n, b = divmod(top, m)
        m, a = a, m
        if not m:
            break
    return total
