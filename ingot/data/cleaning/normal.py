"""Unicode normal forms of whole Arrow arrays, by one pinned library.

Almost all texts are in normal form already, and a look at their characters tells: a text is changed
only where a character is not its own normal form, may join with the one before, or is a mark after
a mark. Only such texts are given to the library.
"""

from __future__ import annotations

import functools

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ingot.base.errors import Failed
from ingot.data.cleaning.codepoints import (
    COMPATIBILITY,
    Flags,
    characters,
    code_points,
    flat_of,
    holding,
    lookup,
    matching,
    normalized,
)


@functools.cache
def seconds() -> pa.Array:
    """The characters that composition may join with the one before: of all composed characters the
    last part.
    """
    composed = pc.and_(
        pc.equal(normalized("NFC"), code_points()), pc.not_equal(normalized("NFD"), code_points())
    )
    return pc.unique(pc.utf8_slice_codeunits(normalized("NFD").filter(composed), -1))


@functools.cache
def _unstable(form: str) -> tuple[Flags, Flags]:
    """Code points that a text in this normal form may not have, or not everywhere; and marks, two
    of which may stand in the wrong order.
    """
    changed = np.asarray(pc.not_equal(normalized(form), code_points()))
    return changed | np.asarray(pc.is_in(code_points(), value_set=seconds())), matching(r"^\p{M}$")


@functools.cache
def _check_library() -> None:
    """Refuse a library whose normal forms are not those of Unicode; pyarrow 25 leaves NFC
    decomposed.
    """
    if pc.utf8_normalize(pa.array(["u\u0308"]), "NFC").to_pylist() != ["\u00fc"]:
        raise Failed(
            f"pyarrow {pa.__version__} gets the Unicode normal form NFC wrong; install another"
            " version, such as 26.0.1"
        )


def normalize(texts: pa.Array, form: str) -> pa.Array:
    """The texts in a normal form: `nfc`, `nfkc`, or `none` to leave them alone."""
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
