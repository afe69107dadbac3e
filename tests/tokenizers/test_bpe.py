"""A trained vocabulary gives any text back, is the same every time, and opens in transformers."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.base.errors import WrongInput
from ingot.tokenizers.bpe import BOS, EOS, LONGEST_WORD, PAD, train_bpe
from ingot.tokenizers.load import load_tokenizer
from ingot.tokenizers.tiktoken_backend import SPLIT
from tests.tokenizers.small import TEXTS

TRAINED = train_bpe(TEXTS, 320)


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=80))
def test_any_text_comes_back(text: str) -> None:
    assert TRAINED.decode(TRAINED.encode(text), skip_special=False) == text


def test_every_character_comes_back() -> None:
    text = (
        "".join(chr(code) for code in range(0x11000) if not 0xD800 <= code < 0xE000)
        + "🔥 \x00\r\n\t  \n"
    )
    assert TRAINED.decode(TRAINED.encode(text)) == text


def test_text_never_becomes_a_special_token() -> None:
    text = f"a{BOS}b{EOS} {PAD}{EOS}"
    assert not {0, 1, 2} & set(TRAINED.encode(text))
    assert TRAINED.decode(TRAINED.encode(text)) == text


def test_documents_are_framed() -> None:
    assert (TRAINED.special.bos, TRAINED.special.eos, TRAINED.special.pad, TRAINED.adds_bos) == (
        0,
        1,
        2,
        True,
    )
    assert TRAINED.encode_document("copper") == [0, *TRAINED.encode("copper"), 1]
    assert TRAINED.encode_prompt("copper") == [0, *TRAINED.encode("copper")]


def test_merges_are_learnt() -> None:
    assert TRAINED.vocab_size == 320
    assert len(TRAINED.encode(" copper")) < len(" copper")


def test_the_order_of_texts_does_not_matter() -> None:
    texts = [
        f"{word} {number} melts" for number in range(50) for word in ("ingot", "copper", "mould")
    ]
    shuffled = random.Random(1).sample(texts, len(texts))
    assert train_bpe(texts, 300).identity() == train_bpe(shuffled, 300).identity()


def test_other_texts_give_another_identity() -> None:
    assert train_bpe(["melts melts ingots"] * 3, 300).identity() != TRAINED.identity()


def test_words_without_end_are_cut_where_a_vocabulary_is_learnt() -> None:
    # The trainer's time grows with the square of a word: a megabyte of blanks took ten minutes.
    texts = ["A" * 20_000, " " * 20_000, "=" * 20_000, "copper melts " * 50]
    learnt = train_bpe(texts, 400)
    assert learnt.longest_token == LONGEST_WORD
    splits = json.loads(learnt.files["tokenizer.json"])["pre_tokenizer"]["pretokenizers"]
    assert splits[0]["pattern"]["Regex"] == SPLIT


def test_too_little_text_gives_fewer_tokens() -> None:
    assert train_bpe(["ab ab"], 4096).vocab_size < 270


def test_no_room_for_the_bytes() -> None:
    with pytest.raises(WrongInput, match="vocab_size 200 is below 259"):
        train_bpe(TEXTS, 200)


def test_transformers_opens_it(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    TRAINED.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in (*TEXTS, " \n\n  x", "12345 6"):
        assert theirs(text)["input_ids"] == TRAINED.encode_prompt(text)
        assert theirs.decode(TRAINED.encode(text)) == text
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id, len(theirs)) == (
        0,
        1,
        2,
        320,
    )
    assert load_tokenizer(tmp_path).identity() == TRAINED.identity()
