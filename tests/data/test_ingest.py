"""Sources to Parquet: complete, counted, the same bytes every time, refused in words."""

from __future__ import annotations

import errno
import gzip
import json
import os
import re
from pathlib import Path
from typing import IO, Any

import fsspec
import pyarrow.parquet as pq
import pytest

from ingot.base.errors import Failed, WrongInput
from ingot.base.markers import problems, read_marker
from ingot.data.ingest import ingest
from ingot.data.raw import store as raw_module
from ingot.data.raw.store import open_raw, read_table
from tests.data.small import everything, recipe, sentences, write_jsonl
from tests.markers import changed


def documents(folder: Path, split: str = "train") -> dict[str, str]:
    tables = [pq.read_table(path) for path in sorted(folder.glob(f"{split}-*.parquet"))]
    return {row["doc_id"]: row["text"] for table in tables for row in table.to_pylist()}


def test_every_document_once_with_its_place(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "in" / "a.jsonl", ["one", "two"])
    (tmp_path / "in" / "b.txt").write_text("three")
    outcome = ingest(small := recipe(tmp_path, tmp_path / "in"))
    assert documents(small.folder.raw) == {
        "a.jsonl:1": "one",
        "a.jsonl:2": "two",
        "b.txt:1": "three",
    }
    assert outcome.result == "3 documents, 0.0 MB"
    assert outcome.where == str(small.folder.raw)
    assert set(outcome.files) == {"data/raw/manifest.json", "data/raw/train-00000.parquet"}


def test_a_split_of_its_own(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["one"])
    write_jsonl(tmp_path / "b.jsonl", ["two"])
    small = recipe(
        tmp_path, tmp_path / "a.jsonl", data__validation=[{"source": str(tmp_path / "b.jsonl")}]
    )
    ingest(small)
    assert documents(small.folder.raw) == {"a.jsonl:1": "one"}
    assert documents(small.folder.raw, "validation") == {"b.jsonl:1": "two"}


def test_parts_hold_one_source_in_small_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raw_module, "GROUP_BYTES", 400)
    monkeypatch.setattr(raw_module, "PART_BYTES", 1500)
    first, second = sentences(20), sentences(12, 20)
    small = recipe(
        tmp_path,
        write_jsonl(tmp_path / "a.jsonl", first),
        write_jsonl(tmp_path / "b.jsonl", second),
    )
    ingest(small)
    opened = open_raw(small)
    assert [source.documents for source in opened.splits["train"]] == [20, 12]
    paths = [part.path for source in opened.splits["train"] for part in source.parts]
    assert paths == [f"train-{number:05d}.parquet" for number in range(len(paths))]
    assert len(paths) > 3
    texts = []
    for number, source in enumerate(opened.splits["train"]):
        for part in source.parts:
            assert set(
                pq.read_table(small.folder.raw / part.path).column("source").to_pylist()
            ) == {number}
            for group, (count, size) in enumerate(part.groups):
                found = read_table(small.folder.raw / part.path, group).column("text").to_pylist()
                assert (len(found), sum(len(text.encode()) for text in found)) == (count, size)
                texts += found
    assert texts == first + second


def test_the_same_bytes_every_time(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "in" / "a.jsonl", sentences(50))
    small = recipe(tmp_path, tmp_path / "in")
    outcome = ingest(small)
    before = everything(small.folder.raw)
    (small.folder.raw / "train-00007.parquet").write_text("of an earlier run")
    (small.folder.raw / ".train-00000.parquet.partial-1").write_text("of a killed run")
    assert ingest(small) == outcome
    assert everything(small.folder.raw) == before
    (tmp_path / "in" / "a.jsonl").touch()
    assert ingest(small).outputs == outcome.outputs, "a touched file has the same documents"


def test_moved_data_are_the_same_documents(tmp_path: Path) -> None:
    results = []
    for root in ("here", "there/deeper"):
        write_jsonl(tmp_path / root / "in" / "a.jsonl", sentences(5))
        results.append(ingest(recipe(tmp_path / root, tmp_path / root / "in")).outputs)
    assert results[0] == results[1]


def test_bad_records_are_counted_named_and_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'{"text": "good"}\n{broken\n{"text": "\xff"}\n{"text": null}\n{"text": ""}\n{"other":'
        b' "x"}\n{"text": "also good"}\n'
    )
    small = recipe(tmp_path, path)
    # The empty text is no loss: four of six.
    with pytest.raises(
        WrongInput,
        match=(
            r"a\.jsonl: skipped 5 of 7 records \(1 broken JSON.*\): more than data\.max_skipped=0\.1;"
            r" mend the source, or allow it by data\.max_skipped=0\.67"
        ),
    ):
        ingest(small)
    with pytest.raises(WrongInput, match="no ingested documents"):
        open_raw(small)
    small = recipe(tmp_path, path, data__max_skipped=0.67)
    outcome = ingest(small)
    assert outcome.result == "2 documents, 0.0 MB, 5 skipped"
    source = open_raw(small).splits["train"][0]
    assert source.bad == {
        "broken JSON": 1,
        "invalid UTF-8": 1,
        "null `text`": 1,
        "empty text": 1,
        "no `text`": 1,
    }
    assert [example.split(" ")[0] for example in source.examples] == [
        f"{path}:{line}:" for line in (2, 3, 4, 5, 6)
    ]
    told = capsys.readouterr().err
    assert f"skipped {path}:2: broken JSON (Expecting property name" in told
    assert "skipped 5 of 7" in told


