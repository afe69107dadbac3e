"""The vectorised records are those of `encode_document`, one by one."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.base.errors import WrongInput
from ingot.config.sections.data import COLUMNS
from ingot.config.sections.objective import Documents
from ingot.data.columns.column import ColumnWriter
from ingot.data.documents.kinds import DocumentExtractor
from ingot.data.documents.records import ParsedDocument
from ingot.data.raw.ranges import RawRange
from ingot.data.splits import Shares
from ingot.data.tokenizing.encode import (
    RECORDS,
    TokenRecords,
    _framed,
    encode_documents,
    encode_records,
    existing_records,
    identity,
)
from ingot.tokenizers.chats.templates import find_template
from ingot.tokenizers.tokenizer import Tokenizer
from tests.data.test_prepare_examples import records
from tests.exhaustive import examples
from tests.tokenizers.small import bpe_files, chatty, unigram_files

TOKENIZERS = {
    "bos and eos": Tokenizer(bpe_files()),
    "eos": Tokenizer(bpe_files(add_bos_token=False)),
    "bos": Tokenizer(bpe_files(eos_token=None)),
    "neither": Tokenizer(bpe_files(add_bos_token=False, eos_token=None)),
    "unigram": Tokenizer(unigram_files()),
}


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=examples(25, 50), deadline=None)
@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=20), max_size=6))
def test_each_document_alone(name: str, texts: list[str]) -> None:
    tokenizer = TOKENIZERS[name]
    flat, lengths = encode_documents(tokenizer, texts)
    assert [record.tolist() for record in np.split(flat, np.cumsum(lengths)[:-1])][
        : len(texts)
    ] == [tokenizer.encode_document(text) for text in texts]
    assert len(flat) == lengths.sum()
    flat, lengths = _framed(tokenizer.encode_batch, texts, *tokenizer.frame)
    assert [record.tolist() for record in np.split(flat, np.cumsum(lengths)[:-1])][
        : len(texts)
    ] == [tokenizer.encode_framed(text) for text in texts]


@pytest.mark.parametrize("kind", ["preference", "pair", "labelled"])
def test_records_together_are_records_alone(kind: Documents) -> None:
    tokenizer, extractor = chatty(), DocumentExtractor(documents=kind, labels=["odd", "even"])
    found = [extractor.extract(row, record) for row, record in enumerate(records(kind, 9), 1)]
    texts = [item.text for item in found if isinstance(item, ParsedDocument)]
    together = encode_records(kind, tokenizer, tokenizer.encode_batch, texts, "p: ")
    alone = [
        encode_records(kind, tokenizer, tokenizer.encode_batch, [text], "p: ") for text in texts
    ]
    assert len(texts) == 9
    assert tuple(together.columns) == tuple(together.lengths) == COLUMNS[kind]
    for number, one in enumerate(alone):
        assert {name: column.tolist() for name, column in together.record(number).items()} == {
            name: column.tolist() for name, column in one.columns.items()
        }
    assert (together.bytes, together.digest) == (
        sum(one.bytes for one in alone),
        sum(one.digest for one in alone),
    )
    assert (
        together.tokens
        == sum(one.tokens for one in alone)
        == sum(len(together.columns[name]) for name in COLUMNS[kind] if name in ids_of(kind))
    )
    empty = encode_records(kind, tokenizer, tokenizer.encode_batch, [])
    assert all(not len(column) for column in empty.columns.values())


def ids_of(kind: Documents) -> set[str]:
    return {
        "preference": {"chosen", "rejected"},
        "pair": {"source", "target"},
        "labelled": {"tokens"},
    }[kind]


ASKED, SAID, OTHER = (
    {"role": role, "content": content}
    for role, content in (("user", "a"), ("assistant", "b"), ("assistant", "c d"))
)


@pytest.mark.parametrize(
    ("kind", "answers", "names"),
    [
        ("preference", {"chosen": [SAID], "rejected": [OTHER]}, ("chosen", "rejected")),
        ("rated", {"completion": [SAID], "label": 1}, ("answer",)),
    ],
)
def test_earlier_answers_in_a_prompt_are_not_trained(
    kind: Documents, answers: dict[str, object], names: tuple[str, ...]
) -> None:
    tokenizer, prompt = chatty(), [ASKED, SAID, ASKED]
    item = DocumentExtractor(documents=kind).extract(1, {"prompt": prompt, **answers})
    assert isinstance(item, ParsedDocument)
    found = encode_records(kind, tokenizer, tokenizer.encode_batch, [item.text])
    for name in names:
        trained = np.flatnonzero(found.columns[f"{name}_mask"])
        assert trained[0] == len(tokenizer.encode_chat(prompt))


def test_what_decides_about_records() -> None:
    tokenizer = chatty()
    assert identity("pair", tokenizer, "a") != identity("pair", tokenizer, "b")
    assert (
        identity("chat", tokenizer, "a")
        == identity("chat", tokenizer, "b")
        == {
            "version": RECORDS,
            "documents": "chat",
            "whole": False,
            "tokenizer": tokenizer.identity(),
        }
    )
    other = Tokenizer(TOKENIZERS["unigram"].files)
    assert identity("labelled", other)["frame"] == ([], [1])


def test_chats_that_are_rendered_one_by_one_are_counted() -> None:
    """All but those of a shape that is known, in which nothing looks like a special token."""
    said = ["yes", "no", "<|im_end|>", "perhaps"]
    chats = [
        json.dumps({"messages": [{"role": "user", "content": "a"}, answer]})
        for answer in [{"role": "assistant", "content": text} for text in said] * 5
    ]
    tokenizer = chatty()
    found = encode_records("chat", tokenizer, tokenizer.encode_batch, chats)
    again = encode_records("chat", tokenizer, tokenizer.encode_batch, chats)
    assert len(found.counts) == 20
    assert 5 <= found.rendered <= 6, "the first of a shape may be, too"
    assert again.rendered == 5


def test_bytes_are_those_of_all_that_an_answer_writes() -> None:
    """Bits per byte would be far too many where thoughts and calls counted for nothing."""
    tokenizer = chatty(find_template("hermes"))
    asked = {"role": "user", "content": "q?"}
    call = {"type": "function", "function": {"name": "f", "arguments": {"n": "é"}}}
    answers: list[dict[str, object]] = [
        {"role": "assistant", "content": "é"},
        {"role": "assistant", "content": "é", "reasoning_content": "hm"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "assistant", "content": "é", "weight": 0},
    ]
    texts = [json.dumps({"messages": [asked, answer]}) for answer in answers]
    sizes = [
        encode_records("chat", tokenizer, tokenizer.encode_batch, [text]).bytes for text in texts
    ]
    assert sizes == [2, 4, len('{"name":"f","arguments":{"n":"é"}}'.encode()), 0]


def test_a_chat_of_which_an_answer_is_not_trained_is_another_set_and_one_prompt() -> None:
    tokenizer = chatty(find_template("chatml"))
    turns: list[dict[str, object]] = [
        {"role": "user", "content": "one?"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "two?"},
        {"role": "assistant", "content": "two"},
    ]

    def records(messages: list[dict[str, object]], *, whole: bool = False) -> TokenRecords:
        text = json.dumps({"messages": messages})
        return encode_records("chat", tokenizer, tokenizer.encode_batch, [text], whole=whole)

    marked = [*turns[:3], {**turns[3], "weight": 0}]
    plain = records(marked)
    assert plain.digest != hashed(marked), "loss is measured on fewer answers"
    assert records(turns).digest == hashed(turns)
    asked, alone = records(marked, whole=True), records(turns[:2], whole=True)
    assert [asked.columns[name].tolist() for name in asked.columns] == [
        alone.columns[name].tolist() for name in alone.columns
    ]


def hashed(messages: list[dict[str, object]]) -> int:
    text = json.dumps({"messages": messages})
    return int.from_bytes(hashlib.sha256(text.encode()).digest())


@pytest.mark.parametrize("beyond", [2**32 + 7, -(2**32) + 7, 2**31, -1])
def test_ids_of_another_tokenizer_are_refused_however_wide_they_are(
    tmp_path: Path, beyond: int
) -> None:
    """Cut to 32 bits, some of them would be ids of this one."""
    path, tokenizer = tmp_path / "old", TOKENIZERS["eos"]
    with ColumnWriter(path, np.dtype(np.int64)) as writer:
        for last in (8, beyond):
            writer.append(np.array([7, last]), np.array([2]))

    def of(documents: int) -> list[list[int]]:
        task = RawRange("train", 0, 0, "tokens", str(path), "", 0, 1, 0, 0, documents, 0)
        found = existing_records(task, Shares(None, 1.0), tokenizer, Counter())
        return [records.columns["tokens"].tolist() for _, records in found]

    assert of(1) == [[7, 8]]
    with pytest.raises(WrongInput, match=rf"document old:2 has the id {beyond:,}, the tokenizer"):
        of(2)
