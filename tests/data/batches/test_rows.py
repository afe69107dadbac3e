"""Rows against a slow, obvious cutting of the same documents; torn data refused."""

from __future__ import annotations

import hashlib
import os
import resource
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ingot.base.errors import WrongInput
from ingot.base.markers import FileEntry, entry_of, read_marker, write_marker
from ingot.data.batches.rows import IGNORE, Rows, open_rows
from ingot.data.batches.samples import RowArrays
from ingot.data.columns.column import ColumnWriter, bin_path, column_prefix, idx_path
from ingot.data.columns.manifest import ColumnPart, PreparedData, PreparedSource, write_prepared
from tests.exhaustive import examples
from tests.markers import changed

Documents = list[list[int]]
SOURCES = st.lists(
    st.lists(st.lists(st.lists(st.integers(1, 99), max_size=9), max_size=5), max_size=3),
    min_size=1,
    max_size=3,
)


def write(
    folder: Path,
    sources: list[list[Documents]],
    weights: list[float] | None = None,
    masks: list[list[Documents]] | None = None,
) -> Path:
    """Columns of sources, each of parts, each of documents, as `prepare` lays them down; `masks`
    make them those of chats.
    """
    made, entries, count = [], list[FileEntry](), 0
    columns: dict[str, tuple[list[list[Documents]], np.dtype[Any]]] = {
        "tokens": (sources, np.dtype("uint16"))
    }
    if masks:
        columns["mask"] = masks, np.dtype("uint8")
    for number, parts in enumerate(sources):
        written = []
        for place, documents in enumerate(parts):
            for name, (values, dtype) in columns.items():
                entries += column(
                    column_prefix(folder, "train", name, count), values[number][place], dtype
                )
            written.append(
                ColumnPart(
                    count, len(documents), sum(map(len, documents)), 0, hashlib.sha256().hexdigest()
                )
            )
            count += 1
        weight = weights[number] if weights else 1.0
        made.append(
            PreparedSource(
                f"s{number}",
                weight,
                sum(part.documents for part in written),
                sum(part.tokens for part in written),
                0,
                written,
            )
        )
    kinds = [{"name": name, "dtype": dtype.name} for name, (_, dtype) in columns.items()]
    prepared = PreparedData(
        "sft" if masks else "pretrain",
        kinds,
        {"train": made},
        "tokenizer",
        None,
        100,
        {"train": "data"},
        {"train": "set"},
    )
    write_prepared(folder, prepared, {}, entries)
    return folder


def column(prefix: Path, documents: Documents, dtype: np.dtype[Any]) -> list[FileEntry]:
    with ColumnWriter(prefix, dtype) as writer:
        flat = [token for document in documents for token in document]
        writer.append(
            np.array(flat, np.int64), np.array([len(document) for document in documents], np.int64)
        )
    return [entry_of(prefix.parent, path.name) for path in (bin_path(prefix), idx_path(prefix))]


def slowly(documents: Documents, length: int, *, pad_last: bool) -> list[RowArrays]:
    """Token by token."""
    stream = [
        (token, number, place)
        for number, document in enumerate(documents)
        for place, token in enumerate(document)
    ]
    rows = []
    for begin in range(0, len(stream), length):
        cut = stream[begin : begin + length]
        if len(cut) < length and not pad_last:
            break
        tokens, labels, positions, segments = ([fill] * length for fill in (0, IGNORE, 0, 0))
        for index, (token, number, _) in enumerate(cut):
            same = index > 0 and cut[index - 1][1] == number
            tokens[index] = token
            positions[index] = positions[index - 1] + 1 if same else 0
            segments[index] = segments[index - 1] + (0 if same else 1) if index else 1
            after = stream[begin + index + 1] if begin + index + 1 < len(stream) else None
            labels[index] = after[0] if after is not None and after[1] == number else IGNORE
        rows.append(
            RowArrays(*(np.array(values) for values in (tokens, labels, positions, segments)))
        )
    return rows


def equal(left: RowArrays, right: RowArrays) -> bool:
    return all(
        np.array_equal(a, b) and a.dtype == np.int64 for a, b in zip(left, right, strict=True)
    )


@settings(max_examples=examples(25, 100), deadline=None)
@example(sources=[[[[1] * 8, [], [2]]]], length=9, pad_last=True)
@given(sources=SOURCES, length=st.integers(1, 12), pad_last=st.booleans())
def test_rows_are_cut_token_by_token(
    tmp_path_factory: pytest.TempPathFactory,
    sources: list[list[Documents]],
    length: int,
    pad_last: bool,
) -> None:
    folder = write(tmp_path_factory.mktemp("rows"), sources)
    expected = [
        slowly([document for part in parts for document in part], length, pad_last=pad_last)
        for parts in sources
    ]
    if not sum(map(len, expected)):
        with pytest.raises(WrongInput, match=f"not one row of data.seq_len={length}"):
            open_rows(folder, "train", length, pad_last=pad_last)
        return
    rows = open_rows(folder, "train", length, pad_last=pad_last)
    assert rows.sizes == [len(source) for source in expected]
    flat = [row for source in expected for row in source]
    assert len(rows) == len(flat)
    assert all(equal(rows.row(index), row) for index, row in enumerate(flat))
    assert (
        rows.left_out
        == sum(len(document) for parts in sources for part in parts for document in part)
        - len(rows) * length
        or pad_last
    )


