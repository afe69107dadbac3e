"""The configuration of a native decoder, read from a Hugging Face `config.json`. A setting that
would change the mathematics and is not implemented is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ingot.base.errors import WrongInput
from ingot.config.family import family_of, sizes
from ingot.models.native.rope import Rope, read_rope

# Keys that must have one of these values if present: any other value is another architecture.
_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_dropout": (0, 0.0, None),
    "pretraining_tp": (1, None),
    "partial_rotary_factor": (1, 1.0, None),
    "quantization_config": (None,),
    "use_mrope": (False, None),
}


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and switches of a decoder, under Hugging Face's names where those are the same for all
    model types.

    `windows`: for each layer, how many tokens back a query sees, itself included; None for all.
    `source` is the configuration that it was read from.
    """

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
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    initializer_range: float
    source: Mapping[str, Any] = field(repr=False, compare=False)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], where: str = "model.config") -> DecoderConfig:
        """Read the mapping of a `config.json`.

        Raises:
            WrongInput: another model type, or a missing or impossible value; `where` is the place
                that the message names.
        """
        family = family_of({"model_type": str(config.get("model_type"))}, where)
        fixed = {**_FIXED, **family.fixed}
        for key, allowed in fixed.items():
            if key in config and config[key] not in allowed:
                raise WrongInput(
                    f"{where}: {key} {config[key]!r} is not supported, only {allowed[0]!r}; choose"
                    " another model"
                )
        try:
            read = sizes(config, where)
            made = cls(
                vocab_size=read.vocab,
                hidden_size=read.hidden,
                intermediate_size=read.feed_forward,
                num_hidden_layers=read.layers,
                num_attention_heads=read.heads,
                num_key_value_heads=read.kv_heads,
                head_dim=read.head_dim,
                max_position_embeddings=read.positions,
                rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
                rope=read_rope(config, read.positions, where),
                tie_word_embeddings=read.tied,
                qkv_bias=read.qkv_bias,
                output_bias=read.output_bias,
                mlp_bias=read.mlp_bias,
                qk_norm=read.qk_norm,
                windows=read.windows,
                initializer_range=float(config.get("initializer_range", 0.02)),
                source=dict(config),
            )
        except KeyError as error:
            raise WrongInput(
                f"{where}: {error.args[0]} is missing; add it to the configuration"
            ) from None
        except (TypeError, ValueError) as error:
            raise WrongInput(
                f"{where}: a size is not a number ({error}); mend the configuration"
            ) from None
        made._check(where)
        return made

    def _check(self, where: str) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            if getattr(self, name) < 1:
                raise WrongInput(f"{where}: {name} is {getattr(self, name)}; it must be at least 1")
        if self.num_attention_heads % self.num_key_value_heads:
            raise WrongInput(
                f"{where}: num_attention_heads {self.num_attention_heads} does not divide by"
                f" num_key_value_heads {self.num_key_value_heads}; choose a divisor"
            )
        if self.head_dim % 2:
            raise WrongInput(
                f"{where}: head_dim {self.head_dim} is odd; rotary positions need an even one"
            )

    def to_hf(self) -> dict[str, Any]:
        """The mapping to write to `config.json`: everything that was read.

        Rotary parameters in transformers 5's spelling are also written in the older one; older
        readers would otherwise silently assume base 10,000 without scaling.
        """
        new = self.source.get("rope_parameters")
        scaling = {key: value for key, value in (new or {}).items() if key != "rope_theta"}
        old = (
            {
                "rope_theta": self.rope.theta,
                "rope_scaling": None if self.rope.kind == "default" else scaling,
            }
            if new
            else {}
        )
        return {**old, **self.source, "vocab_size": self.vocab_size}
