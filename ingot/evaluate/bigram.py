"""A smoothed bigram over tokens: the loss of a model that sees one token back, as a baseline.

Interpolated modified Kneser-Ney (Chen and Goodman 1999), its unigrams interpolated with a uniform
distribution so that every token of the vocabulary has a probability. Counting is exact, and its
memory does not grow with the corpus.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
TokenPairs = tuple[Ints, Ints]
"""Tokens and the tokens that follow them, as arrays of equal length; pairs do not cross
documents.
"""

MAX_PAIRS = 2**24  # about 1 GiB while two tables are merged
BUFFER_PAIRS = 2**22


class PairTable:
    """How often each pair occurred, as ascending keys `token * vocab_size + next` and their
    counts.
    """

    def __init__(self) -> None:
        self.keys: Ints = np.zeros(0, np.int64)
        self.counts: Ints = np.zeros(0, np.int64)
        self._waiting: list[Ints] = []
        self._size = 0

    def add(self, keys: Ints) -> None:
        self._waiting.append(keys)
        self._size += len(keys)
        # Merging only when as many keys are pending as the table holds keeps the total cost at a
        # few passes over all keys.
        if self._size >= max(BUFFER_PAIRS, len(self.keys) // 2):
            self.settle()

    def settle(self) -> None:
        """Merge the keys that were added since the last time into the table."""
        if not self._waiting:
            return
        fresh, times = np.unique(np.concatenate(self._waiting), return_counts=True)
        self._waiting, self._size = [], 0
        keys, counts = np.concatenate((self.keys, fresh)), np.concatenate((self.counts, times))
        order = np.argsort(keys, kind="stable")  # merges two ascending runs in linear time
        keys, counts = keys[order], counts[order]
        starts = np.flatnonzero(np.diff(keys, prepend=-1))
        self.keys = keys[starts]
        self.counts = np.add.reduceat(counts, starts) if len(starts) else counts

    def look_up(self, keys: Ints) -> Ints:
        """The count of each of `keys`, 0 where it did not occur."""
        if not len(self.keys):
            return np.zeros(len(keys), np.int64)
        place = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return np.where(self.keys[place] == keys, self.counts[place], 0)


@dataclass(frozen=True)
class PairStatistics:
    """The counts that Kneser-Ney smoothing needs; V is the size of the vocabulary."""

    totals: Ints
    """Pairs that begin with each token, [V]."""
    types: Ints
    """Different tokens that followed each token once, twice, and more often, [3, V]."""
    continuations: Ints
    """Different tokens that each token followed, [V]."""
    histogram: Ints
    """Different pairs that occurred 1, 2, 3 and 4 times, [4]."""


def bigram_nll(
    training: Callable[[], Iterable[TokenPairs]],
    held_out: Iterable[TokenPairs],
    vocab_size: int,
) -> float:
    """Negative log-likelihood of the second tokens of `held_out` given the first ones, in nats,
    summed.

    `training()` iterates over the training pairs from the start: where more than MAX_PAIRS
    distinct ones could occur, they are counted in several passes, each over a range of first
    tokens.
    """
    held_out_table = PairTable()
    for tokens, following in held_out:
        held_out_table.add(tokens * vocab_size + following)
    held_out_table.settle()
    statistics, counts = count_pairs(training, held_out_table.keys, vocab_size)
    return -float(
        held_out_table.counts
        @ np.log(
            probabilities(
                statistics,
                held_out_table.keys // vocab_size,
                held_out_table.keys % vocab_size,
                counts,
            )
        )
    )


def count_pairs(
    training: Callable[[], Iterable[TokenPairs]],
    held_out_keys: Ints,
    vocab_size: int,
    max_pairs: int = MAX_PAIRS,
) -> tuple[PairStatistics, Ints]:
    """The statistics of the training pairs, and how often each of the `held_out_keys` (ascending)
    occurred, [len(held_out_keys)].
    """
    totals = np.zeros(vocab_size, np.int64)
    for tokens, _ in training():
        totals += np.bincount(tokens, minlength=vocab_size)
    types, continuations = np.zeros((3, vocab_size), np.int64), np.zeros(vocab_size, np.int64)
    histogram, counts = np.zeros(4, np.int64), np.zeros(len(held_out_keys), np.int64)
    for first, last in _ranges(np.minimum(totals, vocab_size), max_pairs):
        table = PairTable()
        for tokens, following in training():
            keys = tokens * vocab_size + following
            table.add(
                keys
                if (first, last) == (0, vocab_size)
                else keys[(tokens >= first) & (tokens < last)]
            )
        table.settle()
        for number in range(3):
            often = table.counts == number + 1 if number < 2 else table.counts >= 3
            types[number] += np.bincount(table.keys[often] // vocab_size, minlength=vocab_size)
        continuations += np.bincount(table.keys % vocab_size, minlength=vocab_size)
        histogram += np.bincount(np.minimum(table.counts, 5), minlength=6)[1:5]
        here = slice(*np.searchsorted(held_out_keys, (first * vocab_size, last * vocab_size)))
        counts[here] = table.look_up(held_out_keys[here])
    return PairStatistics(totals, types, continuations, histogram), counts


def _ranges(sizes: Ints, limit: int) -> Iterator[tuple[int, int]]:
    """Consecutive ranges of tokens whose `sizes` sum to at most `limit`; a single token may exceed
    it.
    """
    first, filled = 0, 0
    for token, size in enumerate(sizes.tolist()):
        if filled and filled + size > limit:
            yield first, token
            first, filled = token, 0
        filled += size
    yield first, len(sizes)


def probabilities(
    statistics: PairStatistics, tokens: Ints, following: Ints, counts: Ints
) -> Floats:
    """P(following | token) for pairs that occurred `counts` times in training, all [N]."""
    lower = unigrams(statistics)[following]
    discounts = discounts_of(statistics.histogram)
    totals = statistics.totals[tokens]
    kept = np.maximum(counts - discounts[np.minimum(counts, 3)], 0.0)
    # The discounted mass of a token goes to the unigrams; for a token that training never saw, they
    # are all there is.
    freed = discounts[1:] @ statistics.types[:, tokens]
    seen = np.maximum(totals, 1)
    return np.where(totals > 0, (kept + freed * lower) / seen, lower)


def unigrams(statistics: PairStatistics) -> Floats:
    """The lower-order distribution [V]: a token's probability grows with the number of distinct
    tokens that it followed.
    """
    times = statistics.continuations
    total, vocab_size = int(times.sum()), len(times)
    if not total:
        return np.full(vocab_size, 1 / vocab_size)
    discount = float(discounts_of(np.bincount(np.minimum(times, 5), minlength=6)[1:5])[1])
    freed = discount * np.count_nonzero(times) / total
    likely: Floats = np.maximum(times - discount, 0.0) / total + freed / vocab_size
    return likely


def discounts_of(histogram: Ints) -> Floats:
    """The discounts of counts 0, 1, 2 and more, [4], from how many pairs were counted 1, 2, 3 and 4
    times.

    The closed estimates of Chen and Goodman; half a count where they would divide by 0. Clamped
    between 0 and the count itself, since the estimates leave that range on little data.
    """
    ones, twos, threes, fours = (float(number) for number in histogram)
    if not ones or not twos:
        return np.array([0.0, 0.5, 0.5, 0.5])
    share = ones / (ones + 2 * twos)
    raw = (
        1 - 2 * share * twos / ones,
        2 - 3 * share * threes / twos,
        3 - 4 * share * fours / threes if threes else 1.5,
    )
    return np.array(
        [
            0.0,
            *(
                min(max(value, 0.05), limit)
                for value, limit in zip(raw, (0.95, 1.95, 2.95), strict=True)
            ),
        ]
    )
