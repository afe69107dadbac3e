"""Tensors in MXFP4 (Open Compute Project, Microscaling Formats 1.0): numbers of four bits in groups
of 32 with a power of two as their scale, read as the bf16 numbers that they stand for.

gpt-oss has a stack of matrices `[N, A, B]` as `_blocks` `[N, A, B / 32, 16]`, the lower four bits
of a byte before the upper ones, and `_scales` `[N, A, B / 32]`, exponents with a bias of 127.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BLOCKS, SCALES = "_blocks", "_scales"
GROUP = 32
_BIAS = 127
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NUMBERS = torch.tensor([*_VALUES, *(-value for value in _VALUES)])
"""By their four bits: sign, two bits of exponent, one of mantissa."""


def split_name(stored: str) -> tuple[str, str]:
    """The name of what a stored tensor is a part of, and its ending; that is empty for others."""
    for ending in (BLOCKS, SCALES):
        if stored.endswith(ending):
            return stored.removesuffix(ending), ending
    return stored, ""


def dequantised(blocks: Tensor, scales: Tensor) -> Tensor:
    """blocks uint8 `[..., G, 16]`, scales uint8 `[..., G]` -> bf16 `[..., 32 G]`."""
    bits = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)  # [..., G, 32]
    exponents = scales.to(torch.int32)[..., None] - _BIAS
    return torch.ldexp(_NUMBERS[bits.int()], exponents).to(torch.bfloat16).flatten(-2)


class PackedStack:
    """A stack of matrices in MXFP4 as the tensor `[N, B, A]` that transformers makes of it; only
    what is asked for is read. Takes the place of a slice of a safetensors file.
    """

    def __init__(self, blocks: Any, scales: Any) -> None:
        self._blocks, self._scales = blocks, scales

    def get_shape(self) -> list[int]:
        """`[N, B, A]`."""
        count, rows, groups, _ = self._blocks.get_shape()
        return [count, groups * GROUP, rows]

    def __getitem__(self, wanted: slice | tuple[slice, ...]) -> Tensor:
        given = wanted if isinstance(wanted, tuple) else (wanted,)
        sizes = self.get_shape()
        given += (slice(None),) * (len(sizes) - len(given))
        experts, columns, rows = (
            slice(*side.indices(size)[:2]) for side, size in zip(given, sizes, strict=True)
        )
        first, end = columns.start // GROUP, -(-columns.stop // GROUP)
        here = (experts, rows, slice(first, end))
        made = dequantised(self._blocks[here], self._scales[here])
        return made[..., columns.start - first * GROUP : columns.stop - first * GROUP].mT
