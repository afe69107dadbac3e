"""Rotary position embedding (Su et al. 2021) in Hugging Face's half-split or interleaved layout,
with linear, Llama 3.1, YaRN and LongRoPE scaling.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ingot.base.errors import WrongInput


@dataclass(frozen=True)
class Rope:
    """Rotary positions: base and scaling. `kind` is a key of `SCALINGS`; `amplitude` multiplies cos
    and sin (YaRN, LongRoPE), `divisors` divide the frequencies of the channel pairs (LongRoPE).
    `share`: the part of a head that is rotated, from its first channel on. `interleaved`: adjacent
    channels are rotated with each other, else the two halves of that part.
    """

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    amplitude: float = 1.0
    divisors: tuple[float, ...] = ()
    share: float = 1.0
    interleaved: bool = False


def read_rope(
    config: Mapping[str, Any],
    values: Mapping[str, Any],
    where: str,
    share: float | None = None,
    interleaved: bool = False,
) -> Rope:
    """Read the rotary `values` (`ingot.config.models.rotary.layer_ropes`) of a layer. `share`: the
    family's default share of a head; None if it has no other than 1.

    Raises:
        WrongInput: a kind of scaling that is not in `SCALINGS`, or one of its values is missing.
    """
    kind = values["rope_type"]
    required = _scaling(kind, where).required
    if missing := [key for key in required if key not in values]:
        raise WrongInput(
            f"{where}: rope_type `{kind}` needs {', '.join(missing)}; add it to rope_parameters"
        )
    rotated = values.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if share is None and rotated not in (None, 1):
        raise WrongInput(
            f"{where}: partial_rotary_factor {rotated!r} is not supported, only 1; choose another"
            " model"
        )
    positions = int(config.get("max_position_embeddings", 2048))
    original = int(
        config.get("original_max_position_embeddings")
        or values.get("original_max_position_embeddings")
        or positions
    )
    factor = float(values.get("factor") or (positions / original if kind == "longrope" else 1.0))
    return Rope(
        theta=float(values["rope_theta"]),
        kind=kind,
        factor=factor,
        low_freq_factor=float(values.get("low_freq_factor", 1.0)),
        high_freq_factor=float(values.get("high_freq_factor", 4.0)),
        original_positions=original,
        beta_fast=float(values.get("beta_fast") or 32.0),
        beta_slow=float(values.get("beta_slow") or 1.0),
        truncate=bool(values.get("truncate", True)),
        amplitude=_AMPLITUDES[kind](values, factor, original) if kind in _AMPLITUDES else 1.0,
        divisors=tuple(float(by) for by in values["short_factor"]) if kind == "longrope" else (),
        share=float(rotated or share or 1.0),
        interleaved=interleaved,
    )


def _yarn_amplitude(values: Mapping[str, Any], factor: float, original: int) -> float:
    """YaRN's factor for cos and sin if the configuration does not give it (section 3.4 of Peng et
    al. 2023, and DeepSeek's ratio).
    """
    given = values.get("attention_factor")
    if given is not None:
        return float(given)
    above, below = values.get("mscale"), values.get("mscale_all_dim")
    if above and below:
        return _temperature(factor, above) / _temperature(factor, below)
    return _temperature(factor, 1.0)


def _temperature(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _longrope_amplitude(values: Mapping[str, Any], factor: float, original: int) -> float:
    """LongRoPE's factor for cos and sin (Ding et al. 2024, section 3.4)."""
    given = values.get("attention_factor")
    if given is not None:
        return float(given)
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


_AMPLITUDES = {"yarn": _yarn_amplitude, "longrope": _longrope_amplitude}


def _llama3(frequencies: Tensor, rope: Rope, head_dim: int) -> Tensor:
    """Stretch long wavelengths by `factor`, keep short ones, interpolate between (the scheme of the
    Llama 3.1 model card).
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
    """Keep channel pairs that rotate more than `beta_fast` times over the original positions,
    stretch those that rotate less than `beta_slow` times by `factor`, and interpolate between by
    channel index (Peng et al. 2023, section 3.2).
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