@pytest.mark.parametrize(("good", "bad", "goes_on"), [(1, 3, True), (37, 4, True), (35, 4, False)])
def test_a_few_records_are_skipped_and_no_more(
    tmp_path: Path, good: int, bad: int, goes_on: bool
) -> None:
    """Up to three of any source, and a tenth of a larger one; empty lines are no records."""
    texts = [*sentences(good), *("" for _ in range(50))]
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    path.write_bytes(b"{broken\n" * bad + path.read_bytes())
    small = recipe(tmp_path, path)
    if goes_on:
        assert f"{50 + bad} skipped" in ingest(small).result
    else:
        with pytest.raises(WrongInput, match=r"skipped 54 of 89 records .*=0\.11$"):
            ingest(small)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{broken", "broken JSON"),
        (b'{"text": "\xff"}', "invalid UTF-8"),
        (b'{"text": null}', "null `text`"),
        (b'{"text": " "}', "empty text"),
    ],
)
def test_stop_at_the_first_bad_record(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + line + b"\n")
    small = recipe(tmp_path, path, data__on_bad="stop")
    with pytest.raises(
        WrongInput, match=rf"a.jsonl:2: {reason}.*; mend it, or set data.on_bad=skip"
    ):
        ingest(small)
    with pytest.raises(WrongInput, match="no ingested documents"):
        open_raw(small)


