"""Small random models of every proved model type of transformers: its own default configuration
with its sizes made small by their names, and what a type needs besides.
"""

from __future__ import annotations

import re
from typing import Any

from ingot.config.models.types import HFKind

VOCAB = 67
EOS, BOS, PAD, CLS = VOCAB - 3, VOCAB - 2, 1, VOCAB - 4
SIZES: tuple[tuple[str, int | float], ...] = (
    (r"(src_|tgt_|decoder_)?vocab_size", VOCAB),
    (r"eos_token_id", EOS),
    (r"decoder_start_token_id|forced_eos_token_id", EOS),
    (r"bos_token_id", BOS),
    (r"(cls|sep|mask|start|end)_token_id|\w+_index", CLS),
    (r"\w*drop\w*|\w*pdrop", 0.0),
    (r"initializer_range|init_std|initializer_factor|emb(ed)?_init_std", 0.3),
    (r"num_key_value_heads|num_kv_heads|num_query_groups", 2),
    (r"\w*(heads?|n_head)", 4),
    (r"\w*layers?|n_layer|num_blocks", 2),
    (r"hidden_size|d_model|dim|n_embd|emb_dim|embed_dim|embedding_size|d_embed", 32),
    (r"\w*ffn_dim|\w*intermediate_size|d_ff|hidden_dim|n_inner|d_inner|ffn_hidden_size|dff", 48),
    (r"head_dim|d_kv|d_head|query_pre_attn_scalar", 8),
    (r"(max_position_embeddings|n_positions|n_ctx|max_\w*position_embeddings|max_seq_len)", 66),
    (r"(sliding|attention|local)_window|local_attention|block_size|sliding_window_pattern", 8),
)
"""A name's whole pattern -> the value; the first that fits counts."""
KEPT = r"num_hidden_groups|inner_group_num|num_feedforward_networks|layer_norm\w*|max_window_layers"
OWN: dict[str, dict[str, Any]] = {
    "deberta": {
        "relative_attention": True,
        "pos_att_type": ["c2p", "p2c"],
        "pooler_hidden_size": 32,
    },
    "deberta-v2": {
        "relative_attention": True,
        "pos_att_type": ["c2p", "p2c"],
        "position_buckets": 8,
        "share_att_key": True,
        "pooler_hidden_size": 32,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "gptj": {"rotary_dim": 4},
    "led": {"attention_window": [4, 4]},
    "longformer": {"attention_window": [4, 4]},
    "longt5": {"local_radius": 3, "global_block_size": 4},
    "longt5-global": {
        "encoder_attention_type": "transient-global",
        "local_radius": 3,
        "global_block_size": 4,
    },
    # Without norms, larger weights saturate its attention, where rounding decides.
    "mobilebert": {
        "intra_bottleneck_size": 32,
        "hidden_size": 32,
        "embedding_size": 16,
        "true_hidden_size": 32,
        "initializer_range": 0.1,
    },
    "pegasus_x": {"block_size": 4, "num_global_tokens": 2},
    "xlnet": {"d_head": 8, "n_head": 4},
    "opt": {"word_embed_proj_dim": 32},
    "nemotron": {"num_key_value_heads": 2},
    # Larger weights make its third step amplify rounding.
    "rembert": {"initializer_range": 0.1},
    "umt5-own": {"tie_word_embeddings": False},
    "longt5-own": {"tie_word_embeddings": False, "local_radius": 3, "global_block_size": 4},
    "bart-untied": {"tie_word_embeddings": False},
    "mbart-untied": {"tie_word_embeddings": False},
    "m2m_100-untied": {"tie_word_embeddings": False},
    "mbart": {"decoder_start_token_id": 5},
    "plbart": {"decoder_start_token_id": 5},
}


def shrunk(case: str, kind: HFKind) -> dict[str, Any]:
    """The configuration of a case: a model type, or one of `OWN` that begins with it and `-`."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type = case if case in CONFIG_MAPPING else case.rpartition("-")[0]
    values = _smaller(CONFIG_MAPPING[model_type]().to_dict())
    values |= {"model_type": model_type, "pad_token_id": PAD, **OWN.get(case, {})}
    if kind == "seq2seq":
        values.setdefault("decoder_start_token_id", EOS)
    return values


def _smaller(values: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        for pattern, small in SIZES:
            if re.fullmatch(pattern, name) and not re.fullmatch(KEPT, name):
                made[name] = small
                break
    return made
