"""The model types of transformers that ingot can train: proved ones, unfit ones, and the others of
the installed transformers. No torch: transformers is not imported, its table of classes is parsed
as text.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from ingot.base.errors import WrongInput

HFKind = Literal["seq2seq", "encoder", "masked"]


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


PROVED: dict[HFKind, tuple[str, ...]] = {
    "seq2seq": _names(
        "t5 mt5 umt5 longt5 bart mbart m2m_100 marian pegasus pegasus_x blenderbot "
        "blenderbot-small led mvp plbart"
    ),
    "encoder": _names(
        "bert roberta xlm-roberta camembert distilbert electra deberta deberta-v2 "
        "modernbert mpnet albert xlnet data2vec-text ernie eurobert flaubert gte ibert "
        "jina_embeddings_v3 longformer megatron-bert mobilebert nomic_bert rembert "
        "roberta-prelayernorm roformer xlm xlm-roberta-xl bart mbart mvp "
        "plbart t5 mt5 umt5 llama mistral qwen2 qwen3 gpt2 gpt-sw3 gpt_bigcode gpt_neo "
        "gpt_neox gptj opt bloom mpt falcon gemma gemma2 gemma3_text phi phi3 olmo olmo2 "
        "olmo3 starcoder2 stablelm persimmon helium glm glm4 smollm3 seed_oss exaone4 "
        "ministral3 arcee diffllama biogpt ctrl openai-gpt modernbert-decoder nemotron"
    ),
    "masked": _names(
        "bert roberta xlm-roberta camembert distilbert electra deberta deberta-v2 "
        "modernbert mpnet albert data2vec-text ernie eurobert gte ibert "
        "jina_embeddings_v3 longformer megatron-bert mobilebert nomic_bert rembert "
        "roberta-prelayernorm roformer xlm-roberta-xl"
    ),
}
"""Proved types: for each, a small random model gives the same loss, gradients, answers and export
as in transformers, and padding changes nothing (tests/models/hf).
"""

_SPEECH = "it hears, and only text is trained"
_SIGHT = "it reads pictures, pages or tables, and only text is trained"
_PADDING = "its answer to a text changes with the padding beside it, so with the batch"
_LENGTH = "its attention changes with the longest text of a batch"
_TWO = "it has two vocabularies"
_WRITES = "it is a sequence-to-sequence model, which objective.kind seq2seq trains"
_PROTEINS = "it reads proteins, and only text is trained"

UNFIT: dict[HFKind, dict[str, str]] = {
    "seq2seq": {
        **dict.fromkeys(
            _names(
                "audioflamingo3 glmasr granite_speech granite_speech_plus "
                "moss_transcribe_diarize musicflamingo nemo_speechlm qwen2_audio "
                "qwen3_asr seamless_m4t seamless_m4t_v2 vibevoice_asr voxtral "
                "voxtral_realtime"
            ),
            _SPEECH,
        ),
        "t5gemma2": _SIGHT,
        "bigbird_pegasus": _LENGTH,
        "encoder-decoder": _TWO,
        "fsmt": _TWO,
        "prophetnet": "it learns several tokens ahead at once, which no objective here does",
    },
    "encoder": {
        **dict.fromkeys(
            _names(
                "gemma3 layoutlm layoutlmv2 layoutlmv3 lilt markuplm modernvbert "
                "perceiver qwen3_5 t5gemma2 tapas ultravbert"
            ),
            _SIGHT,
        ),
        **dict.fromkeys(("esm", "esmc"), _PROTEINS),
        **dict.fromkeys(
            ("canine", "convbert", "fnet", "funnel", "nystromformer", "t5gemma", "yoso"), _PADDING
        ),
        **dict.fromkeys(("big_bird", "bigbird_pegasus"), _LENGTH),
        "mra": "its attention needs a CUDA kernel of its own, and is left out without it",
        "xmod": "it wants a language with each text",
    },
    "masked": {
        **dict.fromkeys(_names("layoutlm modernvbert neomme perceiver tapas ultravbert"), _SIGHT),
        **dict.fromkeys(("esm", "esmc"), _PROTEINS),
        **dict.fromkeys(("bart", "mbart", "mvp"), _WRITES),
        **dict.fromkeys(("convbert", "fnet", "funnel", "nystromformer", "yoso"), _PADDING),
        **dict.fromkeys(("big_bird", "reformer"), _LENGTH),
        "luke": "it asks for entities beside tokens",
        "mra": "its attention needs a CUDA kernel of its own, and is left out without it",
        "xmod": "it wants a language with each text",
    },
}
"""Types that would give wrong results silently, or that are not for text, with the reason. They are
always refused.
"""

RELATIVE = ("t5", "mt5", "umt5", "longt5")
"""T5 and related types: `encoder`, `decoder` and `lm_head` as siblings, relative positions."""
LIKE_BART = tuple(name for name in PROVED["seq2seq"] if name not in RELATIVE)
"""BART and related types: a base model with encoder and decoder, and a sibling `lm_head`."""
POSITIONED = _names(
    "bert roberta xlm-roberta camembert distilbert electra deberta-v2 modernbert mpnet"
)
"""Encoders that take position ids as input; the others count positions themselves."""
BEHIND_PADDING = _names(
    "roberta xlm-roberta camembert data2vec-text ibert longformer roberta-prelayernorm "
    "xlm-roberta-xl"
)
"""Encoders whose position ids start after the one of padding."""
LEARNED_POSITIONS = _names(
    "bart mbart blenderbot blenderbot-small led mvp plbart bert roberta xlm-roberta camembert "
    "distilbert electra deberta deberta-v2 mpnet albert data2vec-text ernie flaubert ibert "
    "longformer megatron-bert mobilebert rembert roberta-prelayernorm xlm xlm-roberta-xl gpt2 "
    "gpt-sw3 gpt_bigcode gpt_neo opt biogpt openai-gpt"
)
"""Types with a vector for each position, which is learned: their weights have no others."""
STORED_POSITIONS = ("pegasus", "roformer")
"""Types with a vector for each position, which is computed, but stored among their weights."""
POSITION_KEYS = _names(
    "max_position_embeddings n_positions max_encoder_position_embeddings "
    "max_decoder_position_embeddings"
)
"""What their configurations call the number of positions."""
SIDE_BY_SIDE = _names("bert roberta xlm-roberta camembert distilbert electra")
"""Masked language models that take positions and a mask between any two tokens, so that several
texts of a row do not see each other (tests/models/hf/test_side_by_side.py).
"""
ENDS_AT_EOS = ("bart", "mbart", "mvp", "plbart", "t5", "mt5", "umt5")
"""Classifiers that read a text's class at its last `eos`; every text of a batch must have one."""
READS_LAST = _names(
    "llama mistral qwen2 qwen3 gpt2 gpt-sw3 gpt_bigcode gpt_neo gpt_neox gptj opt bloom mpt falcon "
    "gemma gemma2 gemma3_text phi phi3 olmo olmo2 olmo3 starcoder2 stablelm persimmon helium glm "
    "glm4 smollm3 seed_oss exaone4 ministral3 arcee diffllama biogpt openai-gpt nemotron"
)
"""Decoders that classify by a head `score` on the hidden state of a text's last token: the
rightmost one whose id is not that of padding.
"""
FROM_THE_RIGHT = ("xlnet",)
"""Classifiers that read the class at a row's last place: padding comes before the text."""
WRAPS = ("mbart", "plbart")
"""Decoders whose input begins with the last token of the target, its language or `eos`."""