def test_what_is_there_stays_until_its_replacement_is_whole(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", sentences(50))
    ingest(small := recipe(tmp_path, path, data__on_bad="stop"))
    before = everything(small.folder.raw)
    write_jsonl(path, [*sentences(50), ""])
    with pytest.raises(WrongInput, match=r"set data\.on_bad=skip"):
        ingest(small)
    assert everything(small.folder.raw) == before
    assert [found.name for found in small.folder.data.iterdir()] == ["raw"]


@pytest.mark.parametrize("on_bad", ["skip", "stop"])
def test_a_missing_column_names_those_there_are(tmp_path: Path, on_bad: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"title": "x", "body": "y"}\n' * 3)
    (tmp_path / "a.csv").write_text("title,body\nx,y\n")
    for name in ("a.jsonl", "a.csv"):
        with pytest.raises(WrongInput, match=f"{name}.* has no column `text`; it has title, body"):
            ingest(recipe(tmp_path, tmp_path / name, data__on_bad=on_bad))
        assert ingest(
            recipe(tmp_path, {"source": str(tmp_path / name), "text": "body"})
        ).result.startswith(("3 documents", "1 documents"))


def test_a_missing_column_is_seen_early(tmp_path: Path) -> None:
    """And told of the first record that lacks it."""
    (tmp_path / "a.jsonl").write_text("\n" + '{"title": "x"}\n' * 5000 + '{"text": "at last"}\n')
    with pytest.raises(WrongInput, match=r"a\.jsonl:2 has no column `text`"):
        ingest(recipe(tmp_path, tmp_path / "a.jsonl"))


@pytest.mark.parametrize(
    ("name", "data", "why"),
    [
        ("a.jsonl", b"", "nothing is in there"),
        ("a.jsonl", b"\n\n", "nothing is in there"),
        ("a.jsonl", b"{broken\n", "1 broken JSON"),
        ("a.txt", b"", "1 empty text"),
        ("a.csv", b"", "1 empty text"),
        ("a.json", b"[]", "nothing is in there"),
        ("a.txt", "Grüße".encode("latin-1"), "1 invalid UTF-8); save texts as UTF-8"),
        ("a.tar", b"a.txt".ljust(257, b"\0") + b"ustar", "1 not text); save texts as UTF-8"),
    ],
)
def test_an_empty_data_set(tmp_path: Path, name: str, data: bytes, why: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(WrongInput, match=re.escape(f"{name} has no documents in 1 file ({why}")):
        ingest(recipe(tmp_path, tmp_path / name))


def test_an_empty_source_among_full_ones(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_bytes(b"")
    with pytest.raises(WrongInput, match=r"b.jsonl has no documents"):
        ingest(recipe(tmp_path, write_jsonl(tmp_path / "a.jsonl", ["x"]), tmp_path / "b.jsonl"))


def test_a_truncated_file_is_told(tmp_path: Path) -> None:
    """It was one skipped record, and half of a download was trained on."""
    lines = "".join(json.dumps({"text": text}) + "\n" for text in sentences(500)).encode()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines)[:-100])
    with pytest.raises(
        WrongInput,
        match=r"a\.jsonl\.gz:\d+: broken compression \(.*; the rest of the file is not read\);"
        r" get the file whole, or set data\.on_bad=skip_files",
    ):
        ingest(recipe(tmp_path, tmp_path / "a.jsonl.gz"))
    small = recipe(tmp_path, tmp_path / "a.jsonl.gz", data__on_bad="skip_files")
    ingest(small)
    assert open_raw(small).splits["train"][0].bad == {"broken compression": 1}


def test_an_unreadable_file(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "in" / "a.jsonl", ["x"])
    (tmp_path / "in" / "b.jsonl").symlink_to(
        "/proc/self/mem"
    )  # opens, and fails to read, for root as well
    with pytest.raises(WrongInput, match=r"b\.jsonl:1: unreadable file .*data\.on_bad=skip_files"):
        ingest(recipe(tmp_path, tmp_path / "in"))
    small = recipe(tmp_path, tmp_path / "in", data__on_bad="skip_files")
    ingest(small)
    assert open_raw(small).splits["train"][0].bad == {"unreadable file": 1}


def test_names_that_are_no_text(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "in" / "a.jsonl", ["x"]).write_bytes(b'{"\\ud800": 1}\n{"text": "x"}\n')
    (tmp_path / "in" / os.fsdecode(b"caf\xe9.txt")).write_text("y")
    (tmp_path / "in" / os.fsdecode(b"\xe9.txt")).write_bytes(b"\xff")
    small = recipe(tmp_path, tmp_path / "in")
    assert ingest(small).result == "2 documents, 0.0 MB, 2 skipped"
    assert documents(small.folder.raw) == {"a.jsonl:2": "x", "caf?.txt:1": "y"}


def test_a_link_to_nowhere(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "in" / "a.jsonl", ["x"])
    (tmp_path / "in" / "b.jsonl").symlink_to(tmp_path / "gone")
    with pytest.raises(
        WrongInput,
        match=r"in/b\.jsonl cannot be read \(No such file or directory\); mend or remove it",
    ):
        ingest(recipe(tmp_path, tmp_path / "in"))


def test_object_storage(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe("/ingested/a.jsonl", b'{"text": "from afar"}\n')
    try:
        small = recipe(tmp_path, "memory://ingested/a.jsonl")
        ingest(small)
        assert documents(small.folder.raw) == {"a.jsonl:1": "from afar"}
    finally:
        memory.rm("/ingested", recursive=True)


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(stream: IO[bytes], *arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(raw_module.pq, "ParquetWriter", full)
    small = recipe(tmp_path, write_jsonl(tmp_path / "a.jsonl", ["x"]))
    with pytest.raises(Failed, match="disk full while writing"):
        ingest(small)
    assert not list(small.folder.data.iterdir()), "nothing half-written is left"


def test_what_was_ingested_for_other_sources_is_refused(tmp_path: Path) -> None:
    first, second = (
        write_jsonl(tmp_path / "a.jsonl", ["x"]),
        write_jsonl(tmp_path / "b.jsonl", ["y"]),
    )
    ingest(recipe(tmp_path, first))
    with pytest.raises(
        WrongInput,
        match=r"from train\[0\] .*a.jsonl, the recipe says train\[0\] .*b.jsonl; run `ingot ingest`",
    ):
        open_raw(recipe(tmp_path, second))
    with pytest.raises(WrongInput, match=r"the recipe says train\[0\] .*\{'text': 'body'\}"):
        open_raw(recipe(tmp_path, {"source": str(first), "text": "body"}))
    open_raw(recipe(tmp_path, {"source": str(first), "weight": 2.0}))
    held_out = recipe(tmp_path, first, data__validation=[{"source": str(first)}])
    with pytest.raises(
        WrongInput, match=r"from no validation\[0\], the recipe says validation\[0\]"
    ):
        open_raw(held_out)
    splits = json.loads((held_out.folder.raw / "manifest.json").read_text())["splits"]
    splits["train"][0]["knobs"]["gone"] = 1
    changed(held_out.folder.raw, "manifest.json", splits=splits)
    with pytest.raises(WrongInput, match=r"a.jsonl \{'gone': 1\}, the recipe says"):
        open_raw(recipe(tmp_path, first))


def test_torn_and_damaged_parts_are_named(tmp_path: Path) -> None:
    small = recipe(tmp_path, write_jsonl(tmp_path / "a.jsonl", sentences(500)))
    ingest(small)
    part = small.folder.raw / "train-00000.parquet"
    data = bytearray(part.read_bytes())
    data[len(data) // 4] ^= 1
    part.write_bytes(data)
    marker = read_marker(small.folder.raw, "manifest.json")
    assert marker is not None
    assert problems(small.folder.raw, marker, checksums=True) == [
        f"{part} does not match its checksum"
    ]
    with pytest.raises(
        WrongInput, match=r"train-00000\.parquet is damaged .*; run `ingot ingest --again`"
    ):
        read_table(part, 0)
    part.write_bytes(data[:-1])
    with pytest.raises(WrongInput, match=r"train-00000\.parquet has .* bytes"):
        open_raw(small)
