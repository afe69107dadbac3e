"""Tiny random models with a tokenizer of their own, as folders: they answer in milliseconds; the
decoder never ends by itself.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from ingot.models.hf.models import HFModel
from ingot.models.hf.tensorfile import save_weights
from ingot.models.native.config import DecoderConfig
from ingot.models.native.decoder import Decoder
from ingot.models.parameters import init_weights
from ingot.tokenizers.bpe import train_bpe
from ingot.tokenizers.tokenizer import Tokenizer
from tests.models.generation.answers import generate
from tests.models.hf.tiny import common, drawn, varied, write
from tests.tokenizers.small import CHATML, bpe_files

TEXT = (
    "the quick brown fox jumps over the lazy dog while five wizards box quietly in the äußere"
    " Straße, naïvely \n"
)
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role }}: {{ message.content }}\n{%"
    " endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def make_folder(
    folder: Path, *, eos: list[int] | None = None, chat: bool = True, **overrides: Any
) -> Path:
    """Write the folder; `eos` None: no token ends an answer."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_bpe([TEXT * 20, TEXT.title() * 20], 320)
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": tokenizer.vocab_size,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "initializer_range": 0.3,
        **overrides,
    }
    model = Decoder(DecoderConfig.from_hf(config))
    init_weights(model, 5)
    save_weights({name: parameter.detach() for name, parameter in model.named_parameters()}, folder)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos or []}))
    tokenizer.save(folder)
    if chat:
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def changed_config(folder: Path, copy: Path, **changes: Any) -> Path:
    """A copy of a model folder, with other values in its config.json."""
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, **changes}))
    return copy


def make_summarizer(folder: Path, build: str = "t5-1.1") -> Path:
    """A random T5, or another of `SEQ2SEQ`, that reads sources behind `sum: `; some of its texts end, others never do."""
    tokenizer = train_bpe([TEXT * 20, TEXT.title() * 20], 320)
    model = varied(build, vocab_size=320, eos_token_id=1, pad_token_id=2, decoder_start_token_id=2)
    sources = [[0, *tokenizer.encode(f"sum: {word}"), 1] for word in TEXT.split()[:12]]
    ending = common(generate(model, sources, 60, eos=[2]))
    with torch.no_grad():  # what was that token is EOS from now on
        model.inner.lm_head.weight[[1, ending]] = model.inner.lm_head.weight[[ending, 1]]
    return _finish(model, folder, tokenizer, {"schema": 1, "prefix": "sum: "})


def make_classifier(folder: Path) -> Path:
    """A random RoBERTa for three labels and texts of up to 64 tokens."""
    tokenizer = train_bpe([TEXT * 20, TEXT.title() * 20], 320)
    return _finish(
        drawn("roberta", vocab_size=320, pad_token_id=2, max_position_embeddings=67),
        folder,
        tokenizer,
        {"schema": 1},
    )


def make_scorer(folder: Path) -> Path:
    """A random Llama that gives chats one score."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(0)
    tokenizer = Tokenizer(bpe_files(CHATML))
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = LlamaConfig(
        **sizes,
        vocab_size=tokenizer.vocab_size,
        num_attention_heads=4,
        max_position_embeddings=256,
        initializer_range=0.2,
        pad_token_id=tokenizer.special.pad,
        num_labels=1,
        id2label={0: "score"},
        label2id={"score": 0},
    )
    LlamaForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save(folder)
    return folder


def _finish(model: HFModel, folder: Path, tokenizer: Tokenizer, lineage: dict[str, Any]) -> Path:
    tokenizer.save(write(model, folder))
    (folder / "ingot.json").write_text(json.dumps(lineage))
    return folder
