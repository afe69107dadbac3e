"""The mixtures of experts of the native decoder family, a row each; what the fields mean stands in
`ingot/config/models/family.py` and `ingot/config/models/experts.py`.
"""

from __future__ import annotations

from ingot.config.models.experts import ExpertKeys, ExpertNames
from ingot.config.models.family import FamilyMember

_OFF = (0, 0.0, None)
_NO_BIAS = {"attention_bias": (False, None), "mlp_bias": (False, None)}
_BALANCE = frozenset({"router_aux_loss_coef"})
"""Keys that matter only to a loss over the experts' load that transformers adds when
`output_router_logits` is set."""
_NO_BALANCE = {"output_router_logits": (False, None)}
_MIXTRAL_NAMES = ExpertNames("block_sparse_moe", "w1", "w3", "w2")

MIXTRAL = FamilyMember(
    "Mixtral (mixture of experts)",
    {
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_experts_per_tok": 2,
    },
    qkv_bias=False,
    output_bias=False,
    windows="all",
    experts=ExpertKeys(
        usual_count=8,
        width="intermediate_size",
        normalised=True,
        names=_MIXTRAL_NAMES,
    ),
    fused={"block_sparse_moe.gate": ("mlp.gate",)},
    reads=_BALANCE,
    fixed={**_NO_BIAS, **_NO_BALANCE, "router_jitter_noise": _OFF},
)
QWEN3_MOE = FamilyMember(
    "Qwen 3, mixture of experts (Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder)",
    {
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 4,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
    },
    qk_norm="head",
    experts=ExpertKeys(usual_count=128),
    reads=_BALANCE | {"max_window_layers"},
    fixed={**_NO_BALANCE, "mlp_bias": (False, None), "use_sliding_window": (False, None)},
)
GLM4_MOE = FamilyMember(
    "GLM-4.5, 4.6 and 4.7, mixture of experts (a correction bias chooses, half of a head rotated)",
    {
        "vocab_size": 151_552,
        "hidden_size": 4096,
        "intermediate_size": 10_944,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "num_mtp_layers": 1,
    },
    output_bias=False,
    qk_norm="head",
    qk_norm_if="use_qk_norm",
    share=0.5,
    experts=ExpertKeys(
        usual_count=128,
        count=("n_routed_experts", "num_local_experts"),
        score="sigmoid",
        corrected=True,
        grouped=True,
        shared="n_shared_experts",
        dense_until="first_k_dense_replace",
    ),
    further_layers=("num_mtp_layers", "num_nextn_predict_layers"),
    fixed={**_NO_BALANCE, "sliding_window": (None,), "mlp_bias": (False, None)},
)
MINIMAX_M2 = FamilyMember(
    "MiniMax-M2, M2.1, M2.5 and M2.7, mixture of experts (a correction bias chooses)",
    {
        "vocab_size": 200_064,
        "hidden_size": 3072,
        "intermediate_size": 1536,
        "num_hidden_layers": 62,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 196_608,
        "rope_theta": 5e6,
        "num_experts_per_tok": 8,
    },
    qkv_bias=False,
    output_bias=False,
    qk_norm="full",
    share=1.0,
    rotated="rotary_dim",
    experts=ExpertKeys(
        usual_count=256,
        width="intermediate_size",
        score="sigmoid",
        normalised=True,
        corrected=True,
        names=_MIXTRAL_NAMES,
    ),
    # The bias first: the name of the router's module is the beginning of its own.
    fused={
        "block_sparse_moe.e_score_correction_bias": ("mlp.gate.e_score_correction_bias",),
        "block_sparse_moe.gate": ("mlp.gate",),
    },
    further_layers=("num_mtp_modules",),
    # `mlp_intermediate_size` is that of dense layers, which there are none of.
    reads=_BALANCE
    | {"use_mtp", "mtp_transformer_layers", "mlp_intermediate_size", "shared_moe_mode"},
    fixed={
        **_NO_BIAS,
        **_NO_BALANCE,
        "sliding_window": (None,),
        "router_jitter_noise": _OFF,
        "scoring_func": ("sigmoid", None),
        "use_routing_bias": (True,),
        "use_qk_norm": (True,),
        "qk_norm_type": ("per_layer", None),
        "shared_intermediate_size": _OFF,
        "attn_type_list": (None, *([1] * layers for layers in range(1, 129))),
        **dict.fromkeys(
            (f"layernorm_{part}_beta" for part in ("full_attention", "linear_attention", "mlp")),
            (1, None),
        ),
    },
)
GPT_OSS = FamilyMember(
    "gpt-oss, mixture of experts (attention sinks, windows in every second layer); MXFP4 files",
    {
        "vocab_size": 201_088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "sliding_window": 128,
        "sliding_window_pattern": 2,
        "num_experts_per_tok": 4,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "rope_theta": 150_000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150_000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    sinks=True,
    windows="pattern",
    # A softmax over the chosen experts is one over all of them, divided by the sum of the chosen.
    experts=ExpertKeys(usual_count=128, width="intermediate_size", normalised=True, biased=True),
    fused={"mlp.router": ("mlp.gate",)},
    # Both are said by other keys too, which transformers reads.
    reads=_BALANCE | {"initial_context_length", "experts_per_token"},
    fixed={**_NO_BALANCE, "mlp_bias": (False, None), "hidden_act": ("silu", None)},
)
OLMOE = FamilyMember(
    "OLMoE (mixture of experts, norms over all queries and keys)",
    {
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "num_experts_per_tok": 8,
    },
    qk_norm="full",
    experts=ExpertKeys(usual_count=64, width="intermediate_size"),
    reads=_BALANCE,
    fixed={
        **_NO_BALANCE,
        "clip_qkv": (None,),
        "mlp_bias": (False, None),
        "sliding_window": (None,),
    },
)
