"""Matrices in float16 as FBGEMM packs them, and the memory that they lie in.

FBGEMM has room for a multiple of `DEPTH` columns and leaves what is behind the last one zero: a
model 576 wide would take the memory of one 1,024 wide. Nothing of torch gives access to that
memory, so it is looked for: it is the one block that the process was given while a matrix was
packed. Only where the numbers in it are the matrix's, one by one, is it used: the pages behind them
are given back, and rows can be looked up in it. Elsewhere (another C library, another order of
FBGEMM's) a matrix merely takes more room.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

from ingot.base.malloc import give_back_pages

DEPTH = 512
"""Columns of a block."""
LANES = (32, 16)
"""Rows of a block, whose numbers in a column are neighbours in memory: two registers, of AVX-512 or
of AVX2.
"""
ALIGNMENT = 64
"""FBGEMM's; the C library's own notes are before the first multiple of it."""
TRIES = 8
"""So often a matrix is packed that does not come to lie in a block of its own."""
CHUNK_WEIGHTS = 2**17
"""Weights looked at together, so that nothing large is mapped for it."""


class Float16Matrix:
    """Weights `[O, D]` with a bias `[O]`, packed; made within `mapping_blocks`. `numbers`: the
    float16 numbers in FBGEMM's own order, `[D * O]` with O rounded up to `lanes`, where they were
    found; valid as long as `handle`.
    """

    lanes = min(LANES)

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.shape = weight.shape
        whole, added = weight.detach().float(), None if bias is None else bias.detach().float()
        elsewhere = []
        for _ in range(TRIES):
            before = _mapped()
            self.handle = torch.ops.quantized.linear_prepack_fp16(whole, added)
            blocks = [pair for pair in _fresh(before, _mapped()) if self._fits(*pair)]
            if blocks or not before:
                break
            elsewhere.append(self.handle)  # in memory that was free, which the next one cannot have
        del whole
        self.numbers: Tensor | None = None
        for self.lanes in LANES:
            self.numbers = self._found(blocks, weight.detach())
            if self.numbers is not None:
                break

    @property
    def lines(self) -> int:
        """Groups of `lanes` rows."""
        return -(-self.shape[0] // self.lanes)

    def rows(self, chosen: Tensor) -> Tensor:
        """Rows of the weights as float32: numbers `[...]` -> `[..., D]`. Raises ValueError where
        they were not found.
        """
        if self.numbers is None:
            raise ValueError("FBGEMM's memory of this matrix is not known")
        line, lane = chosen // self.lanes, chosen % self.lanes
        return torch.cat([block[line, :, lane] for block in self._blocks(self.numbers)], -1).float()

    def _blocks(self, numbers: Tensor) -> list[Tensor]:
        """Each `[O / lanes, up to DEPTH columns, lanes]`."""
        columns = torch.arange(self.shape[1]).split(DEPTH)
        parts = numbers.split([len(part) * self.lines * self.lanes for part in columns])
        return [part.view(self.lines, -1, self.lanes) for part in parts]

    @property
    def _room(self) -> int:
        """Numbers that FBGEMM has room for."""
        return self.lines * self.lanes * -(-self.shape[1] // DEPTH) * DEPTH

    def _fits(self, start: int, end: int) -> bool:
        return start + ALIGNMENT + 2 * self._room <= end

    def _found(self, blocks: list[tuple[int, int]], weight: Tensor) -> Tensor | None:
        """The numbers, where they are those of `weight`; what is behind them is given back."""
        count, room = self.lines * self.lanes * self.shape[1], self._room
        for start, end in blocks:
            first = start + ALIGNMENT
            if not self._fits(start, end) or not _begins_with(
                first, weight[: self.lanes, :DEPTH].half()
            ):
                continue
            memory = (ctypes.c_uint16 * room).from_address(first)
            found = torch.frombuffer(memory, dtype=torch.float16)
            if self._holds(found[:count], weight) and not bool(found[count:].any()):
                give_back_pages(first + 2 * count, first + 2 * room)
                return found[:count]
        return None

    def _holds(self, numbers: Tensor, weight: Tensor) -> bool:
        """Whether these are the numbers of `weight` as float16."""
        for block, part in zip(self._blocks(numbers), weight.split(DEPTH, dim=1), strict=True):
            height = max(1, CHUNK_WEIGHTS // (self.lanes * DEPTH))
            rows = part.split(height * self.lanes)
            for lines, wanted in zip(block.split(height), rows, strict=True):
                held = lines.transpose(1, 2).flatten(0, 1)[: len(wanted)]
                if not torch.equal(held, wanted.half()):
                    return False
        return True


def _begins_with(address: int, corner: Tensor) -> bool:
    """Whether memory begins with the first rows and columns of a matrix, `[lanes, up to DEPTH]`.
    The system reads it, as another thread may have had the block and given it back.
    """
    wanted = corner.t().contiguous().numpy().tobytes()
    try:
        with Path("/proc/self/mem").open("rb", buffering=0) as memory:
            return os.pread(memory.fileno(), len(wanted), address) == wanted
    except OSError:
        return False


class PackedLinear(nn.Module):
    """A linear layer over packed weights `[O, D]`: float32 `[..., D]` -> `[..., O]`."""

    def __init__(self, matrix: Float16Matrix) -> None:
        super().__init__()
        self._packed = matrix.handle

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self._packed)
        return out


def _mapped() -> set[str]:
    """The memory of this process that lies in no file, as lines of its map; empty where the system
    tells none.
    """
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    return {line for line in lines if " rw-p " in line and line.split()[4] == "0"}


def _fresh(before: set[str], after: set[str]) -> Iterator[tuple[int, int]]:
    """First and end addresses of what was mapped in between. The system joins neighbours, so a
    block may appear as a longer one.
    """
    old, new = _ranges(before - after), _ranges(after - before)
    edges = sorted({edge for pair in old + new for edge in pair})
    for start, end in pairwise(edges):
        if _within(start, new) and not _within(start, old):
            yield start, end


def _ranges(lines: set[str]) -> list[tuple[int, int]]:
    pairs = (line.split()[0].split("-") for line in lines)
    return [(int(start, 16), int(end, 16)) for start, end in pairs]


def _within(address: int, ranges: list[tuple[int, int]]) -> bool:
    return any(start <= address < end for start, end in ranges)
