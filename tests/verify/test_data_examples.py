"""`verify data` and `verify tokenizer` on preferences, pairs and labelled texts: whole ones hold,
and each planted fault has its name.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.base.markers import entry_of, read_marker, write_marker
from ingot.config.recipe import Recipe
from ingot.data.columns.column import Column, ColumnWriter, column_prefix
from ingot.data.ingest import ingest
from ingot.data.prepare import prepare
from ingot.tokenizers.tokenizer import Tokenizer
from ingot.verify.data import verify_data
from ingot.verify.tokenizer import verify_tokenizer
from tests.data.test_prepare_examples import KNOBS, of
from tests.tokenizers.test_frame import framed_files
from tests.verify.test_data import failed

Values = list[list[int]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of all three kinds."""
    root = tmp_path_factory.mktemp("verify")
    for kind in KNOBS:
        made = asked(kind, root)
        ingest(made)
        prepare(made)
    return root


def asked(kind: str, root: Path, runs: Path | None = None) -> Recipe:
    return of(kind, root, name=kind, output=str(runs or root / "runs"))


@pytest.mark.parametrize(
    ("kind", "checks"),
    [
        (
            "preference",
            {
                "columns: masks": True,
                "columns: end of each record": None,
                "rows: none, 96 tokens": True,
            },
        ),
        (
            "rated",
            {"columns: masks": True, "columns: labels": True, "rows: none, 96 tokens": True},
        ),
        (
            "pair",
            {"columns: end of each record": True, "rows: none, 96 tokens, targets of 12": True},
        ),
        (
            "labelled",
            {
                "columns: labels": True,
                "columns: end of each record": True,
                "rows: none, 96 tokens": True,
            },
        ),
    ],
)
def test_whole_data_hold(whole: Path, kind: str, checks: dict[str, bool | None]) -> None:
    proof = verify_data(asked(kind, whole))
    assert not failed(proof)
    found = {check.what: check.passed for check in proof.checks}
    assert {what: found[what] for what in checks} == checks


def rewritten(
    folder: Path, name: str, marker: str, dtype: str, change: Callable[[Values], None]
) -> None:
    """Part 0 of a training column with other elements in it, hashed after that."""
    prefix = column_prefix(folder, "train", name, 0)
    column = Column(prefix)
    values = [column[number].tolist() for number in range(len(column))]
    change(values)
    with ColumnWriter(prefix, np.dtype(dtype)) as writer:
        writer.append(
            np.array([value for record in values for value in record], np.int64),
            np.array([len(record) for record in values]),
        )
    about: dict[str, Any] = dict(read_marker(folder, marker) or {})
    files = [entry_of(folder, entry["path"]) for entry in about.pop("files")]
    write_marker(
        folder, marker, {key: value for key, value in about.items() if key != "schema"}, files
    )


def put(record: int, place: int, value: int) -> Callable[[Values], None]:
    return lambda values: values[record].__setitem__(place, value)


def longer(values: Values) -> None:
    values[0].append(values[1].pop(0))


def two_labels(values: Values) -> None:
    values[0].append(0)
    values[1].pop()


@pytest.mark.parametrize(
    ("kind", "name", "dtype", "change", "what", "detail"),
    [
        (
            "preference",
            "rejected",
            "uint16",
            put(0, 1, 60_000),
            "columns: ids",
            "train.rejected-00000.bin has 1 elements that are not below ",
        ),
        (
            "preference",
            "chosen_mask",
            "uint8",
            put(0, 1, 2),
            "columns: masks",
            "train.chosen_mask-00000.bin has 1 elements that are not below 2",
        ),
        (
            "preference",
            "rejected_mask",
            "uint8",
            longer,
            "columns: masks",
            "rejected_mask-00000.bin has records of other lengths than train.rejected-00000.bin",
        ),
        (
            "preference",
            "rejected",
            "uint16",
            lambda values: values.pop(),
            "columns: counts",
            "train.rejected-00000.bin has ",
        ),
        (
            "pair",
            "target",
            "uint16",
            put(3, -1, 5),
            "columns: end of each record",
            "train.target-00000.bin has 1 records that do not end with token 1",
        ),
        (
            "pair",
            "source",
            "uint16",
            put(0, 1, 280),
            "columns: ids",
            "train.source-00000.bin has 1 elements that are not below 280",
        ),
        (
            "labelled",
            "label",
            "int32",
            put(0, 0, 2),
            "columns: labels",
            "train.label-00000.bin has 1 elements that are not below 2",
        ),
        (
            "labelled",
            "label",
            "int32",
            put(0, 0, -1),
            "columns: labels",
            "train.label-00000.bin has 1 elements that are not below 2",
        ),
        (
            "labelled",
            "label",
            "int32",
            two_labels,
            "columns: labels",
            "train.label-00000.bin has 2 records that are not one label",
        ),
    ],
)
def test_content_that_no_checksum_catches(
    whole: Path,
    tmp_path: Path,
    kind: str,
    name: str,
    dtype: str,
    change: Callable[[Values], None],
    what: str,
    detail: str,
) -> None:
    shutil.copytree(whole / "runs" / kind, tmp_path / kind)
    rewritten(tmp_path / kind / "data/columns", name, "manifest.json", dtype, change)
    found = failed(verify_data(asked(kind, whole, tmp_path)))
    assert detail in found[what]


