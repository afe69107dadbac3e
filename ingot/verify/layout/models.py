"""A model made so small that many ranks of it train on one CPU: few layers, narrow ones, a small
vocabulary; of the same family, and shared as the whole one can be.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ingot.config.models.experts import ExpertsConfig
from ingot.config.models.family import FULL, SLIDING, family_of
from ingot.config.models.rotary import ROTARY, overridden
from ingot.config.models.source import CONFIG, model_config
from ingot.config.sections.layout import Parallel
from ingot.models.hf.config import read_hf_config
from ingot.models.hf.tensorfile import save_weights
from ingot.models.native.config import DecoderConfig
from ingot.models.native.decoder import Decoder
from ingot.models.parameters import init_weights
from ingot.models.spec import ModelSpec

VOCABULARY = 61
"""The vocabulary size: a prime, so that no number of ranks divides it."""
LAYERS = 4
"""Enough layers for two stages on each of two ranks, or one on each of four; more where the
recipe's own layout has more stages.
"""
_WIDTH, _FEED_FORWARD, _HEAD, _MOST_KV_HEADS = 40, 80, 8, 4
_EXPERTS, _EXPERT_WIDTH = 8, 24
_STD = 0.1
"""Standard deviation of the initial weights: large enough that every part of the model matters."""
_NARROW: dict[str, int | float] = {
    **dict.fromkeys(
        (
            "num_layers",
            "num_decoder_layers",
            "encoder_layers",
            "decoder_layers",
            "num_hidden_layers",
            "n_layers",
        ),
        2,
    ),
    **dict.fromkeys(
        (
            "num_heads",
            "encoder_attention_heads",
            "decoder_attention_heads",
            "num_attention_heads",
            "n_heads",
        ),
        4,
    ),
    **dict.fromkeys(("d_model", "hidden_size", "dim", "pooler_hidden_size"), 32),
    **dict.fromkeys(
        ("d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "intermediate_size", "hidden_dim"), 48
    ),
    "d_kv": 8,
    "embedding_size": 16,
    "vocab_size": VOCABULARY,
    "initializer_range": _STD,
    "init_std": _STD,
    "initializer_factor": 1.0,
}
"""Sizes of transformers' models by their names in configurations."""


def small_spec(model_spec: ModelSpec, seq_len: int, own: Parallel) -> ModelSpec:
    values = model_spec.config.to_hf()
    if isinstance(model_spec.config, DecoderConfig):
        return ModelSpec(
            "decoder", DecoderConfig.from_hf(small_decoder(values, seq_len, own)), None, True
        )
    return ModelSpec(
        model_spec.kind,
        read_hf_config(
            small_hub(values),
            model_spec.config.kind,
            "the small model",
            labels=model_spec.config.labels,
            unproved=True,
        ),
        None,
        True,
    )


