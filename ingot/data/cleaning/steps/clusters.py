"""Decides which candidates are near-duplicates: exact Jaccard similarity of their n-gram sets, and
the resulting clusters.

Documents that share a band are compared pair by pair, each pair once, except pairs that are in one
cluster already. In a group of more than `LEADERS` documents, the first `LEADERS` are compared with
all, the others not among themselves, so a group costs at most LEADERS comparisons per document.
Such groups are counted.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ingot.base.storage import disk_errors
from ingot.data.cleaning.arrays import Flags, Hashes, Indices, distinct, firsts

AT_ONCE = 1 << 20
ALONE = -1


def roots(parents: NDArray[np.int64], nodes: Indices) -> Indices:
    """The root of each node; a root is its own parent. Paths that are walked are halved, so that a
    chain of documents, each like the one before, is not walked link by link again and again.
    """
    found = parents[nodes]
    while True:
        above = parents[found]
        if np.array_equal(above, found):
            return found
        parents[found] = parents[above]
        found = parents[above]


def union(parents: NDArray[np.int64], left: Indices, right: Indices) -> None:
    """Connect left[i] with right[i] for all i. The root is the smallest node of a tree."""
    while True:
        one, other = roots(parents, left), roots(parents, right)
        parents[left], parents[right] = one, other
        apart = one != other
        if not apart.any():
            return
        left, right, one, other = left[apart], right[apart], one[apart], other[apart]
        np.minimum.at(parents, np.maximum(one, other), np.minimum(one, other))


def write_components(path: Path, nodes: int, edges: Iterable[tuple[Indices, Indices]]) -> int:
    """Write for each of `nodes` the smallest node connected with it, or `ALONE` for a node without
    edges. Returns how many nodes have edges.

    Eight bytes per node in a memory-mapped file; edges are held in memory a few at a time. The
    result does not depend on the order of the edges.
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
    """Read what `write_components` wrote, memory-mapped."""
    found: NDArray[np.int64] = np.load(path, mmap_mode="r")
    return found


def _chunks(nodes: int) -> Iterator[tuple[int, int]]:
    return ((begin, min(begin + AT_ONCE, nodes)) for begin in range(0, nodes, AT_ONCE))


LEADERS = 128
SMALL = 32
VALUES_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Candidates:
    """Candidates of one bucket, by ascending number, with their n-gram sets."""

    numbers: Indices
    sets: Sequence[Hashes]

    def __len__(self) -> int:
        return len(self.numbers)


def similarities(one: Hashes, others: Sequence[Hashes]) -> NDArray[np.float64]:
    """Jaccard similarity |A and B| / |A or B| of one sorted set with each of several; none is
    empty.
    """
    found = np.empty(len(others))
    for begin, end in _batches([len(other) for other in others]):
        sizes = np.array([len(other) for other in others[begin:end]])
        values = np.concatenate(others[begin:end])
        at = np.searchsorted(one, values)
        at[at == len(one)] = 0
        common = np.add.reduceat(one[at] == values, np.cumsum(sizes) - sizes, dtype=np.int64)
        found[begin:end] = common / (len(one) + sizes - common)
    return found


def _batches(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    begin = total = 0
    for number, size in enumerate(sizes):
        if number > begin and total + size > VALUES_AT_ONCE:
            yield begin, number
            begin, total = number, 0
        total += size
    if sizes:
        yield begin, len(sizes)


def cluster(
    members: Candidates, groups: Sequence[Indices], similarity: float
) -> tuple[Indices, int]:
    """The place of each member's first duplicate (its own for one that is kept), and how many
    groups were too large to compare in full.

    `groups` holds ascending places in `members` of documents that share a band.
    """
    parents = np.arange(len(members))
    small = [group for group in groups if len(group) <= SMALL]
    large = [group for group in groups if len(group) > SMALL]
    for leader, others in _pairs(small, len(members)):
        _compare(members, parents, leader, others, similarity)
    for leader, tails in sorted(_tails(large).items()):
        _compare(members, parents, leader, np.concatenate(tails), similarity)
    return roots(parents, np.arange(len(members))), sum(len(group) > LEADERS + 1 for group in large)


def _compare(
    members: Candidates, parents: NDArray[np.int64], leader: int, others: Indices, similarity: float
) -> None:
    others = distinct(others[roots(parents, others) != roots(parents, np.array([leader]))])
    own = members.sets[leader]
    sizes = np.array([len(members.sets[other]) for other in others.tolist()], np.int64)
    # Sets of too different sizes cannot reach the similarity: skip them without comparing.
    near = others[_ratio(sizes, len(own)) >= similarity]
    if not len(near):
        return
    alike: Flags = similarities(own, [members.sets[other] for other in near.tolist()]) >= similarity
    found = near[alike]
    union(parents, np.full(len(found), leader), found)


def _ratio(sizes: Indices, size: int) -> NDArray[np.float64]:
    ratio: NDArray[np.float64] = np.minimum(sizes, size) / np.maximum(sizes, size)
    return ratio


def _tails(groups: Sequence[Indices]) -> dict[int, list[Indices]]:
    """For each of the first `LEADERS` members of every group, the later members of that group."""
    found: dict[int, list[Indices]] = {}
    for group in groups:
        for place in range(min(len(group) - 1, LEADERS)):
            found.setdefault(int(group[place]), []).append(group[place + 1 :])
    return found


def _pairs(groups: Sequence[Indices], count: int) -> Iterator[tuple[int, Indices]]:
    """Every pair that occurs in a group, once: (smaller place, the larger places)."""
    by_size: dict[int, list[Indices]] = {}
    for group in groups:
        by_size.setdefault(len(group), []).append(group)
    codes = [np.zeros(0, np.int64)]
    for size, same in by_size.items():
        left, right = np.triu_indices(size, 1)
        table = np.stack(same)
        codes.append(distinct(table[:, left] * count + table[:, right]))
    pairs = distinct(np.concatenate(codes))
    if not len(pairs):
        return
    lefts, rights = pairs // count, pairs % count
    begins = np.flatnonzero(firsts(lefts)).tolist()
    for begin, end in zip(begins, [*begins[1:], len(pairs)], strict=True):
        yield int(lefts[begin]), rights[begin:end]
