"""Parquet and Arrow: what is read of a file, and what is told of one that is damaged."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ingot.base.errors import WrongInput
from ingot.data.documents.kinds import DocumentExtractor
from ingot.data.documents.records import BadRecord, ParsedDocument
from ingot.data.sources import tables
from ingot.data.sources.presence import with_presence
from ingot.data.sources.readers import parse_file
from ingot.data.sources.source_file import Format
from tests.data.sources.test_readers import TEXTS, bad, parquet, read, texts


def arrow_file(table: pa.Table) -> bytes:
    stream = io.BytesIO()
    with pa.ipc.new_file(stream, table.schema) as writer:
        writer.write_table(table)
    return stream.getvalue()


def arrow_stream(table: pa.Table) -> bytes:
    stream = io.BytesIO()
    with pa.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)
    return stream.getvalue()


def parquet_file(table: pa.Table) -> bytes:
    stream = io.BytesIO()
    pq.write_table(table, stream)
    return stream.getvalue()


TURN = ["role", "content"]
FAR = pa.array([19_000, 2_932_897], pa.int32()).view(pa.date32())
"""Python has no dates after the year 9999."""


@pytest.mark.parametrize(
    ("written", "kind"),
    [(parquet_file, "parquet"), (arrow_file, "arrow")],
    ids=["parquet", "arrow"],
)
def test_columns_beside_chats_are_not_read(
    written: Callable[[pa.Table], bytes], kind: Format
) -> None:
    talk = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]] * 2
    extractor = DocumentExtractor(documents="chat", columns={"messages": "talk"})

    def parsed(**columns: Any) -> list[ParsedDocument | BadRecord]:
        data = written(pa.table({**columns, "day": FAR}))
        return list(parse_file(io.BytesIO(data), "file", kind, extractor))

    assert len(texts(parsed(talk=talk))) == 2
    (missing, _) = parsed(title=["x"] * 2)
    assert isinstance(missing, BadRecord)
    assert missing.keys == ("title", "day"), "columns that are not read are told all the same"
    turn = pa.struct([("role", pa.string()), ("content", pa.string()), ("day", pa.date32())])
    dated = [[{"role": "user", "content": "a", "day": day}] for day in (None, 2_932_897)]
    read_all = parsed(talk=pa.array(dated, pa.list_(turn)))
    assert bad(read_all) == [(1, "no assistant turn"), (2, "not JSON")]


@pytest.mark.parametrize(
    ("written", "kind"),
    [(parquet_file, "parquet"), (arrow_file, "arrow")],
    ids=["parquet", "arrow"],
)
def test_images_are_no_values_of_python_and_told_where_there_are_any(
    written: Callable[[pa.Table], bytes], kind: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = {"bytes": b"\x89PNG", "path": None}
    several = [[image], [], None, [None], [None, image], [{**image, "path": "a"}]]
    talk = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]] * 6
    one = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    read, seen = tables._records, list[pa.DataType]()

    def looked_at(batch: pa.RecordBatch, unread: Any) -> list[Any]:
        seen.append(batch.schema.types[-1])
        return read(batch, unread)

    monkeypatch.setattr(tables, "_records", looked_at)
    for name, values, type_, rows in (
        ("images", several, pa.list_(one), [1, 5, 6]),
        ("photos", several, pa.large_list(one), [1, 5, 6]),
        ("images", several, pa.list_view(one), [1, 5, 6]),
        ("images", several, pa.large_list_view(one), [1, 5, 6]),
        ("image", [image, *[None] * 5], one, [1]),
        ("image", [b"x", *[None] * 5], pa.large_binary(), [1]),
    ):
        renamed = {"images": name} if name == "photos" else {}
        extractor = DocumentExtractor(documents="chat", columns=renamed)
        data = written(pa.table({"messages": talk, name: pa.array(values, type_)}))
        read_all = list(parse_file(io.BytesIO(data), "file", kind, extractor))
        assert bad(read_all) == [(row, f"`{name}` is not read") for row in rows]
    assert set(seen) == {pa.bool_()}


def test_files_are_counted_for_the_rows_that_have_them_however_the_lists_lie() -> None:
    files = pa.array([b"a", b"b", None], pa.binary())
    none_first = pa.array([True, False, False])
    lists = {
        "beneath a null": pa.ListArray.from_arrays(
            pa.array([0, 1, 2, 3], pa.int32()), files, mask=none_first
        ),
        "of a fixed size": pa.FixedSizeListArray.from_arrays(files, 1, mask=none_first),
        "out of order": pa.ListViewArray.from_arrays(
            pa.array([2, 0, 1], pa.int32()), pa.array([1, 2, 0], pa.int32()), files
        ),
        "shared": pa.ListViewArray.from_arrays(
            pa.array([2, 0, 0], pa.int32()), pa.array([1, 1, 2], pa.int32()), files
        ),
    }
    told = {
        name: with_presence(pa.record_batch({"images": column}), ["images"])["images"].to_pylist()
        for name, column in lists.items()
    }
    assert told == {
        "beneath a null": [None, True, None],
        "of a fixed size": [None, True, None],
        "out of order": [None, True, None],
        "shared": [None, True, True],
    }


def test_parquet_texts_that_are_none() -> None:
    values = pa.array([b"a", b"\xff", None, b""], pa.binary()).view(pa.binary())
    stream = io.BytesIO()
    # A file that calls bytes a string, as careless writers make them.
    pq.write_table(
        pa.table({"text": pa.Array.from_buffers(pa.string(), 4, values.buffers())}), stream
    )
    items = read(stream.getvalue(), "parquet")
    assert texts(items) == ["a"]
    assert bad(items) == [(2, "invalid UTF-8"), (3, "null `text`"), (4, "empty text")]


@pytest.mark.parametrize(
    ("written", "kind"),
    [(parquet_file, "parquet"), (arrow_file, "arrow")],
    ids=["parquet", "arrow"],
)
def test_a_table_that_is_cut_short_is_no_bad_record(
    written: Callable[[pa.Table], bytes], kind: Format
) -> None:
    """Its footer, without which nothing is read, comes last."""
    data = written(pa.table({"text": TEXTS * 100}))
    (cut,) = read(data[: len(data) // 2], kind)
    assert isinstance(cut, BadRecord)
    assert cut.ends_file


def test_what_follows_the_end_of_a_stream_is_told() -> None:
    """Zeros over a header say that it is the end, and so does the first of two streams."""
    whole = arrow_stream(pa.table({"text": TEXTS}))
    assert texts(read(whole, "arrow")) == TEXTS
    *read_all, told = read(whole + whole, "arrow")
    assert texts(read_all) == TEXTS
    assert (told.row, isinstance(told, BadRecord) and told.ends_file) == (5, True)


@pytest.mark.parametrize("written", [arrow_file, arrow_stream])
def test_a_value_beyond_its_batch_is_not_read(written: Callable[[pa.Table], bytes]) -> None:
    """It would be read from anywhere in memory, which may end the process."""
    ends, beyond = struct.pack("<3i", 0, 3, 8), struct.pack("<3i", 0, 3, 800)
    data = written(pa.table({"text": ["one", "three"]}))
    assert data.count(ends) == 1
    (told,) = read(data.replace(ends, beyond), "arrow")
    assert bad([told]) == [(1, "broken Arrow")]


SAID = pa.array([b"a", b"b", b"\xff", b"d"], pa.binary()).view(pa.string())
"""Arrow makes texts of bytes that are not UTF-8, and says so only when asked."""
COUNTED = pa.DictionaryArray.from_arrays(pa.array(range(4), pa.int32()), SAID, safe=False)
AS_TEXT = {
    "string": SAID,
    "large_string": SAID.view(pa.binary()).cast(pa.large_binary()).view(pa.large_string()),
    "string_view": SAID.view(pa.binary()).cast(pa.binary_view()).view(pa.string_view()),
    "dictionary": COUNTED,
}


@pytest.mark.parametrize("said", AS_TEXT.values(), ids=AS_TEXT)
@pytest.mark.parametrize("written", [arrow_file, arrow_stream])
def test_a_text_that_is_not_utf8_costs_its_row_alone(
    written: Callable[[pa.Table], bytes], said: pa.Array
) -> None:
    items = read(written(pa.table({"text": said})), "arrow")
    assert (texts(items), bad(items)) == (["a", "b", "d"], [(3, "invalid UTF-8")])


TWOS, BEGINS = pa.array([2, 2], pa.int32()), pa.array([0, 2], pa.int32())
CHATS_OF: dict[str, Callable[[pa.Array], pa.Array]] = {
    "list": lambda turns: pa.ListArray.from_arrays(pa.array([0, 2, 4], pa.int32()), turns),
    "large_list": lambda turns: pa.LargeListArray.from_arrays(pa.array([0, 2, 4]), turns),
    "fixed_size_list": lambda turns: pa.FixedSizeListArray.from_arrays(turns, 2),
    "list_view": lambda turns: pa.ListViewArray.from_arrays(BEGINS, TWOS, turns),
    "large_list_view": lambda turns: pa.LargeListViewArray.from_arrays(
        BEGINS.cast(pa.int64()), TWOS.cast(pa.int64()), turns
    ),
}


@pytest.mark.parametrize("chats_of", CHATS_OF.values(), ids=CHATS_OF)
@pytest.mark.parametrize("said", AS_TEXT.values(), ids=AS_TEXT)
def test_a_text_in_a_chat_that_is_not_utf8_costs_its_row_alone(
    said: pa.Array, chats_of: Callable[[pa.Array], pa.Array]
) -> None:
    turns = pa.StructArray.from_arrays([pa.array(["user", "assistant"] * 2), said], TURN)
    data = arrow_stream(pa.table({"messages": chats_of(turns)}))
    items = list(parse_file(io.BytesIO(data), "file", "arrow", DocumentExtractor(documents="chat")))
    assert (len(texts(items)), bad(items)) == (1, [(2, "invalid UTF-8")])


@pytest.mark.parametrize(
    ("written", "kind"),
    [(parquet_file, "parquet"), (arrow_stream, "arrow")],
    ids=["parquet", "arrow"],
)
def test_two_columns_of_one_name_are_refused_where_they_are_read(
    written: Callable[[pa.Table], bytes], kind: Format
) -> None:
    columns = [pa.array(["a"]), pa.array(["b"]), pa.array(["c"])]
    twice = written(pa.Table.from_arrays(columns, ["text", "id", "text"]))
    with pytest.raises(WrongInput, match="file has 2 columns `text`; rename or remove the others"):
        read(twice, kind)
    assert texts(read(written(pa.Table.from_arrays(columns, ["id", "text", "id"])), kind)) == ["b"]


def test_a_page_whose_checksum_is_another_is_told() -> None:
    data = parquet(
        ["one", "three"], compression="none", use_dictionary=False, write_page_checksum=True
    )
    assert texts(read(data, "parquet")) == ["one", "three"]
    items = read(data.replace(b"three", b"th!ee"), "parquet")
    assert bad(items) == [(1, "broken Parquet")]


def test_broken_parquet() -> None:
    assert bad(read(b"PAR1 and nothing", "parquet")) == [(1, "broken Parquet")]
    data = bytearray(
        parquet(
            [f"text {number} {'x' * 100}" for number in range(5000)],
            compression="zstd",
            row_group_size=2500,
        )
    )
    data[len(data) // 3 : len(data) // 3 + 200] = b"\0" * 200
    items = read(bytes(data), "parquet")
    assert [reason for _, reason in bad(items)] == ["broken Parquet"]
