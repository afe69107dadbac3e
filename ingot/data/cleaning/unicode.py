"""Unicode tables and normal forms over whole Arrow arrays, from one pinned library.

All tables come from pyarrow, which every engine's workers have: the Python of Spark and of this
machine may carry different Unicode tables. Code points from `LIMIT` on (planes 2 and up: rare Han
characters, tags) are handled by rule. Almost all texts are in normal form already; only texts with
characters that may not be are passed to the library.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ingot.base.errors import Failed
from ingot.data.cleaning.arrays import Bytes, Flags, Indices, distinct

LIMIT = 0x20000
SURROGATES = (0xD800, 0xE000)
COMPATIBILITY = (0x2F800, 0x2FA20)
LEAD = 0xC0
NOT_ASCII = 0x80
SPACE = 0x20
ASCII_SPACES = frozenset((9, 10, 11, 12, 13, 28, 29, 30, 31, 32))


@functools.cache
def code_points() -> Any:
    """Every code point below `LIMIT` as an Arrow array of one-character strings; surrogates are
    replaced by a space.
    """
    first, last = SURROGATES
    return pa.array([" " if first <= number < last else chr(number) for number in range(LIMIT)])


@functools.cache
def normalized(form: str) -> Any:
    """`code_points` in a normal form."""
    return pc.utf8_normalize(code_points(), form.upper())


def matching(pattern: str) -> Flags:
    """Which code points match a regular expression of RE2."""
    return np.asarray(pc.match_substring_regex(code_points(), pattern))


def lookup(table: NDArray[Any], points: NDArray[np.uint32], beyond: Any) -> NDArray[Any]:
    """`table[points]`, and `beyond` for points outside the table."""
    found = table[np.minimum(points, LIMIT - 1)]
    if points.size and points.max() >= LIMIT:
        found[points >= LIMIT] = beyond
    return found


def flat_of(texts: Any) -> tuple[bytes, Indices]:
    """The concatenated bytes of an Arrow string array, and the offset of each text: [texts + 1]."""
    width = np.int64 if pa.types.is_large_string(texts.type) else np.int32
    _, offsets, data = texts.buffers()
    if data is None or not len(texts):
        return b"", np.zeros(len(texts) + 1, np.int64)
    found = np.frombuffer(offsets, width)[texts.offset : texts.offset + len(texts) + 1].astype(
        np.int64
    )
    return memoryview(data)[found[0] : found[-1]].tobytes(), found - found[0]


def characters(flat: Bytes) -> tuple[Indices, NDArray[np.uint32], Bytes]:
    """The non-ASCII characters: byte offset, code point and length in bytes of each."""
    at = np.flatnonzero(flat >= NOT_ASCII)
    at = at[flat[at] >= LEAD]
    first = flat[at]
    sizes = (2 + (first >= 0xE0).astype(np.uint8) + (first >= 0xF0)).astype(np.uint8)
    points = (first & (0x7F >> sizes).astype(np.uint8)).astype(np.uint32)
    for number in (1, 2, 3):
        more = slice(None) if number == 1 else np.flatnonzero(sizes > number)
        points[more] = points[more] << 6 | (flat[at[more] + number] & 0x3F)
    return at, points, sizes


def holding(wanted: Indices, offsets: Indices) -> Indices:
    """The texts that contain at least one of the ascending byte offsets `wanted`."""
    return distinct(np.searchsorted(offsets, wanted, side="right") - 1)


@functools.cache
def seconds() -> pa.Array:
    """The characters that composition may join with the previous one: the last code point of each
    composed character.
    """
    composed = pc.and_(
        pc.equal(normalized("NFC"), code_points()), pc.not_equal(normalized("NFD"), code_points())
    )
    return pc.unique(pc.utf8_slice_codeunits(normalized("NFD").filter(composed), -1))


@functools.cache
def _unstable(form: str) -> tuple[Flags, Flags]:
    """Code points that a text in this normal form may not contain, or only in some contexts; and
    marks, two of which may be in the wrong order.
    """
    changed = np.asarray(pc.not_equal(normalized(form), code_points()))
    return changed | np.asarray(pc.is_in(code_points(), value_set=seconds())), matching(r"^\p{M}$")


@functools.cache
def _check_library() -> None:
    """Refuse a library whose normal forms are not Unicode's; pyarrow 25 leaves NFC decomposed."""
    if pc.utf8_normalize(pa.array(["u\u0308"]), "NFC").to_pylist() != ["\u00fc"]:
        raise Failed(
            f"pyarrow {pa.__version__} gets the Unicode normal form NFC wrong; install another"
            " version, such as 26.0.1"
        )


def normalize(texts: pa.Array, form: str) -> pa.Array:
    """The texts in a normal form: `nfc`, `nfkc`, or `none` for unchanged."""
    if form == "none" or not len(texts):
        return texts
    _check_library()
    flat, offsets = flat_of(texts)
    at, points, sizes = characters(np.frombuffer(flat, np.uint8))
    unstable, mark = _unstable(form)
    suspects = lookup(unstable, points, False) | (
        (points >= COMPATIBILITY[0]) & (points < COMPATIBILITY[1])
    )
    marks = lookup(mark, points, False)
    suspects[1:] |= marks[1:] & marks[:-1] & (at[:-1] + sizes[:-1] == at[1:])
    rows = holding(at[suspects], offsets)
    if not len(rows):
        return texts
    mask = np.zeros(len(texts), bool)
    mask[rows] = True
    return pc.replace_with_mask(
        texts, pa.array(mask), pc.utf8_normalize(texts.take(pa.array(rows)), form.upper())
    )
