"""MinHash signatures and the bands that near-duplicates share (Broder 1997; Indyk and Motwani
1998).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ingot.data.cleaning.codepoints import Hashes
from ingot.data.cleaning.shingles import Hashed, mixed

FOUND = 0.99
CHUNK = 1 << 16
"""N-grams that are looked at together: few enough for a processor's cache."""


def bands(similarity: float, permutations: int) -> tuple[int, int]:
    """(bands, rows): how a signature is cut, so that two documents of just this similarity share a
    band with probability >= 0.99.

    One value of two signatures is equal with probability s, a band of r values with s**r, at least
    one of b bands with 1 - (1 - s**r)**b. Of all r with b = permutations // r the largest that
    reaches 0.99 is taken: longer bands bring fewer pairs that are not alike. Where none does, r is
    1.
    """
    fitting = [
        rows
        for rows in range(1, permutations + 1)
        if 1 - (1 - similarity**rows) ** (permutations // rows) >= FOUND
    ]
    rows = max(fitting, default=1)
    return permutations // rows, rows


def signatures(grams: Hashed, permutations: int) -> NDArray[np.uint32]:
    """The least value of each permutation over each document's n-grams: [documents, permutations].
    No document is empty.

    A permutation of 32-bit hashes is a multiplication by an odd number modulo 2**32 and an
    addition.
    """
    factors = (mixed(np.arange(1, permutations + 1, dtype=np.uint64)) >> np.uint64(32)).astype(
        np.uint32
    ) | np.uint32(1)
    terms = (
        mixed(np.arange(1, permutations + 1, dtype=np.uint64) + np.uint64(1 << 32)) >> np.uint64(32)
    ).astype(np.uint32)
    found = np.full((permutations, len(grams)), np.iinfo(np.uint32).max, np.uint32)
    hashes = (grams.values >> np.uint64(32)).astype(np.uint32)
    room = np.empty(CHUNK, np.uint32)
    for begin in range(0, len(hashes), CHUNK):
        here = hashes[begin : begin + CHUNK]
        first = int(np.searchsorted(grams.offsets, begin, side="right")) - 1
        last = int(np.searchsorted(grams.offsets, begin + len(here)))
        starts = np.maximum(grams.offsets[first:last] - begin, 0)
        for number in range(permutations):
            permuted = np.multiply(here, factors[number], out=room[: len(here)])
            permuted += terms[number]
            own = found[number, first:last]
            np.minimum(own, np.minimum.reduceat(permuted, starts), out=own)
    return found.T


def band_keys(signature: NDArray[np.uint32], similarity: float) -> Hashes:
    """A 64-bit key for each band of each document: [documents, bands]. Equal bands of the same
    number have equal keys.
    """
    count, rows = bands(similarity, signature.shape[1])
    keys = np.empty((len(signature), count), np.uint64)
    for band in range(count):
        key = np.full(len(signature), band + 1, np.uint64)
        for value in range(band * rows, (band + 1) * rows):
            key = mixed((key << np.uint64(1)) ^ signature[:, value])
        keys[:, band] = key
    return keys
