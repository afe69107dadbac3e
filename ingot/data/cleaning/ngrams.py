"""Words of folded texts, their n-grams as 64-bit hashes, and MinHash signatures of these (Broder
1997; Indyk and Motwani 1998).

A word is a run of letters, digits and marks; in scripts without spaces each character is a word. A
word's hash is a polynomial of its bytes modulo 2**64, mixed; an n-gram's is a polynomial of its
words' hashes, mixed. Two of them collide by chance once in 2**64.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ingot.data.batches.permutation import mix
from ingot.data.cleaning.arrays import Bytes, Flags, Hashes, Indices, distinct
from ingot.data.cleaning.folding import FoldedTexts
from ingot.data.cleaning.unicode import LIMIT, NOT_ASCII, SPACE, characters, lookup, matching

APART, IN_WORD, ALONE = 0, 1, 2
UNSPACED = (
    r"^[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{Tibetan}"
    r"\x{3099}\x{309A}\x{30FC}\x{FF70}]$"
)
HAN_BEYOND = (LIMIT, 0x40000)
LONGEST_WORD = 4096
BLOCK = 1 << 17
BASE, STEP = 0x9E3779B97F4A7C15, 0xD1342543DE82EF95


def powers(base: int, count: int) -> Hashes:
    """base**0, base**1, ... modulo 2**64."""
    found = np.full(count, base, np.uint64)
    found[0] = 1
    return np.multiply.accumulate(found)


@dataclass(frozen=True)
class HashedTexts:
    """Hashes of each text's words or n-grams: those of text i are `values[offsets[i]:offsets[i +
    1]]`.
    """

    values: Hashes
    offsets: Indices

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def counts(self) -> Indices:
        return np.diff(self.offsets)

    @property
    def texts(self) -> Indices:
        """The text that each value belongs to."""
        return np.repeat(np.arange(len(self)), self.counts)

    def sets(self) -> HashedTexts:
        """Each text's distinct values, ascending."""
        found = [
            distinct(self.values[begin:end])
            for begin, end in zip(
                self.offsets[:-1].tolist(), self.offsets[1:].tolist(), strict=True
            )
        ]
        offsets = np.cumsum([0, *(len(values) for values in found)], dtype=np.int64)
        return HashedTexts(np.concatenate(found) if found else np.zeros(0, np.uint64), offsets)


@dataclass(frozen=True)
class _Constants:
    word_bytes: bytes
    classes: Bytes
    values: Hashes
    powers: Hashes
    inverse: Hashes


@functools.cache
def _constants() -> _Constants:
    word_bytes = bytes(byte >= NOT_ASCII or chr(byte).isalnum() for byte in range(256))
    classes = matching(r"^[\p{L}\p{N}\p{M}]$").astype(np.uint8)
    classes[matching(UNSPACED) & (classes == IN_WORD)] = ALONE
    values = mix(np.arange(1, 257, dtype=np.uint64) * np.uint64(BASE))
    values[np.frombuffer(word_bytes, np.uint8) == 0] = 0
    return _Constants(
        word_bytes, classes, values, powers(BASE, BLOCK), powers(pow(BASE, -1, 1 << 64), BLOCK)
    )


def words(folded: FoldedTexts) -> HashedTexts:
    """The words of each text, in order."""
    constants = _constants()
    flat, alone, after = _classified(folded.flat, constants)
    inside = np.frombuffer(flat.tobytes().translate(constants.word_bytes), np.bool_)
    begins = inside.copy()
    begins[1:] &= ~inside[:-1]
    firsts = folded.begins[folded.begins < len(flat)]
    begins[firsts] = inside[firsts]
    begins[alone] = True
    after = after[after < len(flat)]
    begins[after] = inside[after]
    at = _shortened(np.flatnonzero(begins), inside)
    return HashedTexts(
        _word_hashes(flat, at, constants), np.searchsorted(at, np.append(folded.begins, len(flat)))
    )


def _classified(flat: Bytes, constants: _Constants) -> tuple[Bytes, Indices, Indices]:
    """The buffer with spaces for word separators, the places where words of one character begin,
    and the ends of these.
    """
    at, points, sizes = characters(flat)
    if not len(at):
        return flat, at, at
    classes = lookup(constants.classes, points, APART)
    classes[(points >= HAN_BEYOND[0]) & (points < HAN_BEYOND[1])] = ALONE
    apart = np.flatnonzero(classes == APART)
    if len(apart):
        flat = flat.copy()
        for place in range(4):
            flat[at[apart[sizes[apart] > place]] + place] = SPACE
    alone = np.flatnonzero(classes == ALONE)
    return flat, at[alone], at[alone] + sizes[alone]


def _shortened(at: Indices, inside: Flags) -> Indices:
    """Where words begin, with words longer than `LONGEST_WORD` bytes split into several."""
    room = np.diff(np.append(at, len(inside)))
    more = []
    for number in np.flatnonzero(room > LONGEST_WORD).tolist():
        part = inside[at[number] : at[number] + room[number]]
        size = len(part) if part.all() else int(np.argmin(part))
        more.append(np.arange(at[number] + LONGEST_WORD, at[number] + size, LONGEST_WORD))
    return np.sort(np.concatenate([at, *more])) if more else at


def _word_hashes(flat: Bytes, at: Indices, constants: _Constants) -> Hashes:
    """Sum of value(byte) * BASE**place over each word, in blocks that fit a processor's cache;
    bytes between words count as zero.
    """
    found = np.empty(len(at), np.uint64)
    first = 0
    while first < len(at):
        begin = int(at[first])
        last = int(np.searchsorted(at, begin + BLOCK - LONGEST_WORD))
        end = min(int(at[last]) if last < len(at) else len(flat), begin + BLOCK)
        values = constants.values[flat[begin:end]]
        values *= constants.powers[: end - begin]
        here = at[first:last] - begin
        found[first:last] = np.add.reduceat(values, here) * constants.inverse[here]
        first = last
    return mix(found)


def ngrams(found: HashedTexts, size: int) -> HashedTexts:
    """The n-grams of `size` words of each text, in order; a text with fewer words is one n-gram,
    one without words has none.
    """
    values, begins, counts = found.values, found.offsets[:-1], found.counts
    total = len(values)
    factors = powers(STEP, size)
    sums = values.copy()
    whole = np.ones(total, bool)
    for place in range(1, size):
        sums[: max(total - place, 0)] += values[place:] * factors[place]
        # Grams that would reach into the next text; `place` words from a text's end there are only
        # `place` words left.
        whole[(begins + counts - place)[counts >= place]] = False
    short = np.flatnonzero((counts > 0) & (counts < size))
    if len(short):
        own = values[begins[short]].copy()
        for place in range(1, size):
            longer = counts[short] > place
            own[longer] += values[begins[short[longer]] + place] * factors[place]
        sums[begins[short]] = own
        whole[begins[short]] = True
    kept = np.where(counts > 0, np.maximum(counts - size + 1, 1), 0)
    return HashedTexts(
        mix(sums[whole] + np.uint64(size)),
        np.concatenate([[0], np.cumsum(kept)]).astype(np.int64),
    )


FOUND = 0.99
CHUNK = 1 << 16
"""N-grams processed at once, few enough for a processor's cache."""


def bands(similarity: float, permutations: int) -> tuple[int, int]:
    """(bands, rows): how a signature is divided so that two documents of exactly this similarity
    share a band with probability >= 0.99.

    One value of two signatures is equal with probability s, a band of r values with s**r, at least
    one of b bands with 1 - (1 - s**r)**b. Of all r with b = permutations // r, the largest that
    reaches 0.99 is taken: longer bands give fewer false candidates. If none does, r is 1.
    """
    fitting = [
        rows
        for rows in range(1, permutations + 1)
        if 1 - (1 - similarity**rows) ** (permutations // rows) >= FOUND
    ]
    rows = max(fitting, default=1)
    return permutations // rows, rows


def signatures(grams: HashedTexts, permutations: int) -> NDArray[np.uint32]:
    """The minimum of each permutation over each document's n-grams: [documents, permutations]. No
    document is empty.

    A permutation of 32-bit hashes is a multiplication by an odd number modulo 2**32 and an
    addition.
    """
    factors = (mix(np.arange(1, permutations + 1, dtype=np.uint64)) >> np.uint64(32)).astype(
        np.uint32
    ) | np.uint32(1)
    terms = (
        mix(np.arange(1, permutations + 1, dtype=np.uint64) + np.uint64(1 << 32)) >> np.uint64(32)
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
            key = mix((key << np.uint64(1)) ^ signature[:, value])
        keys[:, band] = key
    return keys
