"""What the making of row tables counts, and the look at masks that it needs."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from ingot.base.markers import FileEntry
from ingot.data.columns import Column

Ids = npt.NDArray[np.int64]

WINDOW = 65_536
"""Records that are planned together. Larger ones would leave less padding still, but there is next
to none.
"""


@dataclass(frozen=True)
class Counts:
    """What packing did to the records of a part, or of all parts."""

    rows: int = 0
    tokens: int = 0
    """Tokens that lie in rows; of texts and chats what is left of rows times seq_len is padding."""
    split: int = 0
    """Records longer than a row that were split into several pieces."""
    truncated: int = 0
    """Records longer than a row that were cut to its length."""
    lost: int = 0
    """Records left out since nothing is trained in what truncation left of them, or of one of their
    sides.
    """
    untrained: int = 0
    """Records left out since nothing is trained in them anyway: no mask is set, or there are too
    few tokens.
    """

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            *(getattr(self, field.name) + getattr(other, field.name) for field in fields(Counts))
        )


@dataclass(frozen=True)
class PartRows:
    """The table of one part."""

    counts: Counts
    files: list[FileEntry]


def any_set(mask: Column, begins: Ids, ends: Ids) -> npt.NDArray[np.bool_]:
    """Whether a one lies anywhere in each of the spans `begins` to `ends` of the stream; the spans
    ascend.
    """
    some = ends > begins
    found = np.zeros(len(begins), np.bool_)
    if some.any():
        begins, ends = begins[some], ends[some]
        values = mask.slice(int(begins[0]), int(ends[-1]))
        # Every other result is of what lies between two spans. The end of the last one is that of
        # the values, and left out.
        edges = np.stack((begins, ends), axis=1).ravel()[:-1] - begins[0]
        found[some] = np.maximum.reduceat(values, edges)[::2] > 0
    return found
