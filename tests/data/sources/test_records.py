"""Items out of files of any format, and what of them is refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ingot.base.errors import WrongInput
from ingot.data.sources.records import read_records

ROWS = [{"q": "für", "c": ["a", "b"]}, {"q": "x", "c": ["c"]}, {"q": "y", "c": []}]
KNOB = "evaluate.tasks, mine.source"


def test_every_format_gives_the_same_records(tmp_path: Path) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    (tmp_path / "a.jsonl").write_text(lines, encoding="utf-8")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "c.json").write_text(json.dumps(ROWS), encoding="utf-8")
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "d.parquet")
    for name in ("a.jsonl", "b.jsonl.gz", "c.json", "d.parquet"):
        found = read_records(str(tmp_path / name), KNOB, ["question", "c"], names={"question": "q"})
        assert [record.values for record in found] == [
            {"question": row["q"], "c": row["c"]} for row in ROWS
        ]
        assert [record.place for record in found] == [f"{name}:{number}" for number in (1, 2, 3)]
    assert [
        record.get("q") for record in read_records(str(tmp_path / "a.jsonl"), KNOB, ["q"], limit=2)
    ] == ["für", "x"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"q": 1', "a.jsonl:1: broken JSON"),
        ("[1]", "a file that is one JSON array of records must be named .json"),
        ('{"p": 1}', "a.jsonl:1 has no column `q`; it has p: set evaluate.tasks, mine.columns"),
        ("\n", "holds no record"),
        ('{"q": "x"}\n{"p": "x"}', "a.jsonl:2 has no column"),
    ],
)
def test_no_item_is_passed_over_in_silence(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(WrongInput) as error:
        read_records(str(tmp_path / "a.jsonl"), KNOB, ["q"])
    assert words in str(error.value)


def test_what_is_no_table_of_items_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(WrongInput, match=r"a\.txt is read as text; items are JSONL"):
        read_records(str(tmp_path / "a.txt"), KNOB, ["q"])
    with pytest.raises(WrongInput, match="no such file"):
        read_records(str(tmp_path / "none.jsonl"), KNOB, ["q"])
    with pytest.raises(WrongInput, match="columns renames z; the columns are q"):
        read_records(str(tmp_path / "a.txt"), KNOB, ["q"], names={"z": "y"})


def test_a_part_of_a_file_is_refused_with_what_a_task_has_for_it(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"question": "q"}\n')
    file, knob = str(tmp_path / "a.jsonl"), "evaluate.tasks, mine.source"
    with pytest.raises(WrongInput, match=r"files are read whole; set `limit` of this task, or"):
        read_records(file, knob, ("question",), split="test[:10]")
