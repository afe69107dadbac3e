"""What a decoder looks like, read from a Hugging Face configuration; whatever would change the maths unseen is refused."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ingot.base.errors import WrongInput

SUPPORTED = {"llama": "Llama 1, 2, 3, 3.1, 3.2, SmolLM2 and others of the same architecture"}

# Keys that must have these values where they are given: another value is another model.
_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"), "attention_dropout": (0, 0.0, None), "pretraining_tp": (1, None),
    "partial_rotary_factor": (1, 1.0, None), "sliding_window": (None,), "quantization_config": (None,),
}


@dataclass(frozen=True)
class Rope:
    """Rotary positions: base and scaling. `kind` is `default`, `linear` or `llama3`."""

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and switches of one decoder; names are Hugging Face's. `source` keeps the configuration that it was read from."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: Rope
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    initializer_range: float
    source: Mapping[str, Any] = field(repr=False, compare=False)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], where: str = "model.config") -> DecoderConfig:
        """Read `config.json`'s mapping.

        Raises:
            WrongInput: another model type, a missing or impossible value; `where` says where it stands.
        """
        kind = config.get("model_type")
        if kind not in SUPPORTED:
            near = difflib.get_close_matches(str(kind), SUPPORTED, n=1, cutoff=0.0)[0]
            raise WrongInput(f"{where}: model_type `{kind}` is not supported (nearest: `{near}`); `ingot show models` lists what is")
        for key, allowed in _FIXED.items():
            if key in config and config[key] not in allowed:
                raise WrongInput(f"{where}: {key} {config[key]!r} is not supported, only {allowed[0]!r}; choose another model")
        try:
            hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
            made = cls(
                vocab_size=int(config["vocab_size"]),
                hidden_size=hidden,
                intermediate_size=int(config["intermediate_size"]),
                num_hidden_layers=int(config["num_hidden_layers"]),
                num_attention_heads=heads,
                num_key_value_heads=int(config.get("num_key_value_heads") or heads),
                head_dim=int(config.get("head_dim") or hidden // heads),
                max_position_embeddings=int(config.get("max_position_embeddings", 2048)),
                rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
                rope=_rope(config, where),
                tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
                attention_bias=bool(config.get("attention_bias", False)),
                mlp_bias=bool(config.get("mlp_bias", False)),
                initializer_range=float(config.get("initializer_range", 0.02)),
                source=dict(config),
            )
        except KeyError as error:
            raise WrongInput(f"{where}: {error.args[0]} is missing; add it to the configuration") from None
        except (TypeError, ValueError) as error:
            raise WrongInput(f"{where}: a size is not a number ({error}); mend the configuration") from None
        made._check(where)
        return made

    def _check(self, where: str) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise WrongInput(f"{where}: {name} is {getattr(self, name)}; it must be at least 1")
        if self.num_attention_heads % self.num_key_value_heads:
            raise WrongInput(
                f"{where}: num_attention_heads {self.num_attention_heads} does not divide by num_key_value_heads "
                f"{self.num_key_value_heads}; choose a divisor"
            )
        if self.head_dim % 2:
            raise WrongInput(f"{where}: head_dim {self.head_dim} is odd; rotary positions need an even one")

    def to_hf(self) -> dict[str, Any]:
        """The configuration to write into `config.json`; what was read, nothing lost."""
        return {**self.source, "vocab_size": self.vocab_size}


def _rope(config: Mapping[str, Any], where: str) -> Rope:
    """Both spellings: `rope_parameters` (transformers 5) and `rope_theta` beside `rope_scaling` (before)."""
    values: dict[str, Any] = {"rope_theta": config.get("rope_theta", 10_000.0), **(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = values.get("rope_type") or values.get("type") or "default"
    if kind not in ("default", "linear", "llama3"):
        raise WrongInput(f"{where}: rope_type `{kind}` is not supported, only default, linear and llama3; choose another model")
    return Rope(
        theta=float(values["rope_theta"]), kind=kind, factor=float(values.get("factor", 1.0)),
        low_freq_factor=float(values.get("low_freq_factor", 1.0)), high_freq_factor=float(values.get("high_freq_factor", 4.0)),
        original_positions=int(values.get("original_max_position_embeddings", 8192)),
    )
