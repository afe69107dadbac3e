"""Named sizes of models that start from random weights, as Hugging Face configurations."""

from __future__ import annotations

import difflib
from typing import Any

from ingot.base.errors import WrongInput


def _llama(hidden: int, layers: int, heads: int, kv_heads: int, feed_forward: int, *, vocab: int, positions: int, tied: bool,
           theta: float = 10_000.0, scaling: dict[str, Any] | None = None, std: float = 0.02) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": theta, **(scaling or {})}
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocab, "hidden_size": hidden,
        "intermediate_size": feed_forward, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": hidden // heads, "max_position_embeddings": positions,
        "rms_norm_eps": 1e-5, "rope_parameters": rope, "tie_word_embeddings": tied, "hidden_act": "silu",
        "attention_bias": False, "mlp_bias": False, "initializer_range": std,
    }


_LLAMA3_SCALING = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

PRESETS: dict[str, dict[str, Any]] = {
    # Narrow models need wider draws: the usual 0.02 cost the first of these more than half a nat after 120 steps (docs/LOG.md).
    "llama-3m": _llama(256, 3, 4, 2, 768, vocab=512, positions=1024, tied=False, std=0.1),
    "llama-6m": _llama(256, 6, 4, 2, 704, vocab=4096, positions=1024, tied=True, std=0.06),
    "llama-56m": _llama(512, 8, 8, 4, 1408, vocab=32_000, positions=2048, tied=False),
    "llama-135m": _llama(576, 30, 9, 3, 1536, vocab=49_152, positions=2048, tied=True),
    "llama-1b": _llama(2048, 16, 32, 8, 8192, vocab=128_256, positions=131_072, tied=True, theta=500_000.0,
                       scaling={**_LLAMA3_SCALING, "factor": 32.0}),
    "llama-8b": _llama(4096, 32, 32, 8, 14_336, vocab=128_256, positions=131_072, tied=False, theta=500_000.0, scaling=_LLAMA3_SCALING),
}


def preset(name: str) -> dict[str, Any]:
    """The configuration called `name`. Raises WrongInput naming the nearest one."""
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0.0)[0]
        raise WrongInput(f"model.source preset:{name} is unknown; did you mean preset:{near}? `ingot show models` lists all")
    return {**PRESETS[name], "rope_parameters": dict(PRESETS[name]["rope_parameters"])}
