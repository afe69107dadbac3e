"""The ids of many texts as flat arrays, and where two such batches differ."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

Batch = tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]
"""All ids one after the other, and where each text begins, [texts + 1]."""


def flatten(lists: Sequence[Sequence[int]]) -> Batch:
    """Lists of ids as one flat array."""
    offsets = np.zeros(len(lists) + 1, np.int64)
    np.cumsum([len(ids) for ids in lists], out=offsets[1:])
    flat = np.empty(int(offsets[-1]), np.int32)
    for index, ids in enumerate(lists):
        flat[offsets[index] : offsets[index + 1]] = ids
    return flat, offsets


def difference(text: str, wanted: Sequence[int], found: Sequence[int]) -> str:
    """Where the ids of one text begin to differ."""
    at = next(
        (
            place
            for place, (one, other) in enumerate(zip(wanted, found, strict=False))
            if one != other
        ),
        min(len(wanted), len(found)),
    )
    shown = text if len(text) <= 40 else text[:37] + "..."
    return (
        f"differs from the reference on {shown!r} at token {at}: {list(found[at : at + 3])} instead"
        f" of {list(wanted[at : at + 3])}"
    )


def first_difference(texts: Sequence[str], wanted: Batch, found: Batch) -> str | None:
    """The first difference in words; None where there is none."""
    if np.array_equal(found[0], wanted[0]) and np.array_equal(found[1], wanted[1]):
        return None
    if len(found[1]) != len(wanted[1]):
        return f"gives {len(found[1]) - 1} results for {len(texts)} texts"
    for text, one, other in zip(texts, split(wanted), split(found), strict=True):
        if one != other:
            return difference(text, one, other)
    return "gives ids that belong to no text"


def split(batch: Batch) -> Iterator[list[int]]:
    """The ids of each text of a batch."""
    flat, offsets = batch
    return (flat[begin:end].tolist() for begin, end in itertools.pairwise(offsets.tolist()))
