"""The data benchmarks still run: one small turn of every contender."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import data


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    root = tmp_path_factory.mktemp("bench")
    data.write_tokenizer(root / "tokenizer", 0.2, 400)
    return str(root), str(data.write_corpus(root / "corpus.jsonl", 3))


def test_every_contender_does_the_whole_corpus(place: tuple[str, str]) -> None:
    contenders = (data.to_columns, data.only_prepare, data.gigatoken_files, data.tokenizers_batches)
    units = {make(*place)().units for make in contenders}
    assert len(units) == 1
    assert 3 <= units.pop() < 4


def test_cleaning_contenders(place: tuple[str, str]) -> None:
    for knobs in ({"data.clean.exact": True}, {"data.clean.fuzzy": {}}):
        assert data.cleaning(*place, knobs)().units == data.plain_folding(place[1])().units


def test_no_document_comes_twice(tmp_path: Path) -> None:
    lines = data.write_corpus(tmp_path / "corpus.jsonl", 3).read_text().splitlines()
    assert len(set(lines)) == len(lines)
