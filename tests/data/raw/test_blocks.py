"""Files are cut at newlines, and what is read of the blocks is what is read of the whole file."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.data.documents import records as items
from ingot.data.documents.kinds import DocumentExtractor
from ingot.data.documents.records import BadRecord, ParsedDocument
from ingot.data.raw import ingest_tasks as blocks
from ingot.data.raw.ingest_tasks import (
    LARGEST_BYTES,
    SMALLEST_BYTES,
    FileBlock,
    block_bytes,
    cut_into_tasks,
)
from ingot.data.sources.readers import json_lines, parse_file
from ingot.data.sources.source_file import Format, SourceFile


def file_of(path: Path, kind: Format = "jsonl") -> SourceFile:
    return SourceFile(str(path), path.name, kind, {"path": str(path), "bytes": path.stat().st_size})


def read(piece: FileBlock) -> list[ParsedDocument | BadRecord]:
    with Path(piece.file.path).open("rb") as stream:
        stream.seek(piece.begin)
        assert piece.end is not None
        return list(
            parse_file(
                stream,
                piece.file.path,
                "jsonl",
                DocumentExtractor(),
                piece.row,
                piece.end - piece.begin,
            )
        )


LINES = st.one_of(
    st.sampled_from(
        [
            b"",
            b" ",
            b"{",
            b'{"text": "x"}',
            b'{"text": "\xff"}',
            b'{"text": "' + b"long " * 9 + b'"}',
            b"\r",
        ]
    ),
    st.binary(max_size=9),
)


@given(
    st.lists(LINES, max_size=30),
    st.integers(1, 60),
    st.integers(1, 40),
    st.sampled_from([20, 1 << 30]),
)
def test_blocks_give_what_the_whole_file_gives(
    tmp_path_factory: pytest.TempPathFactory,
    lines: list[bytes],
    block: int,
    chunk: int,
    largest: int,
) -> None:
    path = tmp_path_factory.mktemp("blocks") / "a.jsonl"
    path.write_bytes(b"\n".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "CHUNK_BYTES", chunk)
        patch.setattr(items, "LARGEST_BYTES", largest)
        pieces = list(blocks._blocks(file_of(path), block))
        assert [item for piece in pieces for item in read(piece)] == list(
            json_lines(io.BytesIO(path.read_bytes()), DocumentExtractor())
        )
    data = path.read_bytes()
    assert b"".join(data[piece.begin : piece.end] for piece in pieces) == data
    assert all(piece.bytes >= block for piece in pieces[:-1])
    assert all(piece.row == data[: piece.begin].count(b"\n") for piece in pieces)


def test_only_plain_local_lines_are_cut_and_small_files_go_together(tmp_path: Path) -> None:
    files = []
    for name, size in (
        ("a.txt", 3),
        ("b.txt", 3),
        ("c.jsonl", 40),
        ("d.jsonl.gz", 40),
        ("e.parquet", 40),
        ("f.txt", 3),
        ("g.jsonl", 0),
    ):
        (tmp_path / name).write_bytes(b"{}\n" * (size // 3 + 1) if size == 40 else b"x" * size)
        kind: Format = "jsonl" if "jsonl" in name else "parquet" if "parquet" in name else "text"
        files.append(file_of(tmp_path / name, kind))
    assert [
        [(piece.file.name, piece.begin) for piece in task] for task in cut_into_tasks(files, 18)
    ] == [
        [("a.txt", 0), ("b.txt", 0), ("c.jsonl", 0)],
        [("c.jsonl", 18)],
        [("c.jsonl", 36), ("d.jsonl.gz", 0)],
        [("e.parquet", 0)],
        [("f.txt", 0), ("g.jsonl", 0)],
    ]


def test_what_tells_no_size_is_a_task_of_its_own() -> None:
    shares = [SourceFile("hf:x", f"x-{number}", "hub", {"path": "hf:x"}) for number in range(3)]
    assert [len(task) for task in cut_into_tasks(shares, 100)] == [1, 1, 1]


def test_the_size_of_blocks_follows_the_data() -> None:
    assert block_bytes(0) == block_bytes(10**9) == SMALLEST_BYTES
    assert block_bytes(10**10) == 156_250_000
    assert block_bytes(10**13) == LARGEST_BYTES


def test_a_large_line_is_one_block(tmp_path: Path) -> None:
    line = json.dumps({"text": "x" * 3_000_000})
    (tmp_path / "a.jsonl").write_text(f"{line}\n{line}\n")
    pieces = list(blocks._blocks(file_of(tmp_path / "a.jsonl"), 1000))
    assert [(piece.begin, piece.row) for piece in pieces] == [(0, 0), (len(line) + 1, 1)]
