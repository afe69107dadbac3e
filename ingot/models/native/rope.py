"""Rotary position embedding (Su et al. 2021) in Hugging Face's half-split layout, with linear,
Llama 3.1 and YaRN scaling.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ingot.base.errors import WrongInput
from ingot.config.family import rope_values


@dataclass(frozen=True)
class Rope:
    """Rotary positions: base and scaling. `kind` is a key of `SCALINGS`; `amplitude` multiplies cos
    and sin (YaRN).
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


def read_rope(config: Mapping[str, Any], positions: int, where: str) -> Rope:
    """Read the rotary parameters of a Hugging Face configuration, for a model of `positions`
    positions.

    Raises:
        WrongInput: a kind of scaling that is not in `SCALINGS`, or one of its values is missing.
    """
    values = rope_values(config, where)
    kind = values["rope_type"]
    required = _scaling(kind, where).required
    if missing := [key for key in required if key not in values]:
        raise WrongInput(
            f"{where}: rope_type `{kind}` needs {', '.join(missing)}; add it to rope_parameters"
        )
    if values.get("partial_rotary_factor", 1) != 1:
        raise WrongInput(
            f"{where}: partial_rotary_factor {values['partial_rotary_factor']!r} is not supported,"
            " only 1; choose another model"
        )
    factor = float(values.get("factor", 1.0))
    return Rope(
        theta=float(values["rope_theta"]),
        kind=kind,
        factor=factor,
        low_freq_factor=float(values.get("low_freq_factor", 1.0)),
        high_freq_factor=float(values.get("high_freq_factor", 4.0)),
        original_positions=int(
            config.get("original_max_position_embeddings")
            or values.get("original_max_position_embeddings")
            or positions
        ),
        beta_fast=float(values.get("beta_fast") or 32.0),
        beta_slow=float(values.get("beta_slow") or 1.0),
        truncate=bool(values.get("truncate", True)),
        amplitude=_amplitude(values, factor) if kind == "yarn" else 1.0,
    )


def _amplitude(values: Mapping[str, Any], factor: float) -> float:
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
    """One angular frequency per channel pair, float32 `[E/2]`.

    Raises:
        WrongInput: the kind of scaling is not in `SCALINGS`.
    """
    scaling = _scaling(rope.kind, "model.config")
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64, device=device).float() / head_dim
    return scaling.apply(1.0 / (rope.theta**exponent), rope, head_dim)


def angles(positions: Tensor, frequencies: Tensor, amplitude: float = 1.0) -> tuple[Tensor, Tensor]:
    """cos and sin of `positions` `[B, T]` times `amplitude`: two float32 `[B, 1, T, E]`, which
    broadcast to `[B, H, T, E]`.
    """
    turns = positions[:, None, :, None].float() * frequencies  # [B, 1, T, E/2]
    turns = torch.cat((turns, turns), dim=-1)  # [B, 1, T, E]
    cos, sin = turns.cos(), turns.sin()
    return (cos, sin) if amplitude == 1 else (cos * amplitude, sin * amplitude)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the channel pairs (i, i + E/2) of `x` `[B, H, T, E]` by the angles; computed in
    float32, returned in the dtype of x.
    """
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x * cos + turned * sin).to(x.dtype)
