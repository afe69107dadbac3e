"""Splits by hash, and documents as `prepare` dealt them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ingot.base.errors import WrongInput
from ingot.data.documents import Shares, chosen
from ingot.data.ingest import ingest
from ingot.data.texts import read_documents
from tests.data.small import recipe, sentences, write_jsonl


def test_shares_are_kept_and_nest() -> None:
    ids = [f"a.jsonl:{row}" for row in range(20_000)]
    tenth = {doc_id for doc_id in ids if chosen(doc_id, "validation", 0.1)}
    half = {doc_id for doc_id in ids if chosen(doc_id, "validation", 0.5)}
    assert abs(len(tenth) - 2000) < 200
    assert tenth < half, "a larger share keeps what a smaller one had"
    other = {doc_id for doc_id in ids if chosen(doc_id, "fraction", 0.1)}
    assert abs(len(tenth & other) - 200) < 70, "the choices are independent of each other"


def test_chosen_is_never_changed() -> None:
    """Held-out documents must stay held out in every later version."""
    assert [row for row in range(60) if chosen(f"a.jsonl:{row}", "validation", 0.1)] == [
        7,
        8,
        39,
        48,
        53,
        56,
        57,
    ]


def test_all_or_nothing() -> None:
    shares = Shares(None, 1.0)
    assert {shares.split("train", str(row)) for row in range(100)} == {"train"}
    assert {Shares(0.5, 1e-9).split("validation", str(row)) for row in range(100)} == {"validation"}
    assert {Shares(None, 1e-12).split("train", str(row)) for row in range(100)} == {None}


def test_documents_of_each_split(tmp_path: Path) -> None:
    small = recipe(tmp_path, write_jsonl(tmp_path / "a.jsonl", sentences(100)), data__fraction=0.5)
    ingest(small)
    train, held = (list(read_documents(small, split)) for split in ("train", "validation"))
    assert not {document.doc_id for document in train} & {document.doc_id for document in held}
    assert (10 < len(held) < 32, 25 < len(train) < 55) == (True, True)
    rows = [int(document.doc_id.rpartition(":")[2]) for document in train]
    assert rows == sorted(rows)
    assert all(
        document.text == sentences(1, row - 1)[0] for row, document in zip(rows, train, strict=True)
    )


def test_before_ingest(tmp_path: Path) -> None:
    with pytest.raises(
        WrongInput, match="no ingested documents; run `ingot ingest` with this recipe first"
    ):
        list(read_documents(recipe(tmp_path, "a.jsonl"), "train"))
