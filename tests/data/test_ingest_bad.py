"""Hostile and unlucky input to `ingest`: told, counted, and what can be read is read."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import zstandard
from fsspec.registry import _registry
from hypothesis import given
from hypothesis import strategies as st

from ingot.base.errors import WrongInput
from ingot.data.documents.kinds import DocumentExtractor
from ingot.data.documents.records import BadRecord, ParsedDocument
from ingot.data.ingest import ingest
from ingot.data.raw.store import open_raw
from ingot.data.sources import find as stamps
from ingot.data.sources import readers as json_texts
from ingot.data.sources.find import find_source, source_files
from ingot.data.sources.readers import json_lines, json_list
from tests.data.small import recipe, sentences, write_jsonl
from tests.data.test_ingest import documents


@pytest.mark.drawn("bad files", keep=2)
@pytest.mark.parametrize(
    ("name", "size"), [("a.jsonl", 100_000_000), ("a.json", 20_000_000), ("a.txt", 20_000_000)]
)
def test_a_very_large_document(tmp_path: Path, name: str, size: int) -> None:
    text = "grün und " * (size // 10)
    with (tmp_path / name).open("w", encoding="utf-8") as stream:
        stream.write(
            text
            if name == "a.txt"
            else json.dumps({"text": text}) + "\n" + json.dumps({"text": "after"})
        )
    small = recipe(tmp_path, tmp_path / name)
    ingest(small)
    source = open_raw(small).splits["train"][0]
    assert source.bytes == len(text.encode()) + (0 if name == "a.txt" else len("after"))
    assert next(iter(documents(small.folder.raw).values())) == text


@pytest.mark.drawn("bad files", keep=2)
@pytest.mark.parametrize("ending", [".gz", ".zst", ".bz2"])
def test_a_truncated_file_gives_what_stands_before(tmp_path: Path, ending: str) -> None:
    pack: dict[str, Any] = {".gz": gzip.compress, ".zst": zstandard.compress, ".bz2": bz2.compress}
    noise = [f"{number} {number * 7919**9 % 10**31:x}" for number in range(60_000)]
    data = pack[ending]("".join(json.dumps({"text": text}) + "\n" for text in noise).encode())
    (tmp_path / f"a.jsonl{ending}").write_bytes(data[: len(data) * 2 // 3])
    with pytest.raises(WrongInput, match="get the file whole"):
        ingest(recipe(tmp_path, tmp_path / f"a.jsonl{ending}"))
    small = recipe(tmp_path, tmp_path / f"a.jsonl{ending}", data__on_bad="skip_files")
    ingest(small)
    found = list(documents(small.folder.raw).values())
    assert noise[: len(found)] == found
    assert len(found) > 10_000
    assert open_raw(small).splits["train"][0].bad == {"broken compression": 1}


def test_equal_names_are_never_equal_identities(tmp_path: Path) -> None:
    for path in ("one/a.txt", "one/train1/a.txt", "two/a.txt"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(path)
    (tmp_path / "three").mkdir()
    for name in (b"\xe9.txt", b"\xe8.txt"):
        (tmp_path / "three" / os.fsdecode(name)).write_text(str(name))
    small = recipe(tmp_path, *(tmp_path / name for name in ("one", "two", "three")))
    names = [file.name for files in source_files(small)["train"] for file in files]
    assert len(set(names)) == len(names) == 5
    ingest(small)
    assert len(documents(small.folder.raw)) == 5


def test_a_source_that_changed_since(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in").mkdir()
    path = write_jsonl(tmp_path / "in" / "a.jsonl", sentences(5))
    other = write_jsonl(tmp_path / "in" / "b.jsonl", sentences(2))
    small = recipe(tmp_path, tmp_path / "in")
    ingest(small)
    before, size, status = path.read_bytes(), path.stat().st_size, path.stat()
    open_raw(small, unchanged=True)
    path.write_bytes(before + b'{"text": "more"}\n')
    with pytest.raises(
        WrongInput,
        match=(
            rf"train\[0\] .*/in changed since it was ingested: {path} has .* it had {size:,}; run"
            r" `ingot ingest` again"
        ),
    ):
        open_raw(small, unchanged=True)
    path.write_bytes(before[::-1])
    os.utime(path, ns=(1, 1))
    with pytest.raises(WrongInput, match=r"a\.jsonl was written again"):
        open_raw(small, unchanged=True)
    path.write_bytes(before)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    open_raw(small, unchanged=True)
    (tmp_path / "in" / "c.txt").write_text("new")
    with pytest.raises(WrongInput, match=r"c\.txt is new"):
        open_raw(small, unchanged=True)
    (tmp_path / "in" / "c.txt").unlink()
    other.rename(tmp_path / "b.jsonl")
    with pytest.raises(WrongInput, match=r"b\.jsonl is gone"):
        open_raw(small, unchanged=True)
    path.rename(tmp_path / "a.jsonl")
    assert open_raw(small, unchanged=True).splits["train"][0].documents == 7, (
        "a source that is gone was copied in time"
    )
    (tmp_path / "a.jsonl").rename(path)
    monkeypatch.setattr(stamps, "NAMED_FILES", 0)
    ingest(small)
    write_jsonl(tmp_path / "in" / "d.jsonl", ["x"])
    with pytest.raises(WrongInput, match="one of 2 files is another one"):
        open_raw(small, unchanged=True)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    # What a test before this one opened there fsspec still has.
    monkeypatch.delitem(_registry, "gs", raising=False)
    with pytest.raises(
        WrongInput,
        match=(
            r"gs://bucket/x needs a package that is not installed \(.*\); pip install"
            r" 'ingot\[gcp\]'"
        ),
    ):
        find_source(recipe(tmp_path, "gs://bucket/x").data.train[0], "data.train[0].source")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["text", "a", ""]) | st.text(max_size=2), inner, max_size=4
        )
    ),
    max_leaves=9,
)


def reference(row: int, data: bytes) -> str | None:
    """The text of one line as the standard library alone sees it; None where it is bad."""
    try:
        value = json.loads(data.decode())
        text = value["text"] if isinstance(value, dict) else None
        return text if isinstance(text, str) and text.strip() and text.encode() else None
    except (ValueError, KeyError, RecursionError):
        return None


RAW = JSON.map(lambda value: json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass"))
ESCAPED = JSON.map(lambda value: json.dumps(value).encode())


@pytest.mark.drawn("bad files", keep=2)
@given(st.lists(RAW | ESCAPED | st.binary(max_size=20), max_size=9))
def test_lines_of_anything_are_judged_as_the_standard_library_does(lines: list[bytes]) -> None:
    data = b"\n".join(lines)
    found = {item.row: item for item in json_lines(io.BytesIO(data), DocumentExtractor())}
    for row, line in enumerate(data.split(b"\n"), start=1):
        line = line.removeprefix(b"\xef\xbb\xbf") if row == 1 else line
        item = found.pop(row, None)
        assert (item.text if isinstance(item, ParsedDocument) else None) == reference(row, line)
        assert item is not None or not line.strip(), (
            "a line that is not empty is either good or bad"
        )
    assert not found


@given(
    st.lists(JSON, max_size=8),
    st.integers(1, 12),
    st.integers(0, 300),
    st.sampled_from([None, 0, 1]),
)
def test_lists_of_anything_give_good_or_bad_items(
    values: list[Any], window: int, cut: int, indent: int | None
) -> None:
    data = json.dumps(values, indent=indent).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_texts, "JSON_CHUNK_BYTES", window)
        whole = list(json_list(io.BytesIO(data), DocumentExtractor()))
        part = list(json_list(io.BytesIO(data[:cut]), DocumentExtractor()))
    if not any(isinstance(value, list) for value in values):
        assert [item.row for item in whole] == list(range(1, len(values) + 1))
        assert [item.text if isinstance(item, ParsedDocument) else None for item in whole] == [
            reference(0, json.dumps(value).encode()) for value in values
        ]
        assert all(isinstance(item, BadRecord) or item in whole for item in part)
        # A file that was cut anywhere behind its first byte says so.
        assert isinstance(part[-1], BadRecord) if 0 < cut < len(data) else part in ([], whole)


@given(st.binary(max_size=60), st.integers(1, 9))
def test_bytes_in_a_list_are_good_or_bad_items(data: bytes, window: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_texts, "JSON_CHUNK_BYTES", window)
        for row, item in enumerate(
            json_list(io.BytesIO(b'[{"text": "' + data), DocumentExtractor()), start=1
        ):
            assert item.row == row