@settings(max_examples=examples(25, 100), deadline=None)
@given(sources=SOURCES, length=st.integers(1, 12))
def test_rows_that_keep_to_a_part_are_those_of_the_part_alone(
    tmp_path_factory: pytest.TempPathFactory, sources: list[list[Documents]], length: int
) -> None:
    folder = write(tmp_path_factory.mktemp("rows"), sources)
    expected = [
        [slowly(documents, length, pad_last=False) for documents in parts] for parts in sources
    ]
    flat = [row for parts in expected for part in parts for row in part]
    if not flat:
        with pytest.raises(WrongInput, match=f"not one row of data.seq_len={length}"):
            open_rows(folder, "train", length, pad_last=False, by_part=True)
        return
    rows = open_rows(folder, "train", length, pad_last=False, by_part=True)
    assert rows.part_rows == [[len(part) for part in parts] for parts in expected]
    assert all(equal(rows.row(index), row) for index, row in enumerate(flat))
    assert (
        rows.left_out
        == sum(len(document) for parts in sources for part in parts for document in part)
        - len(rows) * length
    )


def test_an_example_by_hand(tmp_path: Path) -> None:
    rows = open_rows(
        write(tmp_path, [[[[10, 11, 12], [20, 21]], [[30, 31, 32, 33]]]]), "train", 4, pad_last=True
    )
    first, second, last = (rows.row(index) for index in range(3))
    assert [column.tolist() for column in first] == [
        [10, 11, 12, 20],
        [11, 12, IGNORE, 21],
        [0, 1, 2, 0],
        [1, 1, 1, 2],
    ]
    assert [column.tolist() for column in second] == [
        [21, 30, 31, 32],
        [IGNORE, 31, 32, 33],
        [0, 0, 1, 2],
        [1, 2, 2, 2],
    ]
    assert [column.tolist() for column in last] == [
        [33, 0, 0, 0],
        [IGNORE] * 4,
        [0] * 4,
        [1, 0, 0, 0],
    ]


def test_every_token_but_the_first_of_a_document_is_a_label_once(tmp_path: Path) -> None:
    documents = [
        [100 * number + place for place in range(number % 7 + 1)] for number in range(1, 40)
    ]
    rows = open_rows(write(tmp_path, [[documents]]), "train", 5, pad_last=True)
    labels = sorted(
        int(label)
        for index in range(len(rows))
        for label in rows.row(index).labels
        if label != IGNORE
    )
    assert labels == sorted(token for document in documents for token in document[1:])


def test_weights(tmp_path: Path) -> None:
    sources = [[[[1] * 8]], [[[2] * 8]]]
    assert open_rows(write(tmp_path / "a", sources), "train", 4, pad_last=False).weights is None
    columns = write(tmp_path / "b", sources, [1.0, 3.0])
    assert open_rows(columns, "train", 4, pad_last=False).weights == [1.0, 3.0]
    assert open_rows(columns, "train", 4, pad_last=False, weights=[2.0, 5.0]).weights == [2.0, 5.0]
    assert open_rows(columns, "train", 4, pad_last=False, weights=[1.0, 1.0]).weights is None
    with pytest.raises(WrongInput, match="prepared from 2 sources, the recipe has 1"):
        open_rows(columns, "train", 4, pad_last=False, weights=[1.0])
    assert (
        open_rows(write(tmp_path / "c", sources[:1], [3.0]), "train", 4, pad_last=False).weights
        is None
    )


def test_rows_beyond_the_last(tmp_path: Path) -> None:
    rows = open_rows(write(tmp_path, [[[[1] * 8]]]), "train", 4, pad_last=False)
    for index in (-1, 2):
        with pytest.raises(IndexError, match=f"row {index} of 2"):
            rows.row(index)


