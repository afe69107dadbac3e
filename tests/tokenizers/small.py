"""Small tokenizers of our own, as Hugging Face files."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from ingot.tokenizers.bpe import train_bpe
from ingot.tokenizers.load import load_tokenizer
from ingot.tokenizers.tokenizer import Tokenizer as Ours

TEXTS = [
    "The furnace melts copper, and the copper rings.",
    "def melt(ingot):\n    return ingot * 2\n",
    "für naïve 金属 🔥",
] * 4
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] |"
    " trim + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{"
    " '<|im_start|>assistant\n' }}{% endif %}"
)


@functools.cache
def real_tokenizer(folder: Path) -> Ours:
    """A tokenizer of the test data, read once for all tests."""
    return load_tokenizer(folder)


@functools.cache
def transformers_tokenizer(folder: Path) -> Any:
    """The same by transformers; not to be changed."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def bpe_files(template: str | None = None, **config: Any) -> dict[str, str]:
    """Files of a trained tokenizer with two more special tokens; `config` overrides its
    tokenizer_config.json.
    """
    files = dict(train_bpe(TEXTS, 300).files)
    reference = Tokenizer.from_str(files["tokenizer.json"])
    reference.add_special_tokens(
        [
            AddedToken(text, special=True, normalized=False)
            for text in ("<|im_start|>", "<|im_end|>")
        ]
    )
    files["tokenizer.json"] = reference.to_str()
    files["tokenizer_config.json"] = json.dumps(
        {**json.loads(files["tokenizer_config.json"]), **config}
    )
    if template is not None:
        files["chat_template.jinja"] = template
    return files


def chatty(template: str = CHATML) -> Ours:
    return Ours(bpe_files(template))


def unigram_files() -> dict[str, str]:
    """A tokenizer as SentencePiece makes them: special tokens are pieces of the vocabulary as
    well.
    """
    pieces = [
        ("<pad>", 0.0),
        ("</s>", 0.0),
        ("<unk>", 0.0),
        ("▁", -2.0),
        *((character, -3.0) for character in "abcdefghijklmnopqrstuvwxyz<>/"),
    ]
    reference = Tokenizer(models.Unigram(pieces, unk_id=2, byte_fallback=False))
    reference.pre_tokenizer = pre_tokenizers.Metaspace()
    reference.decoder = decoders.Metaspace()
    reference.add_special_tokens(["<pad>", "</s>", "<unk>"])
    reference.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    config = {
        "eos_token": "</s>",
        "pad_token": {"content": "<pad>", "lstrip": False},
        "unk_token": "<unk>",
    }
    return {"tokenizer.json": reference.to_str(), "tokenizer_config.json": json.dumps(config)}
