"""Every format gives the same texts; whatever is wrong with a record is named and the next one is
still read.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import tarfile
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.base.errors import WrongInput
from ingot.data.documents import records as items_module
from ingot.data.documents.kinds import DocumentExtractor
from ingot.data.documents.records import BadRecord, ParsedDocument
from ingot.data.sources import compressed as compressed_module
from ingot.data.sources import readers as json_texts
from ingot.data.sources.compressed import decompressed
from ingot.data.sources.readers import parse_file
from ingot.data.sources.source_file import Format
from tests.exhaustive import examples

TEXTS = ["one", 'two "quoted", with\nlines\tand tabs', "金 🔥", " spaces kept "]


def read(
    data: bytes, kind: Format, column: str = "text", path: str = "file"
) -> list[ParsedDocument | BadRecord]:
    return list(parse_file(io.BytesIO(data), path, kind, DocumentExtractor(column)))


def texts(items: list[ParsedDocument | BadRecord]) -> list[str]:
    return [item.text for item in items if isinstance(item, ParsedDocument)]


def bad(items: list[ParsedDocument | BadRecord]) -> list[tuple[int, str]]:
    return [(item.row, item.reason) for item in items if isinstance(item, BadRecord)]


def jsonl(*values: Any) -> bytes:
    return "".join(json.dumps(value, ensure_ascii=False) + "\n" for value in values).encode()


def parquet(values: Any, kind: pa.DataType | None = None, **options: Any) -> bytes:
    stream = io.BytesIO()
    pq.write_table(
        pa.table({"id": pa.array(range(len(values))), "text": pa.array(values, kind)}),
        stream,
        **options,
    )
    return stream.getvalue()


LINES = jsonl(*({"id": number, "text": text} for number, text in enumerate(TEXTS)))
LIST = json.dumps([{"text": text} for text in TEXTS], indent=1).encode()
CSV = (
    b'id,text\n0,one\n1,"two ""quoted"", with\nlines\tand tabs"\n2,'
    + "金 🔥".encode()
    + b"\n3, spaces kept \n"
)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (LINES, "jsonl"),
        (LINES[:-1], "jsonl"),
        (b"\xef\xbb\xbf" + LINES, "jsonl"),
        (LINES.replace(b"\n", b"\r\n"), "jsonl"),
        (b"\n\n" + LINES, "jsonl"),
        (LIST, "json"),
        (LINES, "json"),
        (b"\xef\xbb\xbf" + LIST, "json"),
        (CSV, "csv"),
        (b"\xef\xbb\xbf" + CSV, "csv"),
        (parquet(TEXTS), "parquet"),
        (parquet(TEXTS, pa.large_string()), "parquet"),
        (parquet(TEXTS, pa.binary()), "parquet"),
        (
            parquet(pa.array(TEXTS * 2).dictionary_encode())[:0]
            or parquet(TEXTS, pa.dictionary(pa.int32(), pa.string())),
            "parquet",
        ),
        (parquet(TEXTS, row_group_size=2), "parquet"),
    ],
)
def test_all_formats_give_the_same_texts(data: bytes, kind: Format) -> None:
    items = read(data, kind)
    assert texts(items) == TEXTS
    assert not bad(items)


def test_rows_are_lines_or_numbers() -> None:
    assert [item.row for item in read(b"\n" + LINES, "jsonl")] == [2, 3, 4, 5]
    assert [item.row for item in read(CSV, "csv")] == [
        2,
        3,
        5,
        6,
    ], "a quoted line break moves the lines on"
    assert (
        [item.row for item in read(LIST, "json")]
        == [item.row for item in read(parquet(TEXTS), "parquet")]
        == [1, 2, 3, 4]
    )


def test_plain_text_is_one_document() -> None:
    assert texts(read(b"\xef\xbb\xbfa\r\nb\n", "text")) == ["a\r\nb\n"]
    assert bad(read(b"ab\xff", "text")) == [(1, "invalid UTF-8")]
    assert bad(read(b" \n", "text")) == [(1, "empty text")]


def test_what_is_valid_utf8_and_no_text() -> None:
    """An archive would be one text with its headers and NULs, and so would UTF-16 of English."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        member = tarfile.TarInfo("a.txt")
        member.size = 5
        tar.addfile(member, io.BytesIO(b"words"))
    for data, path in (
        (archive.getvalue(), "a.tar"),
        (gzip.compress(archive.getvalue()), "a.tar.gz"),
    ):
        assert list(map(str, read(data, "text", path=path))) == [
            "not text (a tar archive; unpack it)"
        ]
    assert bad(read("words".encode("utf-16-le"), "text")) == [(1, "not text")]
    assert texts(read(jsonl({"text": "a\0b"}), "jsonl")) == ["a\0b"]


