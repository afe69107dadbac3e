"""Small models of the families that llama.cpp has, as folders."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from ingot.checkpoints.export import export_model
from ingot.models.native.config import DecoderConfig
from ingot.models.native.decoder import Decoder
from ingot.models.parameters import init_weights
from ingot.tokenizers.bpe import train_bpe
from ingot.tokenizers.tokenizer import Tokenizer
from tests.lazy import lazy

torch = lazy("torch")
TEXT = "the bright copper melts 345 and  the\n mould cools"
UNUSED_IDS = 3
_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_PHI3 = {"model_type": "phi3", "sliding_window": None, "original_max_position_embeddings": 128}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rope_theta": 10_000.0},
    "llama-tied": {"model_type": "llama", "head_dim": 32, "tie_word_embeddings": True},
    "llama3": {"model_type": "llama", "rope_parameters": _LLAMA3},
    "linear": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
    },
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "gemma3": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 7,
        "head_dim": 32,
        "sliding_window": 5,
        "query_pre_attn_scalar": 32,
        "final_logit_softcapping": 2.0,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        },
    },
    "olmo2": {"model_type": "olmo2"},
    "olmo2-tied": {"model_type": "olmo2", "tie_word_embeddings": True},
    "phi3": _PHI3,
    "phi3-part": {
        **_PHI3,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.75,
        },
    },
    "granite": {
        "model_type": "granite",
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.6,
        "attention_multiplier": 0.2,
        "logits_scaling": 0.7,
        "tie_word_embeddings": True,
    },
    "smollm3": {"model_type": "smollm3", "num_hidden_layers": 4, "tie_word_embeddings": True},
}


@functools.cache
def tokenizer() -> Tokenizer:
    return train_bpe(["the bright copper melts and the mould cools slowly 12 345 " * 3] * 20, 400)


def family(
    folder: Path, name: str, *, run: str = "", words: Tokenizer | None = None, **more: Any
) -> tuple[Path, Decoder]:
    """A random model of a family and its folder; its norms and biases are not what they begin as.
    `words`: a tokenizer of the same size.
    """
    torch.set_num_threads(1)
    vocab_size = tokenizer().vocab_size + UNUSED_IDS
    values = {**_SIZES, **FAMILIES[name], "vocab_size": vocab_size, **more}
    with torch.device("meta"):
        model = Decoder(DecoderConfig.from_hf(values))
    model.to_empty(device="cpu")
    init_weights(model, seed=1)
    for key, weight in model.named_parameters():
        if weight.dim() == 1:
            seeded = torch.Generator().manual_seed(len(key))
            weight.data += 0.3 * torch.randn(weight.shape, generator=seeded)
    lineage = {"run": run or name}
    words = words or tokenizer()
    export_model(model, words, folder / name, export_type="fp32", lineage=lineage)
    return folder / name, model.eval()