@pytest.mark.parametrize(
    ("change", "detail"),
    [
        (put(0, 0, 10_000), "plans records that are not there"),
        (
            (lambda values: values.__setitem__(1, list(values[0]))),
            "plans some records twice, or more than one in a row",
        ),
        (lambda values: values[0].extend(values.pop()), "rows-none-96-00000.bin has"),
    ],
)
def test_tables_that_lie(
    whole: Path, tmp_path: Path, change: Callable[[Values], None], detail: str
) -> None:
    shutil.copytree(whole / "runs" / "labelled", tmp_path / "labelled")
    rewritten(
        tmp_path / "labelled/data/columns", "rows-none-96", "rows-none-96.json", "int64", change
    )
    assert (
        detail in failed(verify_data(asked("labelled", whole, tmp_path)))["rows: none, 96 tokens"]
    )


@pytest.mark.parametrize("kind", list(KNOBS))
def test_the_tokenizer_on_what_is_said(whole: Path, kind: str) -> None:
    proof = verify_tokenizer(asked(kind, whole))
    found = {check.what: check for check in proof.checks}
    assert proof.holds, found
    assert found["round trip"].passed is True
    chats = ("preference", "rated")
    assert ("around each text" in found) == (kind not in chats)
    assert found["chat template"].passed is (True if kind in chats else None)


def test_a_tokenizer_of_lower_case_is_not_broken(tmp_path: Path) -> None:
    """Read straight from the source; upper case does not come back, by design."""
    folder = tmp_path / "tokenizer"
    Tokenizer(framed_files("words", "bert")).save(folder)
    (tmp_path / "a.tsv").write_text("The Copper Rings\t1\nit melts\t0\n")
    made = of(
        "labelled",
        tmp_path,
        data__train=[{"source": str(tmp_path / "a.tsv"), "names": ["text", "label"]}],
        tokenizer__source=str(folder),
        tokenizer__vocab_size=None,
    )
    proof = verify_tokenizer(made)
    found = {check.what: check for check in proof.checks}
    assert proof.holds, found
    assert found["round trip"].passed is None
    assert "by design: its normalizer (BertNormalizer) changes texts" in found["round trip"].detail
    assert found["around each text"].detail == "<s> (0) before it, </s> (1) behind it"


def test_a_target_without_an_end_is_told(tmp_path: Path) -> None:
    files = framed_files("bytes", "roberta")
    bare = json.loads(files["tokenizer.json"]) | {"post_processor": None}
    config = {
        key: value
        for key, value in json.loads(files["tokenizer_config.json"]).items()
        if key != "eos_token"
    }
    folder = tmp_path / "tokenizer"
    Tokenizer(
        {"tokenizer.json": json.dumps(bare), "tokenizer_config.json": json.dumps(config)}
    ).save(folder)
    knobs = {"tokenizer__source": str(folder), "tokenizer__vocab_size": None}
    found = {check.what: check for check in verify_tokenizer(of("pair", tmp_path, **knobs)).checks}
    assert found["around each text"].passed is False
    assert found["around each text"].detail == "nothing before it, nothing behind it"
    found = {
        check.what: check for check in verify_tokenizer(of("labelled", tmp_path, **knobs)).checks
    }
    assert found["around each text"].passed is True
