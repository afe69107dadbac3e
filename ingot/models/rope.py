"""Rotary position embedding (Su et al. 2021) in Hugging Face's half-split layout, with linear,
Llama 3.1 and YaRN scaling.
"""

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
    if rope.kind == "yarn":
        return _yarn(frequencies, rope, head_dim)
    return frequencies


def _llama3(frequencies: Tensor, rope: Rope) -> Tensor:
    """Stretch long wavelengths by `factor`, keep short ones, blend between (the Llama 3.1 model
    card's scheme).
    """
    wavelengths = 2 * math.pi / frequencies
    longest = rope.original_positions / rope.low_freq_factor
    shortest = rope.original_positions / rope.high_freq_factor
    blend = (rope.original_positions / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - blend) * frequencies / rope.factor + blend * frequencies
    stretched = torch.where(wavelengths > longest, frequencies / rope.factor, frequencies)
    between = (wavelengths <= longest) & (wavelengths >= shortest)
    return torch.where(between, blended, stretched)


def _yarn(frequencies: Tensor, rope: Rope, head_dim: int) -> Tensor:
    """Keep pairs that turn more than `beta_fast` times in the original positions, stretch those
    that turn less than `beta_slow` times by `factor`, blend between by their place (Peng et al.
    2023, section 3.2).
    """

    def place(turns: float) -> float:
        return (
            head_dim
            * math.log(rope.original_positions / (turns * 2 * math.pi))
            / (2 * math.log(rope.theta))
        )

    first, last = place(rope.beta_fast), place(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, device=frequencies.device).float() - first) / (
        (last - first) or 0.001
    )
    return torch.lerp(frequencies, frequencies / rope.factor, ramp.clamp(0, 1))


def angles(positions: Tensor, frequencies: Tensor, amplitude: float = 1.0) -> tuple[Tensor, Tensor]:
    """cos and sin for `positions` `[B, T]`, times `amplitude`: two float32 `[B, 1, T, E]`, ready to
    meet `[B, H, T, E]`.
    """
    turns = positions[:, None, :, None].float() * frequencies  # [B, 1, T, E/2]
    turns = torch.cat((turns, turns), dim=-1)  # [B, 1, T, E]
    cos, sin = turns.cos(), turns.sin()
    return (cos, sin) if amplitude == 1 else (cos * amplitude, sin * amplitude)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + E/2) of `x` `[B, H, T, E]` by the angles; computed in float32,
    returned in x's type.
    """
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x * cos + turned * sin).to(x.dtype)
