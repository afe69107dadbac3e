"""What torch's caching allocator of CUDA reserves for a sequence of allocations: a replay of its
rules with its standard settings, on one stream of a device that never runs out. Imports no torch.

Blocks are multiples of 512 bytes. Those of up to 1 MiB are cut from segments of 2 MiB, others from
segments of 20 MiB, or from one of their own, in multiples of 2 MiB, from 10 MiB on. The smallest
free block that is large enough is taken, and cut where the rest is worth it; neighbours that are
free become one block again (`c10/cuda/CUDACachingAllocator.cpp`; the rules also stand in torch's
"CUDA semantics", section "Optimizing memory usage with PYTORCH_CUDA_ALLOC_CONF").
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

BLOCK = 512
SMALL = 2**20
"""The largest size that comes from small segments, and the least rest that is cut off others."""
SMALL_SEGMENT, SEGMENT, ROUNDED = 2 * 2**20, 20 * 2**20, 2 * 2**20
OWN_SEGMENT = 10 * 2**20
"""From this size on a block that finds no place gets a segment of its own."""


class Reserved(NamedTuple):
    """Bytes at the highest use of each kind.

    allocated: in blocks. needed: in segments of which some block is in use; what is free beside
    them goes back to the device before it runs out. reserved: in all segments that were ever asked
    for.
    """

    allocated: int
    needed: int
    reserved: int

    @property
    def pieces(self) -> tuple[int, int, int]:
        """Bytes that are lost between blocks: at least, likely, and if nothing goes back."""
        lost = self.needed - self.allocated
        return lost, lost, self.reserved - self.allocated


@dataclass
class _Segment:
    size: int
    used: int = 0


@dataclass
class _CutBlock:
    at: int
    size: int
    segment: _Segment
    before: _CutBlock | None = None
    after: _CutBlock | None = None
    is_free: bool = False


@dataclass
class _FreeBlocks:
    """The free blocks of one kind of segments, by size and address."""

    least_rest: int
    free: list[tuple[int, int]] = field(default_factory=list)
    blocks: dict[int, _CutBlock] = field(default_factory=dict)

    def put(self, block: _CutBlock) -> None:
        block.is_free = True
        bisect.insort(self.free, (block.size, block.at))
        self.blocks[block.at] = block

    def remove(self, block: _CutBlock) -> None:
        block.is_free = False
        del self.free[bisect.bisect_left(self.free, (block.size, block.at))]
        del self.blocks[block.at]

    def best(self, size: int) -> _CutBlock | None:
        at = bisect.bisect_left(self.free, (size, 0))
        return None if at == len(self.free) else self.blocks[self.free[at][1]]


def replay(changes: Iterable[tuple[int, int]]) -> Reserved:
    """What is reserved for `changes`: the number of a block, and by how many bytes it grows or
    shrinks. A block that changes its size is another one.
    """
    segments = _Segments()
    held: dict[int, int] = {}
    for number, change in changes:
        if number in held:
            segments.free(number)
        size = held.get(number, 0) + change
        if size:
            held[number] = size
            segments.allocate(number, size)
        else:
            held.pop(number, None)
    return Reserved(segments.allocated.most, segments.needed.most, segments.reserved.most)


class _Highest:
    def __init__(self) -> None:
        self.now = self.most = 0

    def add(self, size: int) -> None:
        self.now += size
        self.most = max(self.most, self.now)


class _Segments:
    def __init__(self) -> None:
        self._small, self._large = _FreeBlocks(BLOCK), _FreeBlocks(SMALL + 1)
        self._taken: dict[int, tuple[_FreeBlocks, _CutBlock]] = {}
        self._end = 0
        self.allocated, self.needed, self.reserved = _Highest(), _Highest(), _Highest()

    def allocate(self, number: int, size: int) -> None:
        size = -(-size // BLOCK) * BLOCK
        pool = self._small if size <= SMALL else self._large
        block = pool.best(size)
        if block is None:
            block = self._new_segment(size)
        else:
            pool.remove(block)
        if block.size - size >= pool.least_rest:
            rest = _CutBlock(block.at + size, block.size - size, block.segment, block, block.after)
            if block.after is not None:
                block.after.before = rest
            block.size, block.after = size, rest
            pool.put(rest)
        if not block.segment.used:
            self.needed.add(block.segment.size)
        block.segment.used += block.size
        self.allocated.add(block.size)
        self._taken[number] = pool, block

    def free(self, number: int) -> None:
        pool, block = self._taken.pop(number)
        self.allocated.add(-block.size)
        block.segment.used -= block.size
        if not block.segment.used:
            self.needed.add(-block.segment.size)
        for other in (block.before, block.after):
            if other is not None and other.is_free:
                pool.remove(other)
                first, second = sorted((block, other), key=lambda one: one.at)
                first.size, first.after = first.size + second.size, second.after
                if second.after is not None:
                    second.after.before = first
                block = first
        pool.put(block)

    def _new_segment(self, size: int) -> _CutBlock:
        if size <= SMALL:
            whole = SMALL_SEGMENT
        elif size < OWN_SEGMENT:
            whole = SEGMENT
        else:
            whole = -(-size // ROUNDED) * ROUNDED
        at, self._end = self._end, self._end + whole
        self.reserved.add(whole)
        return _CutBlock(at, whole, _Segment(whole))
