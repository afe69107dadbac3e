"""The configuration of a native decoder, read from a Hugging Face `config.json`. A setting that
would change the mathematics and is not implemented is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from torch import Tensor
from torch.nn import functional

from ingot.base.errors import WrongInput
from ingot.config.models.experts import ExpertsConfig
from ingot.config.models.family import (
    FULL,
    SLIDING,
    FamilyMember,
    LayerNorms,
    family_of,
    refuse_unknown_keys,
    sizes,
)
from ingot.config.models.rotary import layer_ropes, rope_values, ropes_by_type
from ingot.models.hf.compressed import scheme_of
from ingot.models.native.rope import SCALINGS, Rope, read_rope

# Keys that must have one of these values if present: any other value is another architecture.
_FIXED: dict[str, tuple[Any, ...]] = {
    "attention_dropout": (0, 0.0, None),
    "pretraining_tp": (1, None),
    "quantization_config": (None,),
    "use_mrope": (False, None),
}
_INSTEAD = {
    "output_router_logits": "the loss that it adds is over the load of a batch and of all layers"
    " together, and another one for each train.micro_batch; set it to false, and"
    " train.experts.aux_loss"
}
Activation = Literal["silu", "gelu_tanh"]
ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and switches of a decoder, under Hugging Face's names where those are the same for all
    model types.

    `windows`: for each layer, how many tokens back a query sees, itself included; None for all.
    `ropes`: its rotary positions; None for none. `query_scale` multiplies queries, beyond the 1 /
    sqrt(head_dim) of attention; with `query_growth` (b, p) also 1 + b ln(1 + floor(t / p)) at
    position t. With `sinks` each head has a score that takes part in its softmax and has no value.
    `logits_scale` multiplies logits before `softcap`. `fused`: modules of a layer in
    the files that hold several of ours by rows. `experts` take the place of the feed-forward in the
    layers that are `sparse`. Files may hold `further_layers` after the last one, which are not
    read. `source` is the configuration that it was read from.
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
    ropes: tuple[Rope | None, ...]
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    norms: LayerNorms
    norm_offset: float
    qk_norm: Literal["none", "head", "full"]
    windows: tuple[int | None, ...]
    activation: Activation
    query_scale: float
    query_growth: tuple[float, int] | None
    sinks: bool
    embedding_scale: float
    residual_scale: float
    logits_scale: float
    softcap: float | None
    fused: Mapping[str, tuple[str, ...]]
    initializer_range: float
    experts: ExpertsConfig | None
    sparse: tuple[bool, ...]
    further_layers: int
    source: Mapping[str, Any] = field(repr=False, compare=False)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], where: str = "model.config") -> DecoderConfig:
        """Read the mapping of a `config.json`.

        Raises:
            WrongInput: another model type, a key or value that is not known, or a missing or
                impossible value; `where` is the place that the message names.
        """
        family = family_of({**config, "model_type": str(config.get("model_type"))}, where)
        packed = family.experts is not None and family.experts.biased and is_mxfp4(config)
        if packed or scheme_of(config, where) is not None:
            # Such files are read as what they mean, and written without it.
            config = {key: config[key] for key in config if key != "quantization_config"}
        _check_fixed(config, family, where)
        refuse_unknown_keys(config, where)
        values = family.filled(config)
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
                rms_norm_eps=float(values.get("rms_norm_eps", 1e-6)),
                ropes=_ropes(config, family, where),
                tie_word_embeddings=read.tied,
                qkv_bias=read.qkv_bias,
                output_bias=read.output_bias,
                mlp_bias=read.mlp_bias,
                norms=family.norms,
                norm_offset=family.norm_offset,
                qk_norm=family.norm_of_heads(values),
                windows=read.windows,
                activation=_activation(values, where),
                **_scales(values, family, read.head_dim, read.hidden, where),
                sinks=family.sinks,
                fused=family.fused,
                initializer_range=float(values.get("initializer_range", 0.02)),
                experts=read.experts,
                sparse=read.sparse,
                further_layers=max(
                    (int(values.get(key) or 0) for key in family.further_layers), default=0
                ),
                source=dict(config),
            )
        except KeyError as error:
            raise WrongInput(
                f"{where}: {error.args[0]} is missing; add it to the configuration"
            ) from None
        except (TypeError, ValueError, ArithmeticError) as error:
            raise WrongInput(
                f"{where}: a size is no number to compute with ({error}); mend the configuration"
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
        for rope in filter(None, self.ropes):
            rotated = int(self.head_dim * rope.share)
            if rotated % 2 or not rotated:
                raise WrongInput(
                    f"{where}: head_dim {self.head_dim} has {rotated} rotated channels; rotary"
                    " positions need an even number"
                )
            if rope.kind == "longrope" and len(rope.divisors) != rotated // 2:
                raise WrongInput(
                    f"{where}: short_factor has {len(rope.divisors)} numbers, the"
                    f" {rotated // 2} pairs of rotated channels need one each; mend rope_parameters"
                )

    def to_hf(self) -> dict[str, Any]:
        """The mapping to write to `config.json`: everything that was read.

        Rotary parameters in transformers 5's spelling are also written in the older one; older
        readers would otherwise silently assume base 10,000 without scaling.
        """
        new = self.source.get("rope_parameters") or {}
        old: dict[str, Any] = {}
        if new:
            by_type = ropes_by_type(self.source)
            full = new.get(FULL, new) or {}
            scaling = {key: value for key, value in full.items() if key != "rope_theta"}
            scaled = by_type[FULL]["rope_type"] != "default"
            old = {
                "rope_theta": by_type[FULL]["rope_theta"],
                "rope_scaling": scaling if scaled else None,
            }
            if (counted := family_of(self.source).rotated) and self.ropes[0] is not None:
                old[counted] = int(self.head_dim * self.ropes[0].share)
            if (share := by_type[FULL].get("partial_rotary_factor")) is not None:
                old["partial_rotary_factor"] = share
            if "rope_local_base_freq" in family_of(self.source).reads:
                old["rope_local_base_freq"] = by_type[SLIDING]["rope_theta"]
        return {**old, **self.source, "vocab_size": self.vocab_size}


def _check_fixed(config: Mapping[str, Any], family: FamilyMember, where: str) -> None:
    """Raises WrongInput for a value that this implementation does not have."""
    for key, allowed in {**_FIXED, **family.fixed}.items():
        if key in config and config[key] not in allowed:
            usual = f"set model.config.{key} to that if it is right, or choose another model"
            raise WrongInput(
                f"{where}: {key} {config[key]!r} is not supported, only {allowed[0]!r};"
                f" {_INSTEAD.get(key, usual)}"
            )


def is_mxfp4(config: Mapping[str, Any]) -> bool:
    """Whether the experts of the files are in MXFP4."""
    told = config.get("quantization_config")
    return isinstance(told, Mapping) and told.get("quant_method") == "mxfp4"


def _ropes(config: Mapping[str, Any], family: FamilyMember, where: str) -> tuple[Rope | None, ...]:
    values = _with_share(family.filled(config), family, where)
    if family.thetas is not None:
        # Each type of layers has its own; transformers reads this one for no layer.
        values.pop("original_max_position_embeddings", None)
    ropes: list[Rope | None] = []
    for layer in layer_ropes(config, where):
        if layer is not None and layer["rope_type"] not in (family.scalings or SCALINGS):
            raise WrongInput(
                f"{where}: rope_type `{layer['rope_type']}` is not supported for this model_type,"
                f" only {', '.join(family.scalings or SCALINGS)}; choose another model"
            )
        ropes.append(
            None
            if layer is None
            else read_rope(values, layer, where, family.share, family.interleaved)
        )
    return tuple(ropes)


def _with_share(values: dict[str, Any], family: FamilyMember, where: str) -> dict[str, Any]:
    """The values, with the share of a head that the number of rotated channels means."""
    channels = values.get(family.rotated) if family.rotated else None
    if channels is None:
        return values
    share = int(channels) / int(values["head_dim"])
    given = rope_values(values, where).get("partial_rotary_factor")
    for told in (given, values.get("partial_rotary_factor")):
        if told not in (None, share):
            raise WrongInput(
                f"{where}: {family.rotated} {channels} of head_dim {values['head_dim']} and"
                f" partial_rotary_factor {told!r} contradict each other; give one of them"
            )
    return {**values, "partial_rotary_factor": share}


def _activation(values: Mapping[str, Any], where: str) -> Activation:
    key = "hidden_activation" if "hidden_activation" in values else "hidden_act"
    name = values.get(key, "silu")
    if name not in _ACTIVATIONS:
        raise WrongInput(
            f"{where}: {key} {name!r} is not supported, only {', '.join(_ACTIVATIONS)}; choose"
            " another model"
        )
    return _ACTIVATIONS[name]


def _scales(
    values: Mapping[str, Any], family: FamilyMember, head_dim: int, hidden: int, where: str
) -> dict[str, Any]:
    """The scalars of a model: those of the keys that its family reads."""

    def scale(key: str) -> float | None:
        read = values.get(key) if key in family.reads else None
        return None if read is None else float(read)

    attention, base = scale("attention_multiplier"), scale("query_pre_attn_scalar")
    query = math.sqrt(head_dim / base) if base else 1.0
    root = math.sqrt(hidden) if family.embedding_root else 1.0
    growth = None
    if family.query_growth:
        rope = rope_values(values, where)
        growth = (
            float(rope["llama_4_scaling_beta"]),
            int(rope["original_max_position_embeddings"]),
        )
    return {
        "query_scale": query if attention is None else attention * math.sqrt(head_dim),
        "query_growth": growth,
        "embedding_scale": scale("embedding_multiplier") or root,
        "residual_scale": scale("residual_multiplier") or 1.0,
        "logits_scale": 1 / (scale("logits_scaling") or 1.0),
        "softcap": scale("final_logit_softcapping"),
    }