@pytest.mark.parametrize("kind", ["csv", "tsv"])
def test_a_header_that_names_what_is_read_twice_is_refused(kind: Format) -> None:
    data = "id,text,id,text\n0,a,1,b\n".replace(",", "," if kind == "csv" else "\t").encode()
    with pytest.raises(WrongInput, match="file has 2 columns `text`; rename or remove the others"):
        read(data, kind)
    assert texts(read(data.replace(b"text", b"note", 1), kind)) == ["b"]


def test_quotes_of_csv_that_are_never_closed() -> None:
    """As of a download that broke, and of a stray quote: no rows are taken for part of a text."""
    cut = read(b'id,text\n1,whole\n2,"cut he', "csv")
    assert texts(cut) == ["whole"]
    assert str(cut[1]) == (
        "broken row (the file ends within quotes that row 3 opened; the rest of the file is not read)"
    )
    (headless,) = read(b'id,"text\n1,a\n', "csv")
    assert isinstance(headless, BadRecord)
    assert headless.ends_file
    stray = read(b'id,text\n1,a\n2,"open\n3,b\n4,"c"\n5,6" disk\n6,"x ""y"""\n', "csv")
    assert texts(stray) == ["a", '6" disk', 'x "y"'], "quotes within a field without any are text"
    assert [str(item) for item in stray if isinstance(item, BadRecord)] == [
        "broken row (',' expected after '\"', in quotes up to line 5)"
    ]


def test_blanks_behind_closing_quotes_of_csv_are_none_of_the_text() -> None:
    found = read(
        b'id,text,n\n1,"a, ""b""" ,2\r\n"2"\t,c,"3" \n3,"d" e,4\n4,"f" ,5,6\n5,"g" ,', "csv"
    )
    assert texts(found) == ['a, "b"', "c", "g"]
    assert bad(found) == [(4, "broken row"), (5, "broken row")]


def test_tsv_fields_are_plain() -> None:
    data = b'text\tlabel\n"open quote\t1\nplain\t0\n'
    assert texts(read(data, "tsv")) == ['"open quote', "plain"]


def test_every_bad_line_is_named_and_the_rest_is_read() -> None:
    lines = [
        b'{"text": "good 1"}',
        b"{broken",
        b'{"text": "\xff"}',
        b'{"title": "x"}',
        b'{"text": null}',
        b'{"text": 3}',
        b'["text"]',
        b'{"text": ""}',
        b'{"text": " \\n"}',
        b'{"text": "\\ud800"}',
        b"1" * 5000,
        b"[" * 100_000,
        b'{"text": "good 2"}',
    ]
    items = read(b"\n".join(lines), "jsonl")
    assert texts(items) == ["good 1", "good 2"]
    reasons = [
        "broken JSON",
        "invalid UTF-8",
        "no `text`",
        "null `text`",
        "`text` is not text",
        "not a JSON object",
        "empty text",
        "empty text",
        "invalid UTF-8",
        "broken JSON",
        "broken JSON",
    ]
    assert bad(items) == list(enumerate(reasons, start=2))
    missing = items[3]
    assert isinstance(missing, BadRecord)
    assert missing.keys == ("title",)


