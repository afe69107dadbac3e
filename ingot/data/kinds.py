"""What a column holds, by its name: ids, a mask that says which of another column's ids are
trained, or labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ingot.data.columns import token_dtype

MASK, LABEL = "mask", "label"


def is_mask(column: str) -> bool:
    return column == MASK or column.endswith(f"_{MASK}")


def token_columns(columns: Sequence[str]) -> list[str]:
    """Those that hold ids."""
    return [name for name in columns if not is_mask(name) and name != LABEL]


def column_dtype(column: str, vocab_size: int) -> np.dtype[Any]:
    """The type of a column: masks are bytes, labels are numbers, everything else is ids."""
    if column == LABEL:
        return np.dtype("int32")
    return np.dtype("uint8") if is_mask(column) else token_dtype(vocab_size)
