"""Which candidates really are near-duplicates: exact Jaccard similarity of their sets of n-grams,
and the clusters that follow.

Documents of one band group are compared pair by pair, each pair once, but for pairs that are in one
cluster already, which could change nothing. In a group of more than `LEADERS` documents the first
`LEADERS` are compared with all, the others not among
themselves: so a group costs at most LEADERS comparisons a document, whatever the data. Such groups
are counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ingot.data.cleaning.codepoints import Flags, Hashes, Indices
from ingot.data.cleaning.components import roots, union
from ingot.data.cleaning.distinct import distinct, firsts

LEADERS = 128
SMALL = 32
VALUES_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Members:
    """Candidates of one bucket, by ascending number, with their sets."""

    numbers: Indices
    sets: Sequence[Hashes]

    def __len__(self) -> int:
        return len(self.numbers)


def similarities(one: Hashes, others: Sequence[Hashes]) -> NDArray[np.float64]:
    """|A and B| / |A or B| of a sorted set with each of several; none is empty."""
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


def cluster(members: Members, groups: Sequence[Indices], similarity: float) -> tuple[Indices, int]:
    """The place of each member's first duplicate (its own for one that stays), and how many groups
    were too large to compare in full.

    `groups` holds places in `members`, ascending, of documents that share a band.
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
    members: Members, parents: NDArray[np.int64], leader: int, others: Indices, similarity: float
) -> None:
    others = distinct(others[roots(parents, others) != roots(parents, np.array([leader]))])
    own = members.sets[leader]
    sizes = np.array([len(members.sets[other]) for other in others.tolist()], np.int64)
    # Sets of too different sizes cannot be so similar: no need to look at what is in them.
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
    """For each of the first `LEADERS` of every group all that come after it there."""
    found: dict[int, list[Indices]] = {}
    for group in groups:
        for place in range(min(len(group) - 1, LEADERS)):
            found.setdefault(int(group[place]), []).append(group[place + 1 :])
    return found


def _pairs(groups: Sequence[Indices], count: int) -> Iterator[tuple[int, Indices]]:
    """Every pair of every group once, by its smaller place: (place, the larger places)."""
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