def test_a_line_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(items_module, "LARGEST_BYTES", 50)
    items = read(jsonl({"text": "a"}, {"text": "b" * 300}, {"text": "c"}), "jsonl")
    assert (texts(items), bad(items)) == (["a", "c"], [(2, "too large")])
    assert bad(read(b"x" * 51, "text")) == [(1, "too large")]


def test_a_broken_list_gives_what_stands_before() -> None:
    items = read(b'[{"text": "a"}, {"text": "b"}, {"text" "c"}, {"text": "d"}]', "json")
    assert (texts(items), bad(items)) == (["a", "b"], [(3, "broken JSON")])
    cut = read(LIST[:-20], "json")
    assert (texts(cut), bad(cut)) == (TEXTS[:3], [(4, "broken JSON")])


@settings(max_examples=examples(25, 50), deadline=None)
@given(
    st.lists(
        st.dictionaries(
            st.text(max_size=3), st.text(max_size=20) | st.integers() | st.none(), max_size=3
        ),
        max_size=8,
    ),
    st.integers(1, 12),
)
def test_lists_decode_alike_in_windows_of_any_size(
    values: list[dict[str, Any]], window: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_texts, "JSON_CHUNK_BYTES", window)
        listed = read(
            json.dumps([{**value, "text": "x"} for value in values], ensure_ascii=False).encode(
                "utf-8", "surrogatepass"
            ),
            "json",
        )
    assert texts(listed) == ["x"] * len(values)


@settings(max_examples=examples(66, 200), deadline=None)
@given(st.binary(max_size=200), st.sampled_from(["jsonl", "json", "csv", "tsv", "text", "parquet"]))
def test_no_bytes_crash_a_reader(data: bytes, kind: Format) -> None:
    for prefix in (b"", b'{"text": "', b"text,b\n"):
        try:
            items = read(prefix + data, kind)
        except WrongInput:
            continue
        for item in items:
            assert isinstance(item, BadRecord) or item.text.encode()


def test_bad_rows_of_tables() -> None:
    items = read(b"text,b\nfine,1\nlonely\na,b,c\n\n\xff,2\n,3\nlast,4\n", "csv")
    assert texts(items) == ["fine", "last"]
    assert bad(items) == [
        (3, "broken row"),
        (4, "broken row"),
        (6, "invalid UTF-8"),
        (7, "empty text"),
    ]


def test_a_large_field() -> None:
    assert texts(read(b"text\n" + b"x" * 300_000, "csv")) == ["x" * 300_000]


@pytest.mark.parametrize(
    ("data", "kind", "message"),
    [
        (b"a,b\n1,2\n", "csv", "file has no column `text`; it has a, b: set `text`"),
        (b"text;b\n1;2\n", "csv", "file has semicolons between its columns \\(text;b\\); save it"),
        (b"a\tb\n1\t2\n", "tsv", "it has a, b"),
        (parquet([1, 2]), "parquet", "column `text` holds int64, not text"),
    ],
)
def test_a_table_without_the_column(data: bytes, kind: Format, message: str) -> None:
    with pytest.raises(WrongInput, match=message):
        read(data, kind)


def compressed(ending: str, data: bytes) -> bytes:
    return {".gz": gzip.compress, ".zst": zstandard.compress, ".bz2": bz2.compress}[ending](data)


@pytest.mark.parametrize("ending", [".gz", ".zst", ".bz2"])
def test_compressed(ending: str) -> None:
    assert texts(read(compressed(ending, LINES), "jsonl", path=f"x.jsonl{ending}")) == TEXTS
    several = compressed(ending, LINES) + compressed(ending, LINES)
    assert texts(read(several, "jsonl", path=f"x.jsonl{ending}")) == TEXTS * 2


