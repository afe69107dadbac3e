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
        **overrides,
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)).to(dtype)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
        elif norms and "norm" in name:
            torch.nn.init.normal_(parameter, mean=1.0, std=norms)
    model.save_pretrained(folder)
    return folder


def make_member(folder: Path, case: str, **overrides: Any) -> Path:
    """One of `FAMILY`, with norms such that one left out is seen."""
    return make_reference(folder, norms=0.2, **FAMILY[case], **overrides)
