"""The bigram against its formula written out with dictionaries, and against what every probability
must obey.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator

import numpy as np
import pytest

from ingot.evaluate.bigram import (
    PairTable,
    bigram_nll,
    count_pairs,
    discounts_of,
    probabilities,
    unigrams,
)
from tests import tolerances

V = 23


def pairs(seed: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of a Zipf-like language with structure; tokens 20 to 22 never occur."""
    generator = np.random.default_rng(seed)
    tokens = np.minimum(generator.zipf(1.4, size) - 1, 19)
    following = np.where(
        generator.random(size) < 0.6,
        (tokens * 3 + 1) % 20,
        np.minimum(generator.zipf(1.2, size) - 1, 19),
    )
    return tokens.astype(np.int64), following.astype(np.int64)


def chunks(
    data: tuple[np.ndarray, np.ndarray], size: int = 37
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for first in range(0, len(data[0]), size):
        yield data[0][first : first + size], data[1][first : first + size]


class Direct:
    """Interpolated modified Kneser-Ney, one pair at a time, straight from the paper's equations."""

    def __init__(self, data: tuple[np.ndarray, np.ndarray]) -> None:
        self.count = Counter(zip(data[0].tolist(), data[1].tolist(), strict=True))
        self.followers: dict[int, list[int]] = defaultdict(list)
        self.before: Counter[int] = Counter()
        for (token, following), times in self.count.items():
            self.followers[token].append(times)
            self.before[following] += 1
        self.discount = self.discounts(self.count.values())
        self.lower_discount = self.discounts(self.before.values())[1]

    @staticmethod
    def discounts(counts: object) -> list[float]:
        n = Counter(counts)  # type: ignore[call-overload]
        y = n[1] / (n[1] + 2 * n[2])
        return [0.0, 1 - 2 * y * n[2] / n[1], 2 - 3 * y * n[3] / n[2], 3 - 4 * y * n[4] / n[3]]

    def unigram(self, token: int) -> float:
        types, d = len(self.count), self.lower_discount
        return max(self.before[token] - d, 0) / types + d * len(self.before) / types / V

    def probability(self, token: int, following: int) -> float:
        total = sum(self.followers[token])
        if total == 0:
            return self.unigram(following)
        times = self.count[token, following]
        kept = max(times - self.discount[min(times, 3)], 0) if times else 0.0
        freed = sum(self.discount[min(seen, 3)] for seen in self.followers[token])
        return (kept + freed * self.unigram(following)) / total


def test_equals_the_formula() -> None:
    training, held_out = pairs(0, 600), pairs(1, 200)
    held_out[0][:5] = 21  # a token that training never saw
    held_out[1][5:10] = 22  # a follower that training never saw
    direct = Direct(training)
    assert all(0 < d < number + 1 for number, d in enumerate(direct.discount[1:])), (
        "the estimates must not need their limits here"
    )
    expected = -sum(
        math.log(direct.probability(*pair))
        for pair in zip(held_out[0].tolist(), held_out[1].tolist(), strict=True)
    )
    assert bigram_nll(lambda: chunks(training), chunks(held_out), V) == pytest.approx(
        expected, rel=tolerances.EXACT
    )


@pytest.mark.parametrize("max_pairs", [1, 30, 10**6])
def test_any_number_of_passes_counts_the_same(max_pairs: int) -> None:
    training, held_out = pairs(2, 2000), pairs(3, 300)
    asked = np.unique(held_out[0] * V + held_out[1])
    whole, counts = count_pairs(lambda: chunks(training, 100_000), asked, V)
    parts, part_counts = count_pairs(lambda: chunks(training, 11), asked, V, max_pairs)
    for name in ("totals", "types", "continuations", "histogram"):
        assert np.array_equal(getattr(whole, name), getattr(parts, name)), name
    assert np.array_equal(counts, part_counts)


@pytest.mark.parametrize("size", [1, 3, 40, 3000])
def test_probabilities_sum_to_one_and_none_is_zero(size: int) -> None:
    training = pairs(4, size)
    every = np.arange(V * V)
    statistics, counts = count_pairs(lambda: chunks(training), every, V)
    chances = probabilities(statistics, every // V, every % V, counts).reshape(V, V)
    assert chances.min() > 0
    assert chances.sum(axis=1) == pytest.approx(np.ones(V), rel=tolerances.EXACT)
    assert unigrams(statistics).sum() == pytest.approx(1, rel=tolerances.EXACT)


def test_without_training_every_token_is_as_likely() -> None:
    held_out = pairs(5, 10)
    assert bigram_nll(lambda: iter(()), chunks(held_out), V) == pytest.approx(10 * math.log(V))


def test_beats_the_unigrams_on_a_language_with_structure() -> None:
    training, held_out = pairs(6, 20_000), pairs(7, 2000)
    flat = np.bincount(training[1], minlength=V) + 1.0
    unigram_nll = -np.log(flat / flat.sum())[held_out[1]].sum()
    assert bigram_nll(lambda: chunks(training), chunks(held_out), V) < 0.75 * unigram_nll


@pytest.mark.parametrize(
    "histogram",
    [[0, 0, 0, 0], [5, 0, 0, 0], [3, 9, 40, 2], [1, 1, 0, 7], [9, 3, 1, 50], [100, 30, 12, 7]],
)
def test_discounts_never_exceed_the_count(histogram: list[int]) -> None:
    discounts = discounts_of(np.array(histogram))
    assert discounts[0] == 0
    assert all(0 < discount < number for number, discount in enumerate(discounts[1:], start=1))


def test_a_large_vocabulary_needs_no_table_of_its_square() -> None:
    vocab = 150_000
    generator = np.random.default_rng(8)
    training = (generator.integers(0, vocab, 50_000), generator.integers(0, vocab, 50_000))
    value = bigram_nll(
        lambda: chunks(training, 5000), chunks((training[0][:500], training[1][:500])), vocab
    )
    assert 0 < value < 500 * math.log(vocab)


def test_a_table_counts_across_batches_of_keys() -> None:
    table = PairTable()
    generator = np.random.default_rng(9)
    keys = generator.integers(0, 500, (40, 1000))
    for row in keys:
        table.add(row)
        if generator.random() < 0.3:
            table.settle()
    table.settle()
    expected = np.unique(keys, return_counts=True)
    assert np.array_equal(table.keys, expected[0])
    assert np.array_equal(table.counts, expected[1])
    assert table.look_up(np.array([-1, int(expected[0][3]), 10**6])).tolist() == [
        0,
        int(expected[1][3]),
        0,
    ]
    assert PairTable().look_up(np.array([3])).tolist() == [0]