def small_decoder(
    values: Mapping[str, Any],
    seq_len: int,
    own: Parallel = Parallel(),  # noqa: B008 (frozen)
) -> dict[str, Any]:
    """A configuration of the same family, by Hugging Face's names, that `own` can distribute if the
    whole one can.
    """
    config = DecoderConfig.from_hf(values)
    layers, tensor = max(LAYERS, int(own.pipeline) * own.virtual), int(own.tensor)
    shared = tensor * (int(own.context) if own.context_by == "ulysses" else 1)
    # The embedding of a tensor rank is sharded by its rows or its columns, ours by its columns.
    rows, rest = divmod(config.vocab_size, tensor)
    spread = config.hidden_size if rest else math.lcm(config.hidden_size, rows)
    kv_heads = config.num_key_value_heads
    if kv_heads > _MOST_KV_HEADS:
        kv_heads = math.gcd(kv_heads, math.lcm(_MOST_KV_HEADS, shared))
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": _shared_as(spread, _WIDTH, int(own.shard) if tensor > 1 else 1),
        "intermediate_size": _shared_as(config.intermediate_size, _FEED_FORWARD, tensor),
        "num_hidden_layers": layers,
        "head_dim": _HEAD,
        "num_key_value_heads": kv_heads,
        "num_attention_heads": (
            kv_heads * (config.num_attention_heads // config.num_key_value_heads)
        ),
        "initializer_range": _STD,
        "max_position_embeddings": max(
            int(values.get("max_position_embeddings") or 0), config.max_position_embeddings, seq_len
        ),
    }
    if config.experts is not None:
        sizes |= _small_experts(values, config.experts, own, dense=not all(config.sparse))
    windows = [window for window in config.windows if window is not None]
    if windows:
        sizes["sliding_window"] = max(2, min(*windows, seq_len // 3))
        if family_of(values).windows == "pattern" or values.get("layer_types") is not None:
            kinds = list(
                dict.fromkeys(FULL if window is None else SLIDING for window in config.windows)
            )
            sizes["layer_types"] = [kinds[layer % len(kinds)] for layer in range(layers)]
        elif "max_window_layers" in values:
            sizes["max_window_layers"] = layers // 2 if None in config.windows else 0
    if family_of(values).rotary == "listed" and None in config.ropes:
        sizes["no_rope_layers"] = [layer % 2 for layer in range(layers)]
    share = next((rope.share for rope in config.ropes if rope is not None), 1.0)
    if (counted := family_of(values).rotated) and values.get(counted) is not None:
        sizes[counted] = int(_HEAD * share)
    for name in ROTARY:
        scaling = values.get(name) or {}
        if "short_factor" in scaling:
            pairs = int(_HEAD * (scaling.get("partial_rotary_factor") or share)) // 2
            shorter = {key: scaling[key][:pairs] for key in ("short_factor", "long_factor")}
            sizes[name] = {**scaling, **shorter}
    return overridden(values, sizes)


def _shared_as(whole: int, small: int, ranks: int) -> int:
    """A multiple of `small` that these ranks share evenly if they so share `whole`."""
    return math.lcm(small, math.gcd(whole, ranks))


def _small_experts(
    values: Mapping[str, Any], experts: ExpertsConfig, own: Parallel, *, dense: bool
) -> dict[str, Any]:
    """At most `_EXPERTS` of them, more only for `own`, and one dense layer where there are any."""
    keys = family_of(values).experts
    assert keys is not None
    named = [key for key in keys.count if values.get(key) is not None] or keys.count[:1]
    count = _shared_as(experts.count, min(experts.count, _EXPERTS), own.expert)
    sizes: dict[str, Any] = dict.fromkeys(named, count)
    sizes["num_experts_per_tok"] = min(experts.chosen, _EXPERTS // 2)
    if keys.width != "intermediate_size":
        width = min(experts.width, _EXPERT_WIDTH)
        sizes[keys.width] = _shared_as(experts.width, width, int(own.tensor))
    if keys.dense_until is not None:
        sizes[keys.dense_until] = int(dense)
    elif dense:
        sizes |= {"mlp_only_layers": [0], "decoder_sparse_step": 1}
    if experts.groups > 1:
        sizes |= {"n_group": 2, "topk_group": min(experts.groups_chosen, 2)}
    return sizes


def small_hub(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same for a model of transformers, for the sizes in `_NARROW`; dropout is off, since its
    masks depend on the layout.
    """
    made = {**values, **_NARROW}
    for name, value in values.items():
        if ("dropout" in name or "layerdrop" in name) and isinstance(value, float):
            made[name] = 0.0
        if name.endswith("_token_id") and isinstance(value, int):
            made[name] = value % VOCABULARY
    return made


def small_teacher(folder: Path, target: Path, seq_len: int) -> Path:
    """A small model of the teacher's family with random weights."""
    values = small_decoder(model_config(folder), seq_len)
    model = Decoder(DecoderConfig.from_hf(values))
    init_weights(model, seed=1)
    target.mkdir(parents=True)
    save_weights({name: parameter.detach() for name, parameter in model.named_parameters()}, target)
    (target / CONFIG).write_text(json.dumps(values), encoding="utf-8")
    return target
