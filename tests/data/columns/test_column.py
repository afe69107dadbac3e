"""Megatron's layout to the byte, and a reader that refuses what does not fit together."""

from __future__ import annotations

import errno
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.base.errors import Failed, WrongInput
from ingot.data.columns.column import (
    HEADER,
    MAGIC,
    Column,
    ColumnWriter,
    bin_path,
    idx_path,
    token_dtype,
)
from tests.exhaustive import examples

Found = TypeVar("Found")
RECORDS = [[1, 2, 3], [4], [], [5, 65_000]]


def write(prefix: Path, records: list[list[int]], vocab_size: int = 65_100) -> Column:
    with ColumnWriter(prefix, token_dtype(vocab_size)) as writer:
        flat = [token for record in records for token in record]
        writer.append(
            np.array(flat, np.int32), np.array([len(record) for record in records], np.int32)
        )
    return Column(prefix)


def test_the_layout_to_the_byte(tmp_path: Path) -> None:
    """Written out by hand from the specification; megatron-core's own reader was seen to open such
    files.
    """
    write(tmp_path / "x", RECORDS)
    assert bin_path(tmp_path / "x").read_bytes() == struct.pack("<6H", 1, 2, 3, 4, 5, 65_000)
    expected = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 4, 5)
    expected += (
        struct.pack("<4i", 3, 1, 0, 2)
        + struct.pack("<4q", 0, 6, 8, 8)
        + struct.pack("<5q", 0, 1, 2, 3, 4)
    )
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


@settings(max_examples=examples(50, 100), deadline=None)
@given(lengths=st.lists(st.integers(0, 5), max_size=30), data=st.data())
def test_starts_are_where_records_begin(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], data: st.DataObject
) -> None:
    column = write(tmp_path_factory.mktemp("column") / "x", [[1] * length for length in lengths])
    begin = data.draw(st.integers(0, sum(lengths)))
    end = data.draw(st.integers(begin, sum(lengths)))
    expected = [
        sum(lengths[:index]) for index in range(len(lengths)) if begin <= sum(lengths[:index]) < end
    ]
    assert column.starts(begin, end) == expected


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
    assert (len(column), column.elements, column.starts(0, 5)) == (0, 0, [])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index, data: (index[:-1], data), r"x\.idx has \d+ bytes, its header says"),
        (lambda index, data: (index[:20], data), r"x\.idx is cut short"),
        (lambda index, data: (b"", data), r"x\.idx is cut short at 0 bytes"),
        (
            lambda index, data: (b"X" + index[1:], data),
            r"x\.idx is not a Megatron index of version 1",
        ),
        (
            lambda index, data: (index[:9] + b"\x02" + index[10:], data),
            r"x\.idx is not a Megatron index of version 1",
        ),
        (
            lambda index, data: (index[:17] + b"\x63" + index[18:], data),
            r"x\.idx is not a Megatron index of version 1",
        ),
        (lambda index, data: (index, data[:-1]), r"x\.bin has 11 bytes, its index says 12"),
        (
            lambda index, data: (index[:74] + b"\x09" + index[75:], data + b"x"),
            r"x\.bin has 13 bytes, its index says 13",
        ),
        (lambda index, data: (index, data + b"xx"), r"x\.bin has 14 bytes, its index says 12"),
        (lambda index, data: (None, data), r"x\.idx is missing; run `ingot prepare --again`"),
        (lambda index, data: (index, None), r"x\.bin is missing"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, change: object, message: str) -> None:
    write(tmp_path / "x", RECORDS)
    assert callable(change)
    paths = idx_path(tmp_path / "x"), bin_path(tmp_path / "x")
    for path, content in zip(paths, change(*(path.read_bytes() for path in paths)), strict=True):
        path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(WrongInput, match=message):
        Column(tmp_path / "x")


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EMFILE, "`ulimit -n`"),
        (errno.ENFILE, "`sysctl fs.file-max`"),
        (errno.ENOMEM, "`sysctl vm.max_map_count`"),
    ],
)
def test_what_the_system_lacks_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, remedy: str
) -> None:
    """Prepared again, the columns would be as many."""
    write(tmp_path / "x", RECORDS)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("ingot.data.columns.column.mmap.mmap", refuse)
    with pytest.raises(Failed, match=f"x.idx cannot be opened: .*{re.escape(remedy)}"):
        Column(tmp_path / "x")


def unless_refused(prefix: Path, read: Callable[[Column], Found]) -> Found | None:
    """What is read; None where it is refused, in words that name the file."""
    try:
        return read(Column(prefix))
    except WrongInput as error:
        message = str(error)
    assert f"{prefix.name}.idx" in message or f"{prefix.name}.bin" in message
    return None


