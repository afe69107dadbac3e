"""Random bits as a hash of what they are for: the seed, the step, the row, the position. Whoever
computes them, in whatever order and however often, gets the same ones.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_GOLDEN, _MIX1, _MIX2 = (
    0x9E3779B97F4A7C15 - 2**64,
    0xBF58476D1CE4E5B9 - 2**64,
    0x94D049BB133111EB - 2**64,
)  # as signed 64-bit


def row_keys(rows: Tensor, text: str) -> Tensor:
    """A number for each row of a batch: `rows` int64 `[R]` identifies them within a step, `text`
    names the step and what the numbers are for.
    """
    return _mix(rows.long() * _GOLDEN + signed_hash(text))


@torch.no_grad()
def keep_mask(rows: Tensor, positions: int, features: int, layer: int, dropout: float) -> Tensor:
    """The mask of kept elements, bool `[R, positions, features]`, each True with probability
    1 - dropout. `rows`: of `row_keys`.
    """
    places = torch.arange(positions, device=rows.device)
    bits = keyed_bits(rows[:, None], places, features, layer)
    return bits >= int(dropout * 2.0**64) - 2**63


def keyed_bits(rows: Tensor, places: Tensor, features: int, layer: int) -> Tensor:
    """64 random bits of each feature of each place, int64 `[R, positions, features]`; rows and
    places broadcast to `[R, positions]`.
    """
    place = _mix(rows + places * _GOLDEN + layer)[..., None]  # [R, positions, 1]
    counter = torch.arange(features, device=rows.device) * _GOLDEN
    bits = place + _mix(counter ^ layer)  # [R, positions, features]
    bits = (bits ^ _shift(bits, 32)) * _MIX1
    return bits ^ _shift(bits, 29)


def _mix(bits: Tensor) -> Tensor:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014): each output bit depends on every
    input bit.
    """
    bits = (bits ^ _shift(bits, 30)) * _MIX1
    bits = (bits ^ _shift(bits, 27)) * _MIX2
    return bits ^ _shift(bits, 31)


def _shift(bits: Tensor, by: int) -> Tensor:
    """Logical right shift: torch's own shift of a signed integer is arithmetic."""
    zeros: int = 2 ** (64 - by) - 1
    return (bits >> by) & zeros


def signed_hash(text: str) -> int:
    """A text as a signed 64-bit number."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)
