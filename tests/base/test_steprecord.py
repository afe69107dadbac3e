from __future__ import annotations

from pathlib import Path

import pytest

from ingot.base.steprecord import StepRecord, is_intact, read_record, sizes, write_record


def a_record(root: Path) -> StepRecord:
    (root / "data").mkdir(exist_ok=True)
    (root / "data" / "a").write_bytes(b"12345")
    return StepRecord(
        "prepare",
        "in",
        "out",
        1.5,
        "12 rows",
        "data",
        {"data.seq_len": 8},
        sizes(root, [root / "data" / "a"]),
        0,
    )


def test_a_record_comes_back_equal(tmp_path: Path) -> None:
    record = a_record(tmp_path)
    write_record(tmp_path / "steps", record)
    assert read_record(tmp_path / "steps", "prepare") == record
    assert record.files == {"data/a": 5}


def test_a_record_is_void_when_a_file_is_gone_or_resized(tmp_path: Path) -> None:
    record = a_record(tmp_path)
    assert is_intact(tmp_path, record)
    (tmp_path / "data" / "a").write_bytes(b"123456")
    assert not is_intact(tmp_path, record)
    (tmp_path / "data" / "a").unlink()
    assert not is_intact(tmp_path, record)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"step": "prepare", "unknown": 1}', "\udcff"]
)
def test_a_record_that_cannot_be_read_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "prepare.json").write_bytes(text.encode(errors="surrogateescape"))
    assert read_record(tmp_path, "prepare") is None
    assert read_record(tmp_path, "never") is None