_TASKS: dict[HFKind, str] = {
    "seq2seq": "SEQ_TO_SEQ_CAUSAL_LM",
    "encoder": "SEQUENCE_CLASSIFICATION",
    "masked": "MASKED_LM",
}


def check_own_code(config: Mapping[str, Any], where: str) -> None:
    """Raise WrongInput if a model that cannot be built comes with code of its own (`auto_map`):
    that is why, as with the first versions of many embedding models.
    """
    if isinstance(code := config.get("auto_map"), dict) and code:
        raise WrongInput(
            f"{where}: this model is computed by code of its own ({next(iter(code.values()))}),"
            " which ingot does not run; take a version of it that transformers builds, or another"
            " model (`ingot show models`)"
        )


@functools.cache
def installed_types(kind: HFKind) -> dict[str, str]:
    """Every model type of this kind in the installed transformers, and its class; empty if
    transformers is not installed.
    """
    return _tables().get(f"MODEL_FOR_{_TASKS[kind]}_MAPPING_NAMES", {})


@functools.cache
def _tables() -> dict[str, dict[str, str]]:
    found = importlib.util.find_spec("transformers")
    if found is None or found.origin is None:
        return {}
    source = Path(found.origin).parent / "models" / "auto" / "modeling_auto.py"
    tables: dict[str, dict[str, str]] = {}
    for node in ast.parse(source.read_bytes()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            pairs = [part for part in ast.walk(node.value) if isinstance(part, ast.Tuple)]
            tables[node.targets[0].id] = {
                key.value: value.value
                for key, value in (pair.elts for pair in pairs if len(pair.elts) == 2)
                if isinstance(key, ast.Constant)
                and isinstance(value, ast.Constant)
                and isinstance(key.value, str)
                and isinstance(value.value, str)
            }
    return tables


_EXPERTS = "its mixture of experts is"
_LATENT = "its multi-head latent attention (compressed keys and values) is"
_DELTA = "its layers of linear attention (gated delta rule) and gated attention outputs are"
_MAMBA = "its state-space layers (Mamba) are"
REFUSED_DECODERS: dict[str, str] = {
    **dict.fromkeys(_names("qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text qwen3_next"), _DELTA),
    **dict.fromkeys(
        _names(
            "deepseek_v2 deepseek_v3 deepseek_v32 kimi_k2 mistral4 mistral_large4"
            " mistral_large4_text glm4_moe_lite glm_moe_dsa longcat_flash minicpm3 youtu hy_v4 axk1"
            " axk2 dots3_note dots3_note_text"
        ),
        _LATENT,
    ),
    **dict.fromkeys(
        _names(
            "qwen4_exp qwen4_exp_text glm5_next glm5_next_text kimi_linear olmo_hybrid"
            " bailing_hybrid"
        ),
        "its layers of linear attention are",
    ),
    **dict.fromkeys(
        _names(
            "qwen2_moe minimax granitemoe phimoe"
            " exaone_moe llama4 llama4_text dots1 ernie4_5_moe hunyuan_v1_moe"
        ),
        _EXPERTS,
    ),
    **dict.fromkeys(
        _names("gemma4 gemma4_text gemma4_unified gemma4_unified_text"),
        "its norm of values, shared keys and values, proportional rotary positions and layer"
        " scalars are",
    ),
    **dict.fromkeys(
        _names("gemma3n gemma3n_text"), "its per-layer inputs and alternating updates are"
    ),
    **dict.fromkeys(_names("gemma2"), "its softcap of attention scores is"),
    **dict.fromkeys(
        _names("mamba mamba2 jamba bamba falcon_h1 nemotron_h granitemoehybrid zamba2"), _MAMBA
    ),
}
"""Decoders that people ask for and that are not supported: what is missing for them."""
