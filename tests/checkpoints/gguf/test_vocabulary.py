"""Which tokenizers llama.cpp has a name for, and which are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ingot.base.errors import WrongInput
from ingot.checkpoints.gguf.vocabulary import _GPT4O, _QWEN, _TEKKEN, vocabulary_of
from ingot.tokenizers.tiktoken_backend import SPLIT
from ingot.tokenizers.tokenizer import Tokenizer
from tests.checkpoints.gguf.small import UNUSED_IDS, tokenizer
from tests.tokenizers.models import pieces_file, ranks_file

BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def changed(pre: Any = None, normalizer: Any = None, **model: Any) -> Tokenizer:
    """The trained tokenizer with another pre-tokenizer, normalizer or model."""
    files = dict(tokenizer().files)
    state = json.loads(files["tokenizer.json"])
    state["pre_tokenizer"] = pre or state["pre_tokenizer"]
    state["normalizer"] = normalizer
    state["model"] |= model
    return Tokenizer({**files, "tokenizer.json": json.dumps(state)})


def by(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def split(expression: str, behavior: str = "Isolated") -> dict[str, Any]:
    pattern = {"Regex": expression}
    first = {"type": "Split", "pattern": pattern, "behavior": behavior, "invert": False}
    return by(first, {**BYTES, "use_regex": False})


def digits(individual: bool) -> dict[str, Any]:
    return by({"type": "Digits", "individual_digits": individual}, BYTES)


@pytest.mark.parametrize(
    ("pre", "whole", "name"),
    [
        (BYTES, False, "gpt-2"),
        (digits(individual=True), False, "smollm"),
        (split(SPLIT), True, "llama-bpe"),
        (split(SPLIT), False, "dbrx"),
        (split(_QWEN), False, "qwen2"),
        (split(_TEKKEN), True, "tekken"),
        (split(_GPT4O), False, "gpt-4o"),
    ],
)
def test_names_of_ways_to_split(pre: dict[str, Any], whole: bool, name: str) -> None:
    made = vocabulary_of(changed(pre, ignore_merges=whole), 403)
    assert (made.model, made.pre) == ("gpt2", name)
    assert made.tokens[-3:] == [f"[PAD{index}]" for index in range(len(made.tokens) - 3, 403)]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"pre": split(r"\w+|\W+")}, r"it splits by '\\\\w\+"),
        ({"pre": split(SPLIT, "Removed")}, "it splits by"),
        ({"pre": digits(individual=False)}, r"pre-tokenizer is Digits\+ByteLevel"),
        ({"pre": BYTES, "ignore_merges": True}, "pre-tokenizer is ByteLevel"),
        ({"pre": {**BYTES, "add_prefix_space": True}}, "pre-tokenizer is ByteLevel"),
        ({"normalizer": {"type": "Lowercase"}}, "normalizer is Lowercase"),
    ],
)
def test_another_way_is_refused_by_name(given: dict[str, Any], says: str) -> None:
    with pytest.raises(WrongInput, match=says) as error:
        vocabulary_of(changed(**given), 403)
    assert "llama.cpp does not know this tokenizer's way of splitting texts" in str(error.value)


def test_sentencepiece_has_scores_in_place_of_merges() -> None:
    made = vocabulary_of(Tokenizer({"tokenizer.model": pieces_file("bpe")}), 350)
    assert (made.model, made.pre, made.space_before) == ("llama", "default", True)
    assert made.tokens[:3] == ["<unk>", "<s>", "</s>"]
    assert made.kinds[:4] == [2, 3, 3, 6]
    assert made.kinds[-1] == 5
    assert made.scores[300] < 0
    assert not made.merges
    for refused in (pieces_file("unigram"), ranks_file()):
        with pytest.raises(WrongInput, match="does not know this tokenizer's way"):
            vocabulary_of(Tokenizer({"tokenizer.model": refused}), 600)


def test_what_is_no_piece_is_bytes_there() -> None:
    """Where these are not in the vocabulary, llama.cpp ends."""
    given = pieces_file("bpe", byte_fallback=False, vocab_size=120)
    with pytest.raises(WrongInput, match="it lacks pieces for single bytes"):
        vocabulary_of(Tokenizer({"tokenizer.model": given}), 120)


def configured(template: str | None = None, *without: str, **added: bool) -> Tokenizer:
    """The trained tokenizer with a chat template, without tokens that its configuration names, and
    with what is said of its added tokens.
    """
    files = dict(tokenizer().files)
    config = json.loads(files["tokenizer_config.json"]) | {"chat_template": template}
    state = json.loads(files["tokenizer.json"])
    for one in state["added_tokens"]:
        one.update(added)
    files["tokenizer.json"] = json.dumps(state)
    kept = {name: value for name, value in config.items() if name not in without}
    return Tokenizer({**files, "tokenizer_config.json": json.dumps(kept)})


TURNS = (
    "{% for m in messages %}<|begin_of_text|>{{ m.role }}\n{{ m.content }}<|pad|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|begin_of_text|>assistant\n{% endif %}"
)


def test_a_model_without_eos_does_not_end_at_an_ordinary_token() -> None:
    """llama.cpp takes its id 11, or 2 of SentencePiece, where a file names none."""
    size = tokenizer().vocab_size
    pad = tokenizer().special.pad

    def end(given: Tokenizer, unused: int = UNUSED_IDS) -> int:
        return vocabulary_of(given, size + unused).special["eos_token_id"]

    assert end(configured()) == tokenizer().special.eos
    assert end(configured(None, "eos_token")) == pad
    assert end(configured(None, "eos_token", "pad_token")) == size
    turn = configured(TURNS.replace("<|pad|>", "<|end_of_text|>"), "eos_token", "pad_token")
    assert end(turn, 0) == tokenizer().special_ids["<|end_of_text|>"]
    with pytest.raises(WrongInput, match="has neither EOS nor padding"):
        end(configured(None, "eos_token", "pad_token"), 0)


@pytest.mark.parametrize("flag", ["lstrip", "rstrip"])
def test_tokens_that_absorb_blanks_of_the_template_are_refused(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    vocabulary_of(configured(TURNS), 400)
    assert "absorb" not in capsys.readouterr().err
    turns = TURNS.replace("\n<|", "|") if flag == "rstrip" else TURNS.replace("|>\n", "|> \n")
    with pytest.raises(WrongInput, match="absorb blanks or stand for words, and chats would have"):
        vocabulary_of(configured(turns, **{flag: True}), 400)
    tight = TURNS.replace("<|pad|>\n", "<|pad|>")
    for template in (tight, None):
        vocabulary_of(configured(template, **{flag: True}), 400)
        assert "which llama.cpp does not know: beside them its ids may be others" in (
            capsys.readouterr().err
        )


def test_a_bos_that_the_template_does_not_write_is_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    vocabulary_of(configured(TURNS), 400)
    vocabulary_of(configured(None), 400)
    assert "before each chat" not in capsys.readouterr().err
    vocabulary_of(configured("{{ messages[-1].content }}"), 400)
    assert "llama.cpp puts <|begin_of_text|> before each chat" in capsys.readouterr().err
