"""Trains a byte-level BPE tokenizer: every text can be encoded, and decoding gives exactly that
text back.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Reference

from ingot.base.errors import WrongInput
from ingot.base.interruptible import interruptible
from ingot.tokenizers.tiktoken_backend import SPLIT
from ingot.tokenizers.tokenizer import Tokenizer

BOS, EOS, PAD = SPECIALS = ("<|begin_of_text|>", "<|end_of_text|>", "<|pad|>")
MASK = "<|mask|>"
SENTINELS = tuple(f"<extra_id_{number}>" for number in range(100))
"""As many as T5 has."""
LEAST = 256 + len(SPECIALS)
# Part of the fingerprint of a trained tokenizer; change it when the same texts would give another
# vocabulary.
TRAINER = "byte-bpe-2"
# Words are cut to this many characters while a vocabulary is learnt: the trainer takes time by the
# square of a word's length, and a sequence of bases or a line of blanks is one word.
LONGEST_WORD = 1024


def train_bpe(
    texts: Iterable[str],
    vocab_size: int,
    special: Sequence[str] = (),
    *,
    masks: bool = False,
    spans: bool = False,
    ends: bool = False,
) -> Tokenizer:
    """Learn at most `vocab_size` tokens from `texts`, the 256 bytes, three special tokens and those
    in `special` included; with `masks` also one that hides tokens from a masked language model, and
    texts are framed at both ends, as such models read them; with `spans` the sentinels of hidden
    spans, and texts are framed at their end alone, as T5 reads them; with `ends` they have an EOS
    behind them, which some classifiers are read at.

    The same texts give the same tokenizer, in any order. The vocabulary is smaller where no pair of
    tokens occurs twice.

    Raises:
        WrongInput: `vocab_size` has no room for the bytes.
    """
    own = [MASK] if masks else SENTINELS if spans else []
    special = [*special, *own]
    if vocab_size < LEAST + len(special):
        raise WrongInput(
            f"tokenizer.vocab_size {vocab_size} is below {LEAST + len(special)}, the bytes and"
            " special tokens alone; raise it"
        )
    reference = _learnt(texts, vocab_size, special)
    reference.post_processor = _frame(
        reference, begin="" if spans else BOS, end=EOS if masks or spans or ends else ""
    )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        **({"mask_token": MASK} if masks else {}),
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    files = {
        "tokenizer.json": reference.to_str(pretty=True),
        "tokenizer_config.json": json.dumps(config, indent=1) + "\n",
    }
    return Tokenizer(files, "the trained tokenizer")


def _learnt(texts: Iterable[str], vocab_size: int, special: Sequence[str]) -> Reference:
    """The vocabulary, and how texts are split into words for it."""
    reference = Reference(models.BPE())
    bounded = SPLIT.replace("*", f"{{0,{LONGEST_WORD}}}").replace("+", f"{{1,{LONGEST_WORD}}}")
    reference.pre_tokenizer = _words(bounded)
    reference.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        show_progress=False,
        special_tokens=[
            # What stands for hidden text takes the space before it, which belongs to that text.
            AddedToken(text, special=True, normalized=False, lstrip=text in (MASK, *SENTINELS))
            for text in (*SPECIALS, *special)
        ],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    interruptible(lambda: reference.train_from_iterator(texts, trainer))
    reference.pre_tokenizer = _words(SPLIT)
    return reference


def _frame(reference: Reference, *, begin: str, end: str) -> processors.PostProcessor:
    """What puts special tokens before and behind each text, empty ones left out; the second text of
    a pair is of type 1 with them.
    """
    first = " ".join(filter(None, (begin, "$A", end)))
    second = " ".join(f"{part}:1" for part in (begin, "$B", end) if part)
    return processors.TemplateProcessing(
        single=first,
        pair=f"{first} {second}",
        special_tokens=[(token, reference.token_to_id(token)) for token in (BOS, EOS)],
    )


def _words(pattern: str) -> pre_tokenizers.PreTokenizer:
    """What cuts a text into the words that `pattern` finds, as characters that stand for bytes."""
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, byte_level])
