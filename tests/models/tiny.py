"""Small random Llamas of transformers, as folders: the reference that our decoder is held against."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

CASES: dict[str, dict[str, Any]] = {
    "llama2": {"num_key_value_heads": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}},
    "grouped": {"num_key_value_heads": 2},
    "tied": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "llama3.1": {"rope_parameters": {
        "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16}},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "wide-heads": {"head_dim": 24},
}


def make_reference(folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    """Save a tiny random LlamaForCausalLM; weights are large enough that logits differ visibly."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.15, **overrides}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes)).to(dtype)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    return folder
