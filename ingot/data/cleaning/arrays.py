"""Array types of cleaning, and operations on columns: sorting, joining, slicing by key, distinct
values.

Distinct values are found by sorting: NumPy's hash-based method took ten times as long on 64-bit
hashes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Flags = NDArray[np.bool_]
Indices = NDArray[np.int64]
Hashes = NDArray[np.uint64]
Columns = dict[str, NDArray[Any]]
"""Rows of a table: columns of equal length by name."""

HASH_VALUES = 1 << 64
Number = TypeVar("Number", bound=np.generic)


def firsts(*columns: NDArray[Any]) -> NDArray[np.bool_]:
    """Of sorted rows, whether each differs from the previous one."""
    if not len(columns[0]):
        return np.zeros(0, bool)
    differs = [np.append(True, column[1:] != column[:-1]) for column in columns]
    found: NDArray[np.bool_] = np.logical_or.reduce(differs)
    return found


def distinct(values: NDArray[Number]) -> NDArray[Number]:
    """Each value once, ascending."""
    ascending: NDArray[Number] = np.sort(values, axis=None)
    return ascending[firsts(ascending)]


def joined(runs: Sequence[Columns], like: Mapping[str, Any]) -> Columns:
    """Concatenate the rows of all runs; `like` gives names and types when there are none."""
    return {
        name: np.concatenate([run[name] for run in runs]) if runs else np.zeros(0, dtype)
        for name, dtype in like.items()
    }


def between(columns: Columns, by: str, first: int, last: int | None) -> Columns:
    """The rows whose `by`, ascending, is at least `first` and less than `last` (None:
    unbounded).
    """
    keys = columns[by]
    begin = np.searchsorted(keys, np.array(first, keys.dtype))
    end = len(keys) if last is None else np.searchsorted(keys, np.array(last, keys.dtype))
    return {name: column[begin:end] for name, column in columns.items()}


def bucket_of(columns: Columns, by: str, bucket: int, buckets: int) -> Columns:
    """Rows of one bucket, for rows sorted by a 64-bit hash: the hash range is divided into equal
    buckets.
    """
    last = None if bucket + 1 == buckets else (bucket + 1) * HASH_VALUES // buckets
    return between(columns, by, bucket * HASH_VALUES // buckets, last)


def sorted_by(columns: Columns, *names: str) -> Columns:
    """The rows sorted by `names`, the first one being the primary key."""
    order = np.lexsort([columns[name] for name in reversed(names)])
    return {name: column[order] for name, column in columns.items()}


def shares_of(hashes: Hashes, buckets: int) -> NDArray[np.uint32]:
    """The bucket of each hash, consistent with `bucket_of`."""
    edges = np.array([bucket * HASH_VALUES // buckets for bucket in range(1, buckets)], np.uint64)
    return np.searchsorted(edges, hashes, side="right").astype(np.uint32)
