"""Signatures and bands: the probability that is promised, and the same for any chunk."""

from __future__ import annotations

import numpy as np
import pytest

from ingot.data.cleaning import minhash
from ingot.data.cleaning.minhash import FOUND, band_keys, bands, signatures
from ingot.data.cleaning.shingles import Hashed


@pytest.mark.parametrize("similarity", [0.3, 0.5, 0.7, 0.8, 0.9, 0.95])
@pytest.mark.parametrize("permutations", [64, 128, 256])
def test_bands(similarity: float, permutations: int) -> None:
    count, rows = bands(similarity, permutations)
    assert count * rows <= permutations
    assert 1 - (1 - similarity**rows) ** count >= FOUND
    longer = rows + 1
    assert 1 - (1 - similarity**longer) ** (permutations // longer) < FOUND


def test_bands_at_the_ends() -> None:
    assert bands(1.0, 128) == (1, 128)
    assert bands(0.01, 16) == (16, 1)


def pairs(similarity: float, size: int, count: int, seed: int) -> Hashed:
    """`count` pairs of sets of `size` with this Jaccard similarity, one after another."""
    chance = np.random.default_rng(seed)
    common = round(2 * size * similarity / (1 + similarity))
    sets = []
    for _ in range(count):
        values = chance.integers(0, 2**64, 2 * size - common, np.uint64)
        sets += [values[:size], values[size - common :]]
    return Hashed(np.concatenate(sets), np.arange(0, 2 * count * size + 1, size))


def test_the_share_of_equal_values_is_the_similarity() -> None:
    found = signatures(pairs(0.6, 80, 400, 1), 128)
    assert abs((found[::2] == found[1::2]).mean() - 0.6) < 0.01


@pytest.mark.parametrize("size", [9, 90, 900])
def test_pairs_at_the_threshold_share_a_band(size: int) -> None:
    keys = band_keys(signatures(pairs(0.8, size, 400, size), 128), 0.8)
    assert keys.shape == (800, 21)
    assert (keys[::2] == keys[1::2]).any(axis=1).mean() >= 0.98


def test_far_pairs_share_none() -> None:
    keys = band_keys(signatures(pairs(0.2, 90, 400, 2), 128), 0.8)
    assert (keys[::2] == keys[1::2]).any(axis=1).mean() < 0.02


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    sets = pairs(0.5, 30, 20, 3)
    whole = signatures(sets, 32)
    monkeypatch.setattr(minhash, "CHUNK", 70)
    assert np.array_equal(signatures(sets, 32), whole)
