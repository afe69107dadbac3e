"""Small random models of transformers, one of each type that `ingot.models.hf.loading` supports."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ingot.models.hf.config import AUTO, HFConfig, read_hf_config
from ingot.models.hf.loading import hf_weights, init_hf_model
from ingot.models.hf.models import HFModel, Seq2Seq
from ingot.models.hf.tensorfile import save_weights

CPU = torch.device("cpu")
VOCAB = 61
LABELS = ("bad", "fair", "good")
_T5: dict[str, Any] = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
    "vocab_size": VOCAB,
    "initializer_factor": 1.0,
}
_BART: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "vocab_size": VOCAB,
    "init_std": 0.3,
}
_BERT: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 66,
    "vocab_size": VOCAB,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
SEQ2SEQ: dict[str, dict[str, Any]] = {
    "t5": {"model_type": "t5", **_T5},
    "t5-1.1": {
        "model_type": "t5",
        **_T5,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
    },
    "mt5": {
        "model_type": "mt5",
        **_T5,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
    },
    "bart": {"model_type": "bart", **_BART},
    "marian": {
        "model_type": "marian",
        **_BART,
        "pad_token_id": VOCAB - 1,
        "eos_token_id": 0,
        "decoder_start_token_id": VOCAB - 1,
        "scale_embedding": True,
    },
    "bart-untied": {"model_type": "bart", **_BART, "tie_word_embeddings": False},
    "marian-two": {"model_type": "marian", **_BART, "share_encoder_decoder_embeddings": False},
    "pegasus": {
        "model_type": "pegasus",
        **_BART,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "decoder_start_token_id": 0,
        "scale_embedding": True,
    },
}
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {"model_type": "bert", **_BERT},
    "roberta": {"model_type": "roberta", **_BERT, "pad_token_id": 1},
    "xlm-roberta": {"model_type": "xlm-roberta", **_BERT, "pad_token_id": 1},
    "camembert": {"model_type": "camembert", **_BERT, "pad_token_id": 1},
    "distilbert": {
        "model_type": "distilbert",
        "dim": 32,
        "hidden_dim": 48,
        "n_layers": 2,
        "n_heads": 4,
        "max_position_embeddings": 66,
        "vocab_size": VOCAB,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "seq_classif_dropout": 0.0,
        "initializer_range": 0.3,
        "pad_token_id": 0,
    },
    "electra": {"model_type": "electra", **_BERT, "embedding_size": 16},
    "deberta-v2": {
        "model_type": "deberta-v2",
        **_BERT,
        "relative_attention": True,
        "position_biased_input": False,
        "pos_att_type": ["p2c", "c2p"],
        "position_buckets": 8,
        "max_relative_positions": 16,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "pooler_hidden_size": 32,
        "pooler_dropout": 0.0,
        "type_vocab_size": 0,
    },
    "modernbert": {
        "model_type": "modernbert",
        **_BERT,
        "local_attention": 8,
        "initializer_range": 0.05,
        "pad_token_id": 0,
        "bos_token_id": 2,
        "eos_token_id": 3,
        "cls_token_id": 2,
        "sep_token_id": 3,
    },
    "mpnet": {"model_type": "mpnet", **_BERT, "pad_token_id": 1},
}
ALL = {**SEQ2SEQ, **ENCODERS}
WHOLE = ("t5-1.1", "bart", "bert", "roberta", "modernbert")
"""One model of each build (relative, learned, shifted and rotary positions): these are tried in
full without `-m slow`, the others by their logits and by writing and reading them.
"""


def in_short(names: Iterable[str]) -> list[Any]:
    """Names of models as parameters of a test; all but those of `WHOLE` are slow."""
    return [pytest.param(name, marks=[pytest.mark.slow] * (name not in WHOLE)) for name in names]


def config(name: str, **overrides: Any) -> HFConfig:
    values = {**ALL[name], **overrides}
    return (
        read_hf_config(values, "encoder", name, LABELS)
        if name in ENCODERS
        else read_hf_config(values, "seq2seq", name)
    )


def drawn(name: str, seed: int = 3, **overrides: Any) -> HFModel:
    """In evaluation mode; biases and norms are drawn, too, and tied heads of T5 1.1 differ, so that
    no part can be left out unseen.
    """
    model = init_hf_model(config(name, **overrides), seed, CPU)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
        if model.config.own_head:
            model.inner.lm_head.weight.copy_(
                0.3 * torch.randn(model.inner.lm_head.weight.shape, generator=generator)
            )
        bias = getattr(model.inner, "final_logits_bias", None)
        if bias is not None:
            bias.copy_(torch.randn(bias.shape, generator=generator))
    return model.eval()


def varied(name: str, **overrides: Any) -> Seq2Seq:
    """One whose answers vary: every place of the output depends on the source and on what was
    written before.
    """
    made = drawn(name, **overrides)
    assert isinstance(made, Seq2Seq)
    with torch.no_grad():
        for key, parameter in made.named_parameters():
            if (
                parameter.requires_grad
                and parameter.ndim == 2
                and "shared" not in key
                and "lm_head" not in key
            ):
                parameter.mul_(2.0)
        if getattr(made.inner, "final_logits_bias", None) is not None:
            made.inner.final_logits_bias.zero_()
    return made


def common(texts: Sequence[Sequence[int]]) -> int:
    """A token that some texts hold, neither all nor at their beginning: good to end them."""
    counts = {
        token: sum(token in text[2:] and token not in text[:2] for text in texts)
        for text in texts
        for token in text
    }
    return min(
        (token for token in counts if counts[token] > 0),
        key=lambda token: abs(counts[token] - len(texts) / 2),
    )


def write(model: HFModel, folder: Path) -> Path:
    """As an export writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    save_weights(dict(hf_weights(model)), folder)
    (folder / "config.json").write_text(json.dumps(model.config.to_hf()))
    return folder


def reference(model: HFModel, folder: Path, **more: Any) -> nn.Module:
    """The same model as transformers opens it."""
    import transformers

    auto = getattr(transformers, AUTO[model.config.kind])
    opened, info = auto.from_pretrained(write(model, folder), output_loading_info=True, **more)
    assert not info["missing_keys"], info
    assert not info["unexpected_keys"], info
    assert not info["mismatched_keys"], info
    made: nn.Module = opened.eval()
    return made