def _longrope(frequencies: Tensor, rope: Rope, head_dim: int) -> Tensor:
    """Divide the frequency of each channel pair by its own number: the one for rows of at most the
    original positions, since longer rows are refused.
    """
    # Filled in on the device: for a copy the host waits, which a CUDA graph cannot.
    divisors = [frequencies.new_full((), divisor) for divisor in rope.divisors]
    return frequencies / torch.stack(divisors)


class Scaling(NamedTuple):
    """One kind of rotary scaling."""

    required: tuple[str, ...]
    """The values that `rope_parameters` must contain."""
    apply: Callable[[Tensor, Rope, int], Tensor]
    """Unscaled frequencies `[E/2]`, the settings, E -> scaled frequencies `[E/2]`."""


SCALINGS: dict[str, Scaling] = {
    "default": Scaling((), lambda frequencies, rope, head_dim: frequencies),
    "linear": Scaling(("factor",), lambda frequencies, rope, head_dim: frequencies / rope.factor),
    "llama3": Scaling(("factor", "low_freq_factor", "high_freq_factor"), _llama3),
    "yarn": Scaling(("factor",), _yarn),
    "longrope": Scaling(("short_factor", "long_factor"), _longrope),
}
"""Every supported `rope_type`; any other is an error both where a configuration is read and where
frequencies are computed.
"""


def _scaling(kind: str, where: str) -> Scaling:
    if kind not in SCALINGS:
        raise WrongInput(
            f"{where}: rope_type `{kind}` is not supported, only {', '.join(SCALINGS)}; choose"
            " another model"
        )
    return SCALINGS[kind]


def inverse_frequencies(rope: Rope, head_dim: int, device: torch.device | None = None) -> Tensor:
    """One angular frequency per rotated channel pair, float32 `[R/2]`, R being the rotated share of
    the head size E.

    Raises:
        WrongInput: the kind of scaling is not in `SCALINGS`.
    """
    scaling, size = _scaling(rope.kind, "model.config"), int(head_dim * rope.share)
    exponent = torch.arange(0, size, 2, dtype=torch.int64, device=device).float() / size
    return scaling.apply(1.0 / (rope.theta**exponent), rope, size)


class Rotation(NamedTuple):
    """Cosines and sines of each position's angles, two float32 `[B, 1, T, R]`, which broadcast to
    `[B, H, T, R]`.
    """

    cos: Tensor
    sin: Tensor


def rotation_of(rope: Rope, head_dim: int, positions: Tensor) -> Rotation:
    """The rotation of `positions` `[B, T]`."""
    frequencies = inverse_frequencies(rope, head_dim, positions.device)
    angles = positions[:, None, :, None].float() * frequencies  # [B, 1, T, R/2]
    if rope.interleaved:
        angles = angles.repeat_interleave(2, dim=-1)  # [B, 1, T, R]
    else:
        angles = torch.cat((angles, angles), dim=-1)  # [B, 1, T, R]
    cos, sin = angles.cos(), angles.sin()
    return (
        Rotation(cos, sin)
        if rope.amplitude == 1
        else Rotation(cos * rope.amplitude, sin * rope.amplitude)
    )


def rotate(x: Tensor, rotation: Rotation, interleaved: bool) -> Tensor:
    """Rotate the first R channels of `x` `[B, H, T, E]`: the pairs (i, i + R/2), or (2i, 2i + 1)
    if `interleaved`; computed in float32, returned in the dtype of x.
    """
    size = rotation.cos.shape[-1]
    if size < x.shape[-1]:
        rotated = rotate(x[..., :size], rotation, interleaved)
        return torch.cat((rotated, x[..., size:]), dim=-1)
    if interleaved:
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    else:
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
    return (x * rotation.cos + turned * rotation.sin).to(x.dtype)
