"""Data sets that the `datasets` library saved, and Arrow files, read without that library."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pytest

from ingot.base.errors import WrongInput
from ingot.config.sections.data import SourceSettings
from ingot.data.documents.kinds import DocumentExtractor
from ingot.data.documents.records import BadRecord, ParsedDocument
from ingot.data.ingest import ingest
from ingot.data.raw.store import open_raw
from ingot.data.sources.find import find_source
from ingot.data.sources.readers import parse_file
from tests.data.small import recipe, sentences, write_jsonl
from tests.data.test_ingest import documents

TEXTS = sentences(30)


def arrow(batches: list[dict[str, Any]], *, file: bool = False) -> bytes:
    stream = io.BytesIO()
    tables = [pa.table(batch) for batch in batches]
    with (pa.ipc.new_file if file else pa.ipc.new_stream)(stream, tables[0].schema) as writer:
        for table in tables:
            writer.write_table(table)
    return stream.getvalue()


def read(data: bytes, wanted: DocumentExtractor | None = None) -> list[ParsedDocument | BadRecord]:
    return list(parse_file(io.BytesIO(data), "a.arrow", "arrow", wanted or DocumentExtractor()))


def save(folder: Path, texts: list[str], files: int = 2) -> Path:
    """A stand-in for `save_to_disk`: the same files with the same names."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05d}-of-{files:05d}.arrow" for number in range(files)]
    for number, name in enumerate(names):
        (folder / name).write_bytes(
            arrow([{"text": texts[number::files], "id": list(range(len(texts[number::files])))}])
        )
    (folder / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": name} for name in names], "_split": "train"})
    )
    (folder / "dataset_info.json").write_text("{}")
    return folder


@pytest.mark.parametrize("file", [False, True])
def test_streams_and_files_of_several_batches(file: bool) -> None:
    items = read(
        arrow(
            [{"id": [1, 2], "text": ["one", None]}, {"id": [3, 4], "text": ["", "four"]}], file=file
        )
    )
    assert [(item.row, item.text) for item in items if isinstance(item, ParsedDocument)] == [
        (1, "one"),
        (4, "four"),
    ]
    assert [(item.row, item.reason) for item in items if isinstance(item, BadRecord)] == [
        (2, "null `text`"),
        (3, "empty text"),
    ]


def test_damaged_arrow_is_named() -> None:
    data = arrow([{"text": TEXTS * 20}] * 3)
    assert [type(item) for item in read(b"nothing of the kind")] == [BadRecord]
    cut = read(data[: len(data) * 2 // 3])
    assert [item.reason for item in cut if isinstance(item, BadRecord)] == ["broken Arrow"]
    assert len(cut) > 600
    with pytest.raises(WrongInput, match=r"a\.arrow has no column `body`; it has text"):
        read(data, DocumentExtractor("body"))
    with pytest.raises(WrongInput, match="column `n` holds int64, not text"):
        read(arrow([{"n": [1]}]), DocumentExtractor("n"))


def test_bytes_that_are_no_text_spoil_no_batch() -> None:
    values = pa.array([b"a", b"\xff", b"b"], pa.binary())
    strings = pa.Array.from_buffers(pa.string(), 3, values.buffers())
    items = read(arrow([{"text": strings}]))
    assert [(item.row, getattr(item, "reason", "")) for item in items] == [
        (1, ""),
        (2, "invalid UTF-8"),
        (3, ""),
    ]


def test_a_saved_data_set(tmp_path: Path) -> None:
    small = recipe(tmp_path, save(tmp_path / "saved", TEXTS))
    ingest(small)
    found = documents(small.folder.raw)
    assert list(found.values()) == TEXTS[0::2] + TEXTS[1::2]
    assert next(iter(found)) == "data-00000-of-00002.arrow:1"
    open_raw(small)


def test_the_order_of_files_is_the_saved_one(tmp_path: Path) -> None:
    folder = save(tmp_path / "saved", TEXTS)
    names = ["data-00001-of-00002.arrow", "data-00000-of-00002.arrow"]
    (folder / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": name} for name in names]})
    )
    assert [file.name for file in find_source(SourceSettings(source=str(folder)))] == names


def test_several_splits(tmp_path: Path) -> None:
    for split, texts in (("train", TEXTS[:20]), ("test", TEXTS[20:])):
        save(tmp_path / "saved" / split, texts, 1)
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    small = recipe(
        tmp_path,
        tmp_path / "saved",
        data__validation=[{"source": str(tmp_path / "saved"), "split": "test"}],
    )
    ingest(small)
    assert list(documents(small.folder.raw).values()) == TEXTS[:20]
    assert list(documents(small.folder.raw, "validation").values()) == TEXTS[20:]
    with pytest.raises(WrongInput, match=r"has no split `dev`; it has train, test: set `split`"):
        ingest(recipe(tmp_path, {"source": str(tmp_path / "saved"), "split": "dev"}))


@pytest.mark.parametrize("name", ["a.jsonl", "saved"])
def test_a_part_of_a_split_is_not_taken_for_all_of_it(tmp_path: Path, name: str) -> None:
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    save(tmp_path / "saved", TEXTS, 1)
    for split in ("train[:10%]", "train[:100]"):
        source = SourceSettings(source=str(tmp_path / name), split=split)
        with pytest.raises(
            WrongInput, match=r"split=train\[.*files are read whole; set `fraction`"
        ):
            find_source(source)
    assert find_source(SourceSettings(source=str(tmp_path / name)))


def test_one_split_of_a_data_set_in_a_bucket_is_read(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    for split, texts in (("train", TEXTS[:20]), ("test", TEXTS[20:])):
        save(saved / split, texts, 1)
    (saved / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    fsspec.filesystem("memory").put(f"{saved}/", "/saved/", recursive=True)

    def names(source: Path | str, split: str) -> list[str]:
        return [file.name for file in find_source(SourceSettings(source=str(source), split=split))]

    assert (
        names("memory://saved", "test")
        == names(saved, "test")
        == ["test/data-00000-of-00001.arrow"]
    )
    assert names("memory://saved/train", "test") == ["data-00000-of-00001.arrow"]
    with pytest.raises(WrongInput, match="has no split `dev`; it has train, test"):
        names("memory://saved", "dev")
    (saved / "test" / "state.json").unlink()
    with pytest.raises(WrongInput, match=r"test/state\.json cannot be read .*; save the data set"):
        names(saved, "test")


def test_a_torn_folder_is_named(tmp_path: Path) -> None:
    folder = save(tmp_path / "saved", TEXTS)
    (folder / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(
        WrongInput, match=r"data-00001-of-00002\.arrow is missing; save the data set again"
    ):
        find_source(SourceSettings(source=str(folder)))
    (folder / "state.json").write_text("{")
    with pytest.raises(WrongInput, match=r"state\.json cannot be read"):
        find_source(SourceSettings(source=str(folder)))


def test_what_the_library_itself_saves(tmp_path: Path) -> None:
    library = pytest.importorskip("datasets", reason="datasets is not installed")
    made = library.Dataset.from_dict({"text": TEXTS, "label": list(range(len(TEXTS)))})
    made.save_to_disk(str(tmp_path / "one"), num_shards=3)
    library.DatasetDict({"train": made, "test": made.select(range(5))}).save_to_disk(
        str(tmp_path / "two")
    )
    small = recipe(
        tmp_path,
        tmp_path / "one",
        data__validation=[{"source": str(tmp_path / "two"), "split": "test"}],
    )
    ingest(small)
    assert list(documents(small.folder.raw).values()) == TEXTS
    assert list(documents(small.folder.raw, "validation").values()) == TEXTS[:5]