def test_memory_does_not_grow_with_the_data(tmp_path: Path) -> None:
    peaks = []
    for count in (10_000, 500_000):
        folder = tmp_path / str(count)
        with ColumnWriter(folder / "train.tokens-00000", np.dtype("uint16")) as writer:
            writer.append(np.ones(count * 5), np.full(count, 5))
        entries = [
            entry_of(folder, name) for name in ("train.tokens-00000.bin", "train.tokens-00000.idx")
        ]
        source = PreparedSource(
            "s", 1.0, count, count * 5, 0, [ColumnPart(0, count, count * 5, 0, "0")]
        )
        write_prepared(
            folder,
            PreparedData(
                "pretrain", [], {"train": [source]}, "t", None, 100, {"train": "d"}, {"train": "s"}
            ),
            {},
            entries,
        )
        open_rows(folder, "train", 64, pad_last=False)  # what the first one loads is there
        tracemalloc.start()
        rows = open_rows(folder, "train", 64, pad_last=False)
        for index in range(0, len(rows), len(rows) // 50):
            rows.row(index)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 2 * peaks[0] < 1_000_000


def test_what_is_not_whole_is_refused(tmp_path: Path) -> None:
    def refused(message: str) -> None:
        with pytest.raises(WrongInput, match=message):
            open_rows(folder, "train", 4, pad_last=False)

    folder = write(tmp_path / "x", [[[[1] * 8]]])
    part = folder / "train.tokens-00000.bin"
    part.write_bytes(part.read_bytes()[:-2])
    refused(r"train.tokens-00000\.bin has 14 bytes, 16 were written; run `ingot prepare --again`")
    part.unlink()
    refused("train.tokens-00000.bin is missing; run `ingot prepare --again`")
    changed(folder, "manifest.json", schema=99)
    refused("has schema 99, newer than this ingot's 1; upgrade ingot")
    (folder / "manifest.json").write_text('{"schema": 1, "kin')
    refused(r"manifest\.json is damaged; run `ingot prepare --again`")
    (folder / "manifest.json").unlink()
    refused("holds no prepared data; run `ingot prepare` with this recipe first")


def test_a_manifest_of_another_version_is_refused_in_words(tmp_path: Path) -> None:
    folder = write(tmp_path, [[[[1] * 8]]])
    marker = read_marker(folder, "manifest.json")
    assert marker is not None
    files = [FileEntry(**entry) for entry in marker.pop("files")]
    del marker["closing"]
    write_marker(folder, "manifest.json", marker, files)
    with pytest.raises(
        WrongInput, match=r"manifest\.json lacks closing; run `ingot prepare --again`"
    ):
        open_rows(folder, "train", 4, pad_last=False)


def test_a_part_that_is_not_the_manifests(tmp_path: Path) -> None:
    """Another part of the very same size: seen when it is opened."""
    folder = write(tmp_path, [[[[1, 2], [3, 4]]]])
    rows = open_rows(folder, "train", 2, pad_last=False)
    with ColumnWriter(folder / "train.tokens-00000", np.dtype("uint16")) as writer:
        writer.append(np.array([1, 2, 3]), np.array([1, 2]))
    with pytest.raises(
        WrongInput,
        match=(
            r"has 2 documents and 3 tokens, manifest.json says 2 and 4; run `ingot prepare --again`"
        ),
    ):
        rows.row(0)


def test_a_part_of_another_type(tmp_path: Path) -> None:
    """A changed byte in the index would make other ids of the same bytes."""
    folder = write(tmp_path, [[[[1, 2, 3, 4]]]])
    index = idx_path(folder / "train.tokens-00000")
    content = index.read_bytes()
    index.write_bytes(content[:17] + b"\x03" + content[18:])
    with pytest.raises(
        WrongInput,
        match=(
            r"train.tokens-00000.bin holds int16, manifest.json says uint16; run `ingot prepare --again`"
        ),
    ):
        open_rows(folder, "train", 2, pad_last=False).row(0)


def test_a_batch_is_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many are made at once, in any order, some of them twice, into memory that holds other
    things.
    """
    rows = open_rows(
        write(tmp_path, [[[[number] * (number % 9) for number in range(1, 90)]], [[[7] * 30]]]),
        "train",
        6,
        pad_last=True,
    )
    ids = np.random.default_rng(0).integers(0, len(rows), 200).tolist()
    for block in (1, 12, 13, 10**6):
        monkeypatch.setattr("ingot.data.batches.rows.BLOCK_TOKENS", block)
        made = rows.batch(ids, out=np.full((4, len(ids), 6), 77))
        assert all(
            equal(RowArrays(*(field[place] for field in made)), rows.row(i))
            for place, i in enumerate(ids)
        )


def test_rows_share_one_manifest(tmp_path: Path) -> None:
    rows = open_rows(write(tmp_path, [[[[1] * 8]]]), "train", 4, pad_last=False)
    assert isinstance(rows, Rows)
    assert (
        rows.fingerprint,
        rows.set_fingerprint,
        rows.tokenizer,
        rows.documents,
        rows.tokens,
    ) == ("data", "set", "tokenizer", 1, 8)


def test_more_parts_than_files_may_be_open(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Each part that is in use holds descriptors: read in any order, all are read, and each is
    verified once.
    """
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 2 * max(map(int, os.listdir("/dev/fd"))) + 64
    parts = [[[number + 1] * 4] for number in range(most // 4)]
    folder = write(tmp_path, [parts, parts])
    request.addfinalizer(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limits))
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
    rows = open_rows(folder, "train", 4, pad_last=False, by_part=True)
    for _ in range(2):
        assert [row.tokens[0] - 1 for row in map(rows.row, range(len(rows)))] == 2 * list(
            range(len(parts))
        )
    touched = [rows.touched.get_nowait() for _ in range(rows.touched.qsize())]
    assert len(touched) == len(set(touched)) == 4 * len(parts)