@pytest.mark.parametrize("ending", [".gz", ".zst", ".bz2"])
def test_a_frame_damaged_where_it_begins_ends_no_file_in_silence(ending: str) -> None:
    frame = compressed(ending, LINES)
    (*whole, cut) = read(frame + b"\1" * 10 + frame[10:], "jsonl", path=f"x.jsonl{ending}")
    assert texts(whole) == TEXTS
    assert isinstance(cut, BadRecord)
    assert cut.reason == "broken compression"


def test_padding_behind_a_stream_of_bzip2_is_no_damage_and_nothing_is_no_stream() -> None:
    """As bunzip2 has it."""
    stream = bz2.compress(LINES)
    for padding in (bytes(512), b"\n"):
        padded = stream + padding
        assert texts(read(padded, "jsonl", path="a.jsonl.bz2")) == TEXTS
        assert texts(read(padded + stream, "jsonl", path="a.jsonl.bz2")) == TEXTS * 2
    assert bad(read(b"", "jsonl", path="a.jsonl.bz2")) == [(1, "broken compression")]


def test_frames_with_a_long_window() -> None:
    """As `zstd --long=31` writes; the second frame is opened anew."""
    long = zstandard.ZstdCompressionParameters(window_log=31, strategy=1, hash_log=6, chain_log=6)
    compressor = zstandard.ZstdCompressor(compression_params=long).compressobj()
    frame = compressor.compress(LINES) + compressor.flush()
    assert zstandard.get_frame_parameters(frame).window_size == 1 << 31
    assert texts(read(frame * 2, "jsonl", path="a.jsonl.zst")) == TEXTS * 2


@pytest.mark.parametrize("ending", [".gz", ".zst", ".bz2"])
def test_a_few_bytes_that_stand_for_many_take_the_memory_of_what_is_read(
    ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compressed_module, "ZSTD_INPUT_BYTES", 64)
    large = 1 << 24
    stream = decompressed(io.BytesIO(compressed(ending, bytes(large))), f"x{ending}")
    tracemalloc.start()
    try:
        assert stream.read(10) == bytes(10)
        assert tracemalloc.get_traced_memory()[1] < large / 4
    finally:
        tracemalloc.stop()
    assert len(stream.read()) == large - 10, "nothing is left out"


@pytest.mark.parametrize("ending", [".gz", ".zst", ".bz2"])
@pytest.mark.parametrize("damage", ["truncated", "garbage"])
def test_broken_compression_is_named(ending: str, damage: str) -> None:
    data = compressed(
        ending, jsonl(*({"text": f"{number} {number * 7919 % 10007}"} for number in range(3000)))
    )
    data = (
        data[: len(data) * 2 // 3]
        if damage == "truncated"
        else data + b"garbage that is long enough"
    )
    items = read(data, "jsonl", path=f"x{ending}")
    if ending == ".gz" and damage == "garbage":
        assert len(texts(items)) == 3000
    assert bad(items)[-1][1] == "broken compression"
    assert all(text.split()[0] == str(number) for number, text in enumerate(texts(items)))


@pytest.mark.parametrize("ending", [".gz", ".zst", ".bz2"])
def test_what_is_not_compressed_at_all(ending: str) -> None:
    assert bad(read(b"no such thing, but long enough", "jsonl", path=f"x{ending}")) == [
        (1, "broken compression")
    ]


def test_memory_stays_flat(tmp_path: Path) -> None:
    """A megabyte of window, however long the list."""
    window = json_texts._Text(
        io.BytesIO(b"[" + b",".join([b'{"text": "abcdefghij"}'] * 300_000) + b"]")
    )
    decoder = json.JSONDecoder()
    longest = 0
    while window.skip("[], "):
        window.take(decoder)
        longest = max(longest, len(window._window))
    assert longest <= 2 * json_texts.JSON_CHUNK_BYTES
