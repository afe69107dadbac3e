"""Distinct values of arrays, by sorting: NumPy's own way with hashes took ten times as long on
64-bit hashes.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Number = TypeVar("Number", bound=np.generic)


def firsts(*columns: NDArray[Any]) -> NDArray[np.bool_]:
    """Of sorted rows, whether each differs from the one before."""
    if not len(columns[0]):
        return np.zeros(0, bool)
    differs = [np.append(True, column[1:] != column[:-1]) for column in columns]
    found: NDArray[np.bool_] = np.logical_or.reduce(differs)
    return found


def distinct(values: NDArray[Number]) -> NDArray[Number]:
    """Each value once, ascending."""
    ascending: NDArray[Number] = np.sort(values, axis=None)
    return ascending[firsts(ascending)]