def read_all(column: Column) -> list[list[int]]:
    """Every record, by every way that there is to it; none may lead outside."""
    records = [column[record].tolist() for record in range(len(column))]
    assert (
        [column.span(record)[1] for record in range(len(column))]
        == column.lengths(0, len(column)).tolist()
        == list(map(len, records))
    )
    begins = [column.span(record)[0] for record in range(len(column))]
    assert column.starts(0, column.elements + 1) == begins
    assert [token for record in records for token in record] == column.slice(
        0, column.elements
    ).tolist()
    return records


@settings(max_examples=examples(50, 200))
@given(st.binary(max_size=120), st.integers(0, 3), st.integers(0, 3), st.integers(0, 9))
def test_no_index_crashes_the_reader(
    tmp_path_factory: pytest.TempPathFactory, noise: bytes, records: int, documents: int, code: int
) -> None:
    """Any bytes, and any bytes after a header that promises that many: words, or records that tile
    the file.
    """
    prefix = tmp_path_factory.mktemp("noise") / "x"
    bin_path(prefix).write_bytes(b"\0" * 8)
    size = 12 * records + 8 * documents
    for content in (
        noise,
        HEADER.pack(MAGIC, 1, code, records, documents) + noise,
        HEADER.pack(MAGIC, 1, code, records, documents) + (noise * size)[:size],
    ):
        idx_path(prefix).write_bytes(content)
        unless_refused(prefix, read_all)


@settings(max_examples=examples(50, 150))
@given(
    records=st.lists(st.integers(0, 4), min_size=1, max_size=8),
    many=st.booleans(),
    place=st.integers(0, 10**6),
    value=st.integers(1, 255),
    wide=st.sampled_from([None, "<i", "<q"]),
    number=st.sampled_from([-1, 0, 1, -(2**31), 2**31 - 1, 2**63 - 1, -(2**63), 7]),
)
def test_any_single_corruption_is_named_or_harmless(
    tmp_path_factory: pytest.TempPathFactory,
    records: list[int],
    many: bool,
    place: int,
    value: int,
    wide: str | None,
    number: int,
) -> None:
    """A changed byte, or a number put anywhere: either the very same records, or words that name
    the file.
    """
    prefix = tmp_path_factory.mktemp("corrupt") / "x"
    lengths = records * 550 if many else records
    column = write(prefix, [[1] * length for length in lengths])
    whole = read_all(column)
    index = bytearray(idx_path(prefix).read_bytes())
    if wide is not None and -(2 ** (8 * struct.calcsize(wide) - 1)) <= number < 2 ** (
        8 * struct.calcsize(wide) - 1
    ):
        struct.pack_into(wide, index, place % (len(index) - struct.calcsize(wide)), number)
    else:
        index[place % len(index)] ^= value
    idx_path(prefix).write_bytes(index)
    assert unless_refused(prefix, read_all) in (None, whole)


@settings(max_examples=examples(50, 150))
@given(lengths=st.lists(st.integers(0, 4), min_size=2, max_size=40), data=st.data())
def test_a_false_pointer_never_moves_a_start(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], data: st.DataObject
) -> None:
    """Bisection may meet it; what it is led to is looked at before it is believed."""
    prefix = tmp_path_factory.mktemp("pointer") / "x"
    column = write(prefix, [[1] * length for length in lengths])
    begin = data.draw(st.integers(0, column.elements))
    end = data.draw(st.integers(begin, column.elements))
    expected = column.starts(begin, end)
    index = bytearray(idx_path(prefix).read_bytes())
    pointer = data.draw(st.integers(0, len(lengths) - 1))
    struct.pack_into(
        "<q",
        index,
        HEADER.size + 4 * len(lengths) + 8 * pointer,
        2 * data.draw(st.integers(-5, 200)),
    )
    idx_path(prefix).write_bytes(index)
    assert unless_refused(prefix, lambda found: found.starts(begin, end)) in (None, expected)


def test_blocks_are_proved_one_by_one(tmp_path: Path) -> None:
    """Damage far away is not found by who does not go there, and is found by who does."""
    write(tmp_path / "x", [[1, 2]] * 10_000)
    index = bytearray(idx_path(tmp_path / "x").read_bytes())
    struct.pack_into("<i", index, HEADER.size + 4 * 9_000, 3)
    idx_path(tmp_path / "x").write_bytes(index)
    column = Column(tmp_path / "x")
    assert column[5].tolist() == [1, 2]
    for use in (
        lambda: column[9_001],
        lambda: column.span(9_000),
        lambda: column.starts(18_000, 18_010),
        lambda: column.lengths(0, 10_000),
        column.prove,
    ):
        with pytest.raises(
            WrongInput,
            match=(
                r"x\.idx contradicts itself about where records lie; it is damaged, run `ingot"
                r" prepare --again`"
            ),
        ):
            use()
