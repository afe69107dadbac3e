"""The dense members of the native decoder family, a row each; what the fields mean stands in
`ingot/config/models/family.py`. Mixtures of experts are in `ingot/config/models/mixtures.py`.

Defaults are those of transformers' configuration class for each model type, so that a sparse
`config.json` means the same model in both.
"""

from __future__ import annotations

from ingot.config.models.family import FULL, SLIDING, FamilyMember, LayerNorms

_OFF = (0, 0.0, None)
_WINDOWED = {"sliding_window": 4096}
_SPLIT_QKV = {"self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")}
_SPLIT_MLP = {"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")}
_AFTER = LayerNorms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_SWITCH = frozenset({"use_sliding_window", "max_window_layers"})
_PATTERN = frozenset({"sliding_window_pattern"})
_NO_BIAS = {"attention_bias": (False, None), "mlp_bias": (False, None)}

LLAMA = FamilyMember(
    "Llama 1, 2, 3, 3.1, 3.2, 3.3, SmolLM2 and others of the same architecture",
    mlp_bias="mlp_bias",
    fixed={"sliding_window": (None,), "rope_interleaved": (False, None)},
)
MISTRAL = FamilyMember(
    "Mistral 7B with and without sliding window, Nemo and others of the same architecture",
    {"max_position_embeddings": 131_072, "num_key_value_heads": 8, **_WINDOWED},
    qkv_bias=False,
    output_bias=False,
    windows="all",
    fixed=_NO_BIAS,
)
MINISTRAL3 = FamilyMember(
    "Ministral 3 (YaRN, queries that grow with their position); the text model of its files",
    {
        "max_position_embeddings": 262_144,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 16_384,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale_all_dim": 1.0,
            "mscale": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    qkv_bias=False,
    output_bias=False,
    windows="all",
    query_growth=True,
    fixed=_NO_BIAS,
)
QWEN2 = FamilyMember(
    "Qwen 2 and 2.5 (biases on queries, keys and values)",
    {"max_position_embeddings": 32_768, "num_key_value_heads": 32, **_WINDOWED},
    qkv_bias=True,
    output_bias=False,
    windows="switch",
    reads=_SWITCH,
    fixed={"mlp_bias": (False, None)},
)
QWEN3 = FamilyMember(
    "Qwen 3, dense (normed queries and keys)",
    {"max_position_embeddings": 32_768, "num_key_value_heads": 32, "head_dim": 128, **_WINDOWED},
    qk_norm="head",
    windows="switch",
    reads=_SWITCH,
    fixed={"mlp_bias": (False, None)},
)
GEMMA3 = FamilyMember(
    "Gemma 3 (windows in five of six layers, norms before and after each block); the text model",
    {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window_pattern": 6,
        **_WINDOWED,
    },
    norms=LayerNorms(
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    norm_offset=1.0,
    qk_norm="head",
    windows="pattern",
    thetas={FULL: 1e6, SLIDING: 1e4},
    embedding_root=True,
    reads=frozenset(
        {
            "hidden_activation",
            "query_pre_attn_scalar",
            "final_logit_softcapping",
            "rope_local_base_freq",
            *_PATTERN,
        }
    ),
    fixed={
        "hidden_act": ("gelu_pytorch_tanh", None),
        "mlp_bias": (False, None),
        "attn_logit_softcapping": (None,),
        "use_bidirectional_attention": (False, None),
    },
)
OLMO2 = FamilyMember(
    "OLMo 2 (norms after each block and over all queries and keys)",
    {"rms_norm_eps": 1e-5},
    norms=_AFTER,
    qk_norm="full",
    fixed={"sliding_window": (None,), "mlp_bias": (False, None)},
)
OLMO3 = FamilyMember(
    "OLMo 3 (as OLMo 2, with windows in three of four layers)",
    {"rms_norm_eps": 1e-5, "sliding_window_pattern": 4, **_WINDOWED},
    norms=_AFTER,
    qk_norm="full",
    windows="pattern",
    thetas={FULL: 5e5, SLIDING: 5e5},
    reads=_PATTERN,
    fixed={"mlp_bias": (False, None)},
)
SMOLLM3 = FamilyMember(
    "SmolLM3 (every fourth layer without rotary positions)",
    {
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 4,
        "rope_theta": 2e6,
        "tie_word_embeddings": True,
        "no_rope_layer_interval": 4,
    },
    mlp_bias="mlp_bias",
    windows="unrotated",
    rotary="listed",
    reads=_SWITCH | {"no_rope_layers", "no_rope_layer_interval"},
    fixed={"pretraining_tp": (1, 2, None)},
)
GRANITE = FamilyMember(
    "Granite 3, dense (scaled embeddings, residuals, attention and logits)",
    {"attention_multiplier": 1.0},
    mlp_bias="mlp_bias",
    reads=frozenset(
        {"attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"}
    ),
    fixed={"sliding_window": (None,)},
)
PHI3 = FamilyMember(
    "Phi-3, Phi-3.5 (mini, medium), Phi-4 and Phi-4-mini, up to their original positions",
    {
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    },
    qkv_bias=False,
    output_bias=False,
    windows="all",
    scalings=("default", "longrope"),
    share=1.0,
    fused={**_SPLIT_QKV, **_SPLIT_MLP},
    fixed={
        **_NO_BIAS,
        "embd_pdrop": _OFF,
        "resid_pdrop": _OFF,
        "lm_head_bias": (False, None),
        "full_attn_mod": (1, None),
        "interpolate_factor": (1, None),
    },
)
GLM4 = FamilyMember(
    "GLM-4-0414, dense (norms before and after each block, half of a head rotated)",
    {
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1.5625e-7,
        "attention_bias": True,
    },
    output_bias=False,
    norms=LayerNorms(
        "input_layernorm",
        "post_self_attn_layernorm",
        "post_attention_layernorm",
        "post_mlp_layernorm",
    ),
    share=0.5,
    interleaved=True,
    fused=_SPLIT_MLP,
    fixed={"sliding_window": (None,), "mlp_bias": (False, None)},
)
EXAONE4 = FamilyMember(
    "EXAONE 4.0 (norms after each block; with windows, rotary positions only in those layers)",
    {
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
        "sliding_window_pattern": 4,
        **_WINDOWED,
    },
    qkv_bias=False,
    output_bias=False,
    norms=_AFTER,
    qk_norm="head",
    windows="pattern",
    rotary="windowed",
    reads=_PATTERN,
    fixed=_NO_BIAS,
)
SEED_OSS = FamilyMember(
    "Seed-OSS (biases on queries, keys and values)",
    {
        "max_position_embeddings": 524_288,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": True,
    },
    output_bias="attention_out_bias",
    mlp_bias="mlp_bias",
    reads=frozenset({"attention_out_bias"}),
    fixed={"sliding_window": (None,), "residual_dropout": _OFF},
)
