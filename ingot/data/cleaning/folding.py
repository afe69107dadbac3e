"""Texts folded for deduplication: without differences of case, diacritics and white space; works on
whole buffers.

Case: upper, then lower, so that final sigma is sigma and long s is s; sharp s becomes ss.
Diacritics: the combining marks of Latin, Greek, Cyrillic, Hebrew and Arabic are removed; marks that
act as letters (kana voicing, Indic vowels) stay. White space: a run of any kind becomes one space,
none at the ends. ASCII is folded by a table over bytes. Other characters are looked up one by one;
where the folded character takes fewer bytes, the surplus is cut out of the buffer.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ingot.base.errors import WrongInput
from ingot.data.cleaning.arrays import Bytes, Flags, Indices
from ingot.data.cleaning.unicode import (
    ASCII_SPACES,
    LIMIT,
    SPACE,
    characters,
    code_points,
    flat_of,
    holding,
    lookup,
    matching,
    normalize,
    normalized,
    seconds,
)

DIACRITICS = (
    r"[\x{0300}-\x{036F}\x{1AB0}-\x{1AFF}\x{1DC0}-\x{1DFF}\x{20D0}-\x{20FF}\x{FE20}-\x{FE2F}"
    r"\x{0591}-\x{05BD}\x{05BF}\x{05C1}\x{05C2}\x{05C4}\x{05C5}\x{05C7}"
    r"\x{0610}-\x{061A}\x{064B}-\x{065F}\x{0670}\x{06D6}-\x{06DC}\x{06DF}-\x{06E4}\x{06E7}\x{06E8}\x{06EA}-\x{06ED}]+"
)
SHARP_S = ("ß", "ẞ")
IOTA_BELOW = "\u0345"
WIDEST = 4
ASCII = bytes(
    SPACE if byte in ASCII_SPACES else ord(chr(byte).lower()) if byte < 128 else byte
    for byte in range(256)
)


@dataclass(frozen=True)
class FoldedTexts:
    """Folded texts in one buffer: text i is `flat[begins[i]:ends[i]]`, UTF-8. At most one space
    lies between two texts.
    """

    flat: Bytes
    begins: Indices
    ends: Indices

    def __len__(self) -> int:
        return len(self.begins)


@dataclass(frozen=True)
class _Tables:
    """By code point: the folded character's bytes [LIMIT, 4] and their number, whether folding
    changes it, and whether its text is normalised first.
    """

    bytes: Bytes
    sizes: Bytes
    changed: Flags
    joins: Flags


@functools.cache
def _tables() -> _Tables:
    points = code_points()
    cased = pc.utf8_lower(pc.utf8_upper(points))
    plain = pc.replace_substring_regex(pc.utf8_normalize(cased, "NFD"), DIACRITICS, "")
    folded = pc.if_else(pc.utf8_is_space(points), " ", pc.utf8_normalize(plain, "NFC"))
    folded = _shortened(pc.if_else(pc.is_in(points, value_set=pa.array(SHARP_S)), "ss", folded))
    table, sizes = np.zeros((LIMIT, WIDEST), np.uint8), np.zeros(LIMIT, np.uint8)
    flat, offsets = flat_of(folded)
    sizes[:] = np.diff(offsets)
    place = np.arange(offsets[-1]) - np.repeat(offsets[:-1], np.diff(offsets))
    table[np.repeat(np.arange(LIMIT), np.diff(offsets)), place] = np.frombuffer(flat, np.uint8)
    return _Tables(table, sizes, np.asarray(pc.not_equal(points, folded)), _joins())


def _shortened(folded: pa.Array) -> pa.Array:
    """Where a folded character is longer than its original, replace it by the shortest character
    that folds alike, so that a buffer never grows.
    """
    points = code_points()
    longer = pc.unique(
        folded.filter(pc.greater(pc.binary_length(folded), pc.binary_length(points)))
    )
    rows = np.flatnonzero(pc.is_in(folded, value_set=longer))
    own, letters = points.take(pa.array(rows)).to_pylist(), folded.take(pa.array(rows)).to_pylist()
    shortest: dict[str, str] = {}
    for letter, folds_to in sorted(
        zip(own, letters, strict=True), key=lambda pair: (len(pair[0].encode()), pair[0])
    ):
        shortest.setdefault(folds_to, letter)
    mask = np.zeros(len(folded), bool)
    mask[rows] = True
    return pc.replace_with_mask(
        folded, pa.array(mask), pa.array([shortest[folds_to] for folds_to in letters], pa.string())
    )


def _joins() -> Flags:
    """Code points of which a table does not know what they become; a text that has one is
    normalised first. NFC may compose them with the previous one and they are no diacritics, or it
    takes them apart into more bytes than a buffer has room for (Hindi letters with a nukta), or
    their upper case is a letter (the iota below a Greek one).
    """
    letters = seconds().filter(pc.invert(pc.match_substring_regex(seconds(), DIACRITICS)))
    composed = np.asarray(pc.is_in(code_points(), value_set=letters))
    parted = pc.greater(pc.binary_length(normalized("NFC")), pc.binary_length(code_points()))
    joins: Flags = composed | np.asarray(parted)
    joins[ord(IOTA_BELOW)] = True
    return joins


def fold(texts: pa.Array) -> FoldedTexts:
    """Fold every text."""
    raw, offsets = flat_of(texts)
    data = np.frombuffer(bytearray(raw).translate(ASCII), np.uint8)
    at, points, sizes = characters(data)
    if len(at):
        tables = _tables()
        joins = lookup(tables.joins, points, True)
        if joins.any():
            rows = holding(at[joins], offsets)
            joined = normalize(texts.take(pa.array(rows)), "nfc")
            if not joined.equals(texts.take(pa.array(rows))):
                mask = np.zeros(len(texts), bool)
                mask[rows] = True
                return fold(pc.replace_with_mask(texts, pa.array(mask), joined))
        data, offsets = _substitute(data, offsets, tables, at, points, sizes)
    return _collapse(data, offsets)


def _substitute(
    data: Bytes,
    offsets: Indices,
    tables: _Tables,
    at: Indices,
    points: NDArray[np.uint32],
    sizes: Bytes,
) -> tuple[Bytes, Indices]:
    changed = np.flatnonzero(lookup(tables.changed, points, False))
    if not len(changed):
        return data, offsets
    at, points, sizes = at[changed], points[changed], sizes[changed]
    table, wanted = tables.bytes[points], tables.sizes[points]
    surplus = []
    for place in range(WIDEST):
        inside = place < wanted
        data[at[inside] + place] = table[inside, place]
        surplus.append(at[(place >= wanted) & (place < sizes)] + place)
    return _without(data, offsets, np.sort(np.concatenate(surplus)))


def _without(data: Bytes, offsets: Indices, gone: Indices) -> tuple[Bytes, Indices]:
    """The buffer without the bytes at the ascending places `gone`."""
    if not len(gone):
        return data, offsets
    keep = np.ones(len(data), bool)
    keep[gone] = False
    return data[keep], offsets - np.searchsorted(gone, offsets)


def _collapse(data: Bytes, offsets: Indices) -> FoldedTexts:
    spaces = data == SPACE
    surplus = spaces.copy()
    surplus[1:] &= spaces[:-1]
    firsts = offsets[:-1][offsets[:-1] < len(data)]
    surplus[firsts] = spaces[firsts]
    data, offsets = _without(data, offsets, np.flatnonzero(surplus))
    begins, ends = offsets[:-1], offsets[1:].copy()
    some = np.flatnonzero(ends > begins)
    ends[some] -= data[ends[some] - 1] == SPACE
    return FoldedTexts(data, begins, ends)


def digests(folded: FoldedTexts) -> NDArray[np.uint64]:
    """A 128-bit hash of each folded text: [texts, 2]."""
    view = folded.flat.data
    found = b"".join(
        [
            hashlib.blake2b(view[begin:end], digest_size=16).digest()
            for begin, end in zip(folded.begins.tolist(), folded.ends.tolist(), strict=True)
        ]
    )
    return np.frombuffer(found, np.uint64).reshape(-1, 2)


@functools.cache
def fold_identity() -> str:
    """A digest of how this process folds and normalises all code points."""
    tables, digest = _tables(), hashlib.sha256()
    digest.update(
        tables.bytes.tobytes()
        + tables.sizes.tobytes()
        + tables.joins.tobytes()
        + matching(r"^[\p{L}\p{N}\p{M}]$").tobytes()
    )
    for form in ("NFC", "NFKC"):
        flat, offsets = flat_of(normalized(form))
        digest.update(flat + offsets.tobytes())
    return digest.hexdigest()[:16]


def check_fold(expected: str) -> None:
    """Refuse to run with other Unicode tables than the process that planned the work: the same text
    would fold to two different ones.

    Raises:
        WrongInput: this process folds differently from the one that planned the work.
    """
    if fold_identity() != expected:
        raise WrongInput(
            f"a worker's pyarrow {pa.__version__} folds text otherwise ({fold_identity()}) than"
            f" where the work was planned ({expected}): install the same pyarrow on every worker"
        )
