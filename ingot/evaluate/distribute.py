"""Distributes work over ranks and collects the results, so that every rank ends with the same
result, whatever the number of ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from ingot.parallel.mesh import Mesh

Floats = npt.NDArray[np.float64]
Item = TypeVar("Item")


def by_length(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Groups of up to `size` items of about equal length, longest first: little padding, and
    running out of memory happens at once.

    The groups do not depend on the number of ranks, so an item's value does not either.
    """
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    return [order[first : first + size] for first in range(0, len(order), size)]


def rank_share(groups: Sequence[Item], mesh: Mesh) -> Sequence[Item]:
    """The groups of this rank."""
    return groups[mesh.rank :: mesh.world]


def sum_over_ranks(table: Floats, mesh: Mesh) -> Floats:
    """The sum of the ranks' tables: each rank has filled in its own rows and left the others 0."""
    if mesh.world == 1:
        return table
    whole: Floats = mesh.all_sum(torch.from_numpy(table.astype(np.float64))).numpy()
    return whole


def gather_texts(mine: Mapping[int, str], count: int, mesh: Mesh) -> list[str]:
    """The texts of all ranks, `count` in total, in order; `mine` maps the index of each of this
    rank's texts to it.
    """
    if mesh.world == 1:
        return [mine[number] for number in range(count)]
    data = {number: text.encode("utf-8", "surrogatepass") for number, text in mine.items()}
    lengths = np.zeros(count, np.float64)
    for number, text in data.items():
        lengths[number] = len(text)
    ends = np.cumsum(sum_over_ranks(lengths, mesh)).astype(np.int64)
    room = np.zeros(int(ends[-1]) if count else 0, np.uint8)
    for number, text in data.items():
        room[ends[number] - len(text) : ends[number]] = np.frombuffer(text, np.uint8)
    whole = mesh.all_sum(torch.from_numpy(room)).numpy()
    begins = [0, *ends.tolist()]
    return [
        whole[begin:end].tobytes().decode("utf-8", "surrogatepass")
        for begin, end in itertools.pairwise(begins)
    ]
