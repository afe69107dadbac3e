"""Connected components of a graph of documents that is too large for memory: union-find in a
file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ingot.base.storage import disk_errors
from ingot.data.cleaning.codepoints import Indices

AT_ONCE = 1 << 20
ALONE = -1


def roots(parents: NDArray[np.int64], nodes: Indices) -> Indices:
    """The root of each node; a root is its own parent."""
    found = parents[nodes]
    while True:
        above = parents[found]
        if np.array_equal(above, found):
            return found
        found = above


def union(parents: NDArray[np.int64], left: Indices, right: Indices) -> None:
    """Connect left[i] with right[i] for all i. A root is the smallest node of its tree."""
    while True:
        one, other = roots(parents, left), roots(parents, right)
        parents[left], parents[right] = one, other
        apart = one != other
        if not apart.any():
            return
        left, right, one, other = left[apart], right[apart], one[apart], other[apart]
        np.minimum.at(parents, np.maximum(one, other), np.minimum(one, other))


def write_components(path: Path, nodes: int, edges: Iterable[tuple[Indices, Indices]]) -> int:
    """Write for each of `nodes` the smallest node that it is connected with, `ALONE` for one
    without edges; how many have some.

    Eight bytes a node on disk, mapped; in memory some edges at a time. The order of edges changes
    nothing.
    """
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            parents = np.lib.format.open_memmap(partial, "w+", np.int64, (nodes,))
            for begin, end in _chunks(nodes):
                parents[begin:end] = np.arange(begin, end)
            touched = np.lib.format.open_memmap(
                partial.with_suffix(".touched"), "w+", np.bool_, (nodes,)
            )
            for left, right in edges:
                touched[left] = touched[right] = True
                union(parents, left, right)
            count = 0
            for begin, end in _chunks(nodes):
                found = roots(parents, np.arange(begin, end))
                found[~touched[begin:end]] = ALONE
                parents[begin:end] = found
                count += int(np.count_nonzero(found != ALONE))
            parents.flush()
            del parents, touched
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
            partial.with_suffix(".touched").unlink(missing_ok=True)
    return count


def read_components(path: Path) -> NDArray[np.int64]:
    """What `write_components` wrote, mapped."""
    found: NDArray[np.int64] = np.load(path, mmap_mode="r")
    return found


def _chunks(nodes: int) -> Iterator[tuple[int, int]]:
    return ((begin, min(begin + AT_ONCE, nodes)) for begin in range(0, nodes, AT_ONCE))
