"""Rotary position embedding (Su et al. 2021) in Hugging Face's half-split layout, with linear and Llama 3.1 scaling."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ingot.models.architecture import Rope


def inverse_frequencies(rope: Rope, head_dim: int, device: torch.device | None = None) -> Tensor:
    """One angular frequency for each pair of channels, float32 `[E/2]`."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64, device=device).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponent)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(frequencies, rope)
    return frequencies


def _llama3(frequencies: Tensor, rope: Rope) -> Tensor:
    """Stretch long wavelengths by `factor`, keep short ones, blend between (the Llama 3.1 model card's scheme)."""
    wavelengths = 2 * math.pi / frequencies
    longest = rope.original_positions / rope.low_freq_factor
    shortest = rope.original_positions / rope.high_freq_factor
    blend = (rope.original_positions / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * frequencies / rope.factor + blend * frequencies
    stretched = torch.where(wavelengths > longest, frequencies / rope.factor, frequencies)
    between = (wavelengths <= longest) & (wavelengths >= shortest)
    return torch.where(between, blended, stretched)


def angles(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin for `positions` `[B, T]`: two float32 `[B, 1, T, E]`, ready to meet `[B, H, T, E]`."""
    turns = positions[:, None, :, None].float() * frequencies  # [B, 1, T, E/2]
    turns = torch.cat((turns, turns), dim=-1)  # [B, 1, T, E]
    return turns.cos(), turns.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + E/2) of `x` `[B, H, T, E]` by the angles; computed in float32, returned in x's type."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x * cos + turned * sin).to(x.dtype)
