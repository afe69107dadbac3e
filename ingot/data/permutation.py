"""Permutations of the numbers below any size, by arithmetic alone: nothing is stored, and one place
costs as much as any other.
"""

from __future__ import annotations

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
    """Each place in [0, size) to another one, a permutation per (key, epoch).

    A Feistel network permutes the next power of two; a result beyond `size` goes through again
    until it lies below (cycle walking), on average less than twice.
    """
    bits = max(1, (size - 1).bit_length())
    keys = mix(epochs * np.uint64(GOLDEN) + key)
    result = _feistel(places, bits, keys)
    while len(outside := np.flatnonzero(result >= np.uint64(size))):
        result[outside] = _feistel(result[outside], bits, keys[outside])
    return result


def _feistel(words: Words, bits: int, keys: Words) -> Words:
    """A permutation of [0, 2**bits): the two halves change each other in turn, each time by a keyed
    mixture of the other.
    """
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
