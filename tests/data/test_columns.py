"""Megatron's layout to the byte, and a reader that refuses what does not fit together."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.base.errors import WrongInput
from ingot.data.columns import HEADER, Column, ColumnWriter, bin_path, idx_path, token_dtype

RECORDS = [[1, 2, 3], [4], [], [5, 65_000]]


def write(prefix: Path, records: list[list[int]], vocab_size: int = 65_100) -> Column:
    with ColumnWriter(prefix, token_dtype(vocab_size)) as writer:
        for record in records:
            writer.append(np.array(record, np.int32), np.array([len(record)]))
    return Column(prefix)


def test_the_layout_to_the_byte(tmp_path: Path) -> None:
    """Written out by hand from the specification; megatron-core's own reader was seen to open such files."""
    write(tmp_path / "x", RECORDS)
    assert bin_path(tmp_path / "x").read_bytes() == struct.pack("<6H", 1, 2, 3, 4, 5, 65_000)
    expected = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 4, 5)
    expected += struct.pack("<4i", 3, 1, 0, 2) + struct.pack("<4q", 0, 6, 8, 8) + struct.pack("<5q", 0, 1, 2, 3, 4)
    assert idx_path(tmp_path / "x").read_bytes() == expected


def test_large_vocabularies_take_int32(tmp_path: Path) -> None:
    assert (token_dtype(65_499), token_dtype(65_500)) == (np.dtype("uint16"), np.dtype("int32"))
    column = write(tmp_path / "x", [[1, 128_000]], 128_256)
    assert column.dtype == np.int32
    assert column[0].tolist() == [1, 128_000]
    assert idx_path(tmp_path / "x").read_bytes()[17] == 4


def test_records_come_back(tmp_path: Path) -> None:
    column = write(tmp_path / "x", RECORDS)
    assert [column[record].tolist() for record in range(len(column))] == RECORDS
    assert column.elements == 6
    assert column.slice(2, 5).tolist() == [3, 4, 5]


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(0, 5), max_size=30), data=st.data())
def test_starts_are_where_records_begin(tmp_path_factory: pytest.TempPathFactory, lengths: list[int], data: st.DataObject) -> None:
    column = write(tmp_path_factory.mktemp("column") / "x", [[1] * length for length in lengths])
    begin = data.draw(st.integers(0, sum(lengths)))
    end = data.draw(st.integers(begin, sum(lengths)))
    expected = [sum(lengths[:index]) for index in range(len(lengths)) if begin <= sum(lengths[:index]) < end]
    assert column.starts(begin, end).tolist() == expected


def test_nothing_appears_before_the_end(tmp_path: Path) -> None:
    def stopped() -> None:
        with ColumnWriter(tmp_path / "x", np.dtype("uint16")) as writer:
            writer.append(np.array([1]), np.array([1]))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert not list(tmp_path.iterdir())


def test_an_empty_column(tmp_path: Path) -> None:
    column = write(tmp_path / "x", [])
    assert (len(column), column.elements, column.starts(0, 5).tolist()) == (0, 0, [])


@pytest.mark.parametrize(("change", "message"), [
    (lambda index, data: (index[:-1], data), r"x\.idx has \d+ bytes, its header says"),
    (lambda index, data: (index[:20], data), r"x\.idx is cut short"),
    (lambda index, data: (b"", data), r"x\.idx is cut short at 0 bytes"),
    (lambda index, data: (b"X" + index[1:], data), r"x\.idx is not a Megatron index of version 1"),
    (lambda index, data: (index[:9] + b"\x02" + index[10:], data), r"x\.idx is not a Megatron index of version 1"),
    (lambda index, data: (index[:17] + b"\x63" + index[18:], data), r"x\.idx is not a Megatron index of version 1"),
    (lambda index, data: (index, data[:-1]), r"x\.bin has 11 bytes, its index says 12"),
    (lambda index, data: (index[:74] + b"\x09" + index[75:], data + b"x"), r"x\.bin has 13 bytes, its index says 13"),
    (lambda index, data: (index, data + b"xx"), r"x\.bin has 14 bytes, its index says 12"),
    (lambda index, data: (None, data), r"x\.idx is missing; run `ingot prepare` again"),
    (lambda index, data: (index, None), r"x\.bin is missing"),
])
def test_what_does_not_fit_is_named(tmp_path: Path, change: object, message: str) -> None:
    write(tmp_path / "x", RECORDS)
    assert callable(change)
    paths = idx_path(tmp_path / "x"), bin_path(tmp_path / "x")
    for path, content in zip(paths, change(*(path.read_bytes() for path in paths)), strict=True):
        path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(WrongInput, match=message):
        Column(tmp_path / "x")


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=120), st.integers(0, 3), st.integers(0, 3))
def test_no_index_crashes_the_reader(tmp_path_factory: pytest.TempPathFactory, noise: bytes, records: int, documents: int) -> None:
    prefix = tmp_path_factory.mktemp("noise") / "x"
    bin_path(prefix).write_bytes(b"\0" * 8)
    for content in (noise, HEADER.pack(b"MMIDIDX\x00\x00", 1, 8, records, documents) + noise):
        idx_path(prefix).write_bytes(content)
        try:
            column = Column(prefix)
        except WrongInput:
            continue
        assert column.elements == 4
