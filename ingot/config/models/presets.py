"""Named sizes of models that start from random weights, as Hugging Face configurations."""

from __future__ import annotations

import copy
import difflib
from typing import Any

from ingot.base.errors import WrongInput

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
}


def _decoder(
    kind: str,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    feed_forward: int,
    *,
    vocab: int,
    positions: int,
    tied: bool,
    theta: float = 10_000.0,
    scaling: dict[str, Any] | None = None,
    std: float = 0.02,
    eps: float = 1e-5,
    **more: Any,
) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": theta, **(scaling or {})}
    return {
        "architectures": [_CLASSES[kind]],
        "model_type": kind,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": feed_forward,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "max_position_embeddings": positions,
        "rms_norm_eps": eps,
        "rope_parameters": rope,
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
        "initializer_range": std,
        **more,
    }


def _llama(*sizes: int, vocab: int, positions: int, tied: bool, **more: Any) -> dict[str, Any]:
    return _decoder(
        "llama",
        *sizes,
        vocab=vocab,
        positions=positions,
        tied=tied,
        **{"attention_bias": False, "mlp_bias": False, **more},
    )


_LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_NO_WINDOW: dict[str, Any] = {"use_sliding_window": False, "sliding_window": None}

PRESETS: dict[str, dict[str, Any]] = {
    # Narrow models need a larger initialisation range: the usual 0.02 cost the first of these more
    # than half a nat after 120 steps (docs/LOG.md).
    "llama-3m": _llama(256, 3, 4, 2, 768, vocab=512, positions=1024, tied=False, std=0.1),
    "llama-6m": _llama(256, 6, 4, 2, 704, vocab=4096, positions=1024, tied=True, std=0.06),
    "llama-56m": _llama(512, 8, 8, 4, 1408, vocab=32_000, positions=2048, tied=False),
    "llama-135m": _llama(576, 30, 9, 3, 1536, vocab=49_152, positions=2048, tied=True),
    "llama-1b": _llama(
        2048,
        16,
        32,
        8,
        8192,
        vocab=128_256,
        positions=131_072,
        tied=True,
        theta=500_000.0,
        scaling={**_LLAMA3_SCALING, "factor": 32.0},
    ),
    "llama-3b": _llama(
        3072,
        28,
        24,
        8,
        8192,
        vocab=128_256,
        positions=131_072,
        tied=True,
        theta=500_000.0,
        scaling={**_LLAMA3_SCALING, "factor": 32.0},
    ),
    "llama-8b": _llama(
        4096,
        32,
        32,
        8,
        14_336,
        vocab=128_256,
        positions=131_072,
        tied=False,
        theta=500_000.0,
        scaling=_LLAMA3_SCALING,
    ),
    "mistral-7b": _decoder(
        "mistral",
        4096,
        32,
        32,
        8,
        14_336,
        vocab=32_768,
        positions=32_768,
        tied=False,
        theta=1_000_000.0,
        sliding_window=None,
    ),
    "qwen2.5-0.5b": _decoder(
        "qwen2",
        896,
        24,
        14,
        2,
        4864,
        vocab=151_936,
        positions=32_768,
        tied=True,
        theta=1_000_000.0,
        eps=1e-6,
        **_NO_WINDOW,
    ),
    # The first layer sees a few tokens with their positions, the others all tokens without: such a
    # model learns to copy in half the steps, and with every seed tried (docs/LOG.md).
    "exaone4-1m": _decoder(
        "exaone4",
        128,
        3,
        2,
        2,
        384,
        vocab=2048,
        positions=1024,
        tied=True,
        std=0.08,
        eps=1e-6,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
    ),
    "qwen3-2m": _decoder(
        "qwen3",
        192,
        3,
        4,
        2,
        512,
        vocab=2048,
        positions=1024,
        tied=True,
        std=0.06,
        eps=1e-6,
        attention_bias=False,
        **_NO_WINDOW,
    ),
    "qwen3-0.6b": _decoder(
        "qwen3",
        1024,
        28,
        16,
        8,
        3072,
        vocab=151_936,
        positions=40_960,
        tied=True,
        theta=1_000_000.0,
        eps=1e-6,
        head_dim=128,
        attention_bias=False,
        **_NO_WINDOW,
    ),
}

THROUGH_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "t5-mini": {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "vocab_size": 4096,
        "d_model": 256,
        "d_kv": 64,
        "d_ff": 512,
        "num_layers": 4,
        "num_decoder_layers": 4,
        "num_heads": 4,
        "feed_forward_proj": "gated-gelu",
        "dropout_rate": 0.1,
        "is_encoder_decoder": True,
    },
    "bert-mini": {
        "architectures": ["BertForSequenceClassification"],
        "model_type": "bert",
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
    },
}
"""Small models of the other kinds, for experiments."""


def preset(name: str) -> dict[str, Any]:
    """The configuration of preset `name`. Raises WrongInput naming the nearest one."""
    known = PRESETS | THROUGH_TRANSFORMERS
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
        raise WrongInput(
            f"model.source preset:{name} is unknown; did you mean preset:{near}? `ingot show"
            " models` lists all"
        )
    return copy.deepcopy(known[name])
