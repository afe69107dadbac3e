"""Trains a byte-level BPE tokenizer: every text can be encoded, and decoding gives exactly that
text back.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Reference

from ingot.base.errors import WrongInput
from ingot.tokenizers.tiktoken_backend import SPLIT
from ingot.tokenizers.tokenizer import Tokenizer

BOS, EOS, PAD = SPECIALS = ("<|begin_of_text|>", "<|end_of_text|>", "<|pad|>")
LEAST = 256 + len(SPECIALS)
# Part of the fingerprint of a trained tokenizer; change it when the same texts would give another
# vocabulary.
TRAINER = "byte-bpe-1"


def train_bpe(texts: Iterable[str], vocab_size: int, special: Sequence[str] = ()) -> Tokenizer:
    """Learn at most `vocab_size` tokens from `texts`, the 256 bytes, three special tokens and those
    in `special` included.

    The same texts give the same tokenizer, in any order. The vocabulary is smaller where no pair of
    tokens occurs twice.

    Raises:
        WrongInput: `vocab_size` has no room for the bytes.
    """
    if vocab_size < LEAST + len(special):
        raise WrongInput(
            f"tokenizer.vocab_size {vocab_size} is below {LEAST + len(special)}, the bytes and"
            " special tokens alone; raise it"
        )
    reference = Reference(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    reference.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    reference.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        show_progress=False,
        special_tokens=[
            AddedToken(text, special=True, normalized=False) for text in (*SPECIALS, *special)
        ],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    reference.train_from_iterator(texts, trainer)
    reference.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A {BOS}:1 $B:1",
        special_tokens=[(BOS, reference.token_to_id(BOS))],
    )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    files = {
        "tokenizer.json": reference.to_str(pretty=True),
        "tokenizer_config.json": json.dumps(config, indent=1) + "\n",
    }
    return Tokenizer(files, "the trained tokenizer")
