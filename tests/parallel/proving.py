"""The models that layouts are proved on, and the recipe of each, on one set of prepared texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ingot.config.recipe import Recipe
from ingot.config.sections.training import OptimizerSettings
from ingot.models.hf.tensorfile import save_weights
from ingot.models.native.config import DecoderConfig
from ingot.models.native.decoder import Decoder
from ingot.models.parameters import init_weights
from ingot.verify.layout.proof import (
    PRELOAD,
    LayoutBounds,
    LayoutProver,
    LayoutReference,
    LayoutResult,
)
from tests import tolerances
from tests.measured import measured
from tests.small import small_recipe

BOUNDS = LayoutBounds(
    loss=tolerances.SPLIT_LOSS, norm=tolerances.SPLIT_LOSS, weights=tolerances.SPLIT_WEIGHTS
)
# Eight heads over four: enough for four ranks of `tensor`, or two of it and two of Ulysses.
LLAMA = {
    "model_type": "llama",
    "vocab_size": 400,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "tied": {**LLAMA, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "qwen3": {**LLAMA, "model_type": "qwen3"},
    "mistral": {**LLAMA, "model_type": "mistral", "sliding_window": 10},
    "qwen2": {
        **LLAMA,
        "model_type": "qwen2",
        "tie_word_embeddings": True,
        "use_sliding_window": True,
        "sliding_window": 10,
        "max_window_layers": 1,
    },
    "lora": LLAMA,
    "dora": LLAMA,
}

_WIDE = {"num_hidden_layers": 4, "initializer_range": 0.1}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3": {
        **LLAMA,
        **_WIDE,
        "model_type": "gemma3_text",
        "tie_word_embeddings": True,
        "sliding_window": 10,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 9,
        "final_logit_softcapping": 3.0,
    },
    "olmo2": {**LLAMA, "model_type": "olmo2"},
    "olmo3": {**LLAMA, **_WIDE, "model_type": "olmo3", "sliding_window": 10},
    "smollm3": {**LLAMA, **_WIDE, "model_type": "smollm3"},
    "granite": {
        **LLAMA,
        "model_type": "granite",
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.3,
        "logits_scaling": 2.0,
    },
    "phi3": {**LLAMA, "model_type": "phi3", "partial_rotary_factor": 0.5},
    "glm4": {**LLAMA, "model_type": "glm4"},
    "exaone4": {**LLAMA, **_WIDE, "model_type": "exaone4", "sliding_window": 10},
    "seed_oss": {**LLAMA, "model_type": "seed_oss", "attention_out_bias": True},
    "ministral3": {
        **LLAMA,
        "model_type": "ministral3",
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 8,
            "llama_4_scaling_beta": 0.3,
        },
    },
    "qwen3_moe": {
        **LLAMA,
        **_WIDE,
        "model_type": "qwen3_moe",
        "intermediate_size": 96,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "mlp_only_layers": [0],
        "norm_topk_prob": True,
    },
    "glm4_moe": {
        **LLAMA,
        **_WIDE,
        "model_type": "glm4_moe",
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 1.5,
        "use_qk_norm": True,
    },
    "minimax_m2": {
        **LLAMA,
        **_WIDE,
        "model_type": "minimax_m2",
        "intermediate_size": 24,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rotary_dim": 2,
    },
    "gpt_oss": {
        **LLAMA,
        **_WIDE,
        "model_type": "gpt_oss",
        "intermediate_size": 24,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 10,
        # At its limit a gate has two gradients: with 0.5 one of them is there within the last bits.
        "swiglu_limit": 0.8,
    },
    "mixtral": {
        **LLAMA,
        "model_type": "mixtral",
        "num_local_experts": 4,
        "sliding_window": 10,
    },
    "olmoe": {**LLAMA, "model_type": "olmoe", "num_experts": 6, "num_experts_per_tok": 3},
}
EVERY = {name: MODELS[name] for name in ("llama", "mistral", "qwen2", "qwen3")} | FAMILIES
"""A model of each family."""
MODELS |= FAMILIES
MODELS["qwen3_moe-lora"] = MODELS["qwen3_moe"]

ADAPTED = ("lora", "dora")

TRANSFORMERS = ("transformers.models.t5.modeling_t5", "transformers.models.bert.modeling_bert")
"""What the models of `tests.objectives.ways` need; imported once, not on each rank."""


def recipe_of(root: Path, model: str, **knobs: Any) -> Recipe:
    """The recipe of one of `MODELS` over the prepared texts in `root`; its configuration, and
    weights for an adapter, are written where they lack.
    """
    folder = root / "models" / model
    if not folder.exists():
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(MODELS[model]))
        if model.endswith(ADAPTED):
            whole = Decoder(DecoderConfig.from_hf(MODELS[model]))
            init_weights(whole, 0)
            save_weights(
                {name: parameter.detach() for name, parameter in whole.named_parameters()}, folder
            )
    given = {"model__source": str(folder), "model__config": None, "model__init": "random"}
    if model.endswith(ADAPTED):
        adapter = {"rank": 4, "alpha": 8, "kind": "dora" if model == "dora" else "lora"}
        given |= {"model__init": "weights", "model__lora": json.dumps(adapter)}
    return small_recipe(root, **given, **knobs)


def check(found: LayoutResult) -> None:
    """That a layout gives the numbers of one process."""
    if found.trace:
        pytest.fail(f"{found.summary}\n{found.trace}")
    assert found.holds, found.summary
    assert found.difference is not None
    for kind in ("loss", "norm", "weights"):
        measured(getattr(found.difference, kind), kind)


class Proving:
    """Ranks that live as long as the tests of a file, and what one process makes of each recipe."""

    def __init__(self) -> None:
        self.prover = LayoutProver(
            preload=(*PRELOAD, "tests.parallel.faults", *TRANSFORMERS), case_s=60.0, bounds=BOUNDS
        )
        self._references: dict[str, LayoutReference] = {}

    def reference(
        self, recipe: Recipe, optimizer: OptimizerSettings | None = None
    ) -> LayoutReference:
        key = f"{recipe.model_dump_json()} {optimizer!r}"
        if key not in self._references:
            self._references[key] = self.prover.reference(recipe, optimizer)
        return self._references[key]
