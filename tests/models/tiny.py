"""Small random models of transformers, as folders: the reference that our decoder is held
against.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
CASES: dict[str, dict[str, Any]] = {
    "llama2": {
        "num_key_value_heads": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    },
    "grouped": {"num_key_value_heads": 2},
    "tied": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "llama3.1": {"rope_parameters": _LLAMA3},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "wide-heads": {"head_dim": 24},
}
WINDOW = 9
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
FAMILY: dict[str, dict[str, Any]] = {
    "llama2": {"kind": "llama", "num_key_value_heads": 4},
    "llama3.2": {"kind": "llama", "rope_parameters": _LLAMA3, "tie_word_embeddings": True},
    "mistral": {"kind": "mistral", "sliding_window": WINDOW},
    "mistral-whole": {"kind": "mistral", "sliding_window": None, "head_dim": 24},
    "qwen2": {"kind": "qwen2"},
    "qwen2-tied": {"kind": "qwen2", "tie_word_embeddings": True},
    "qwen2-window": {
        "kind": "qwen2",
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 1,
    },
    "qwen2-yarn": {"kind": "qwen2", "rope_parameters": _YARN},
    "qwen3": {"kind": "qwen3", "head_dim": 24},
    "qwen3-tied": {
        "kind": "qwen3",
        "head_dim": 24,
        "tie_word_embeddings": True,
        "attention_bias": True,
    },
    "qwen3-window": {
        "kind": "qwen3",
        "head_dim": 16,
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "olmo2": {"kind": "olmo2"},
    "olmo2-biased": {"kind": "olmo2", "num_key_value_heads": 4, "attention_bias": True},
    "olmo3": {
        "kind": "olmo3",
        "num_hidden_layers": 4,
        "sliding_window": WINDOW,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 500_000.0},
            "full_attention": {**_YARN, "rope_theta": 500_000.0, "attention_factor": 1.2},
        },
    },
    "smollm3": {"kind": "smollm3", "num_hidden_layers": 4, "tie_word_embeddings": True},
    "smollm3-window": {
        "kind": "smollm3",
        "num_hidden_layers": 3,
        "no_rope_layers": [0, 1, 0],
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "mlp_bias": True,
    },
    "granite": {
        "kind": "granite",
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.6,
        "attention_multiplier": 0.2,
        "logits_scaling": 0.7,
        "tie_word_embeddings": True,
    },
    "gemma3": {
        "kind": "gemma3_text",
        "num_hidden_layers": 4,
        "head_dim": 24,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "query_pre_attn_scalar": 40,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
        },
    },
    "gemma3-capped": {
        "kind": "gemma3_text",
        "head_dim": 16,
        "sliding_window": WINDOW,
        "final_logit_softcapping": 2.0,
        "tie_word_embeddings": False,
    },
    "phi3": {"kind": "phi3"},
    "phi3-longrope": {
        "kind": "phi3",
        "head_dim": 16,
        "original_max_position_embeddings": 64,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5],
            "long_factor": [1.0, 2.0, 4.0, 8.0, 16.0, 32.0],
            "original_max_position_embeddings": 64,
        },
    },
    "phi3-window": {"kind": "phi3", "sliding_window": WINDOW},
    "glm4": {"kind": "glm4", "head_dim": 24},
    "exaone4": {"kind": "exaone4", "num_hidden_layers": 4, "sliding_window": WINDOW},
    "exaone4-whole": {
        "kind": "exaone4",
        "sliding_window": None,
        "layer_types": ["full_attention"] * 2,
        "rope_parameters": {**_LLAMA3, "rope_theta": 1_000_000.0},
    },
    "seed_oss": {
        "kind": "seed_oss",
        "head_dim": 24,
        "attention_dropout": 0.0,
        "residual_dropout": 0.0,
        "attention_out_bias": True,
    },
    "ministral3": {
        "kind": "ministral3",
        "head_dim": 24,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1_000_000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.5,
        },
    },
    "mixtral": {"kind": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 2},
    "mixtral-window": {
        "kind": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 3,
        "sliding_window": WINDOW,
        "intermediate_size": 20,
    },
    "qwen3_moe": {
        "kind": "qwen3_moe",
        "num_hidden_layers": 4,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "mlp_only_layers": [2],
        "norm_topk_prob": True,
        "head_dim": 24,
    },
    "qwen3_moe-plain": {
        "kind": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "decoder_sparse_step": 2,
        "tie_word_embeddings": True,
        "attention_bias": True,
    },
    "glm4_moe": {
        "kind": "glm4_moe",
        "num_hidden_layers": 3,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 1.8,
        "use_qk_norm": True,
        "head_dim": 24,
    },
    "glm4_moe-plain": {
        "kind": "glm4_moe",
        "n_routed_experts": 5,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "n_shared_experts": 2,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
        "attention_bias": True,
    },
    "minimax_m2": {
        "kind": "minimax_m2",
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "intermediate_size": 40,
        "head_dim": 24,
        "rotary_dim": 12,
    },
    "gpt_oss": {
        "kind": "gpt_oss",
        "num_hidden_layers": 4,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "intermediate_size": 32,
        "head_dim": 24,
        "sliding_window": WINDOW,
        "swiglu_limit": 0.6,
        "swiglu_alpha": 1.3,
        "rope_parameters": {**_YARN, "truncate": False},
    },
    "gpt_oss-plain": {
        "kind": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 20,
        "head_dim": 16,
        "layer_types": ["full_attention"] * 2,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 150_000.0},
    },
    "olmoe": {
        "kind": "olmoe",
        "num_experts": 6,
        "num_experts_per_tok": 4,
        "intermediate_size": 32,
        "eos_token_id": 5,
    },
}


def make_reference(
    folder: Path,
    *,
    kind: str = "llama",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    norms: float = 0.0,
    **overrides: Any,
) -> Path:
    """Save a tiny random causal model; weights are large enough that logits differ visibly.
    `norms`: how far the weights of norms are from 1.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    sizes = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.15,
        "pad_token_id": None,
        **overrides,
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)).to(dtype)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
        elif norms and "norm" in name:
            torch.nn.init.normal_(parameter, mean=1.0, std=norms)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, std=0.1)
    model.save_pretrained(folder)
    return folder


def make_member(folder: Path, case: str, **overrides: Any) -> Path:
    """One of `FAMILY`, with norms such that one left out is seen."""
    return make_reference(folder, norms=0.2, **FAMILY[case], **overrides)
