"""One file of any format as a stream of texts, each with its row; what cannot be read comes as a `Bad` with its reason.

Memory stays flat: nothing holds more than a batch of rows, or one document.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from ingot.base.errors import WrongInput
from ingot.data.sources import Format

CHUNK_BYTES = 1 << 20
LARGEST_BYTES = 1 << 30
PARQUET_ROWS = 1024
BROKEN_FILE = (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError)


@dataclass(frozen=True, slots=True)
class Item:
    """A text and its row: the line for JSONL, CSV and TSV, the number of the item for a JSON list and Parquet, from 1."""

    row: int
    text: str


@dataclass(frozen=True, slots=True)
class Bad:
    """What could not be read, why in a few words that are counted, and the details of this one."""

    row: int
    reason: str
    detail: str = ""
    keys: tuple[str, ...] = ()
    """The keys that there were, where the wanted one was missing."""

    def __str__(self) -> str:
        return f"{self.reason} ({self.detail})" if self.detail else self.reason


def read_items(stream: IO[bytes], path: str, kind: Format, column: str) -> Iterator[Item | Bad]:
    """The texts of one file. `stream` gives its bytes as stored; `path` tells the compression and is named in errors.

    Raises:
        WrongInput: the file is a table without the column `column`; the columns that there are are named.
    """
    if kind == "parquet":
        yield from _parquet(stream, path, column)
        return
    row = 0
    try:
        for item in _text_formats(_decompressed(stream, path), path, kind, column):
            row = item.row
            yield item
    except BROKEN_FILE as error:
        yield Bad(row + 1, "broken compression", f"{error}; the rest of the file is not read")


def _text_formats(stream: IO[bytes], path: str, kind: Format, column: str) -> Iterator[Item | Bad]:
    if kind == "jsonl":
        return _jsonl(stream, column)
    if kind == "json":
        return _json_list(stream, column)
    if kind == "text":
        return _text(stream)
    return _table(stream, path, kind, column)


def _decompressed(stream: IO[bytes], path: str) -> IO[bytes]:
    if path.lower().endswith(".gz"):
        # No buffer on top: it would read ahead, and lose what stands before a fault.
        return cast("IO[bytes]", gzip.GzipFile(fileobj=stream))
    if path.lower().endswith(".zst"):
        return io.BufferedReader(_ZstdStream(stream), CHUNK_BYTES)
    return stream


class _ZstdStream(io.RawIOBase):
    """Zstandard frames as one stream. The library's own reader takes a truncated file for a whole one; this refuses it."""

    def __init__(self, source: IO[bytes]) -> None:
        self._source, self._open = source, False
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._ready, self._input = memoryview(b""), b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            chunk = self._input or self._source.read(CHUNK_BYTES >> 3)
            if not chunk:
                if self._open:
                    raise EOFError("the file ends within a frame")
                return 0
            self._ready = memoryview(self._frame.decompress(chunk))
            self._open = not self._frame.eof
            self._input = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
        size = min(len(buffer), len(self._ready))
        buffer[:size], self._ready = self._ready[:size], self._ready[size:]
        return size


def _checked(row: int, text: str) -> Item | Bad:
    """A text that can be written as UTF-8 and holds something else than white space."""
    if not text or text.isspace():
        return Bad(row, "empty text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return Bad(row, "invalid UTF-8", f"character {error.start} of the text")
    return Item(row, text)


def _field(row: int, value: Any, column: str) -> Item | Bad:
    """The text under `column` of one JSON value."""
    if not isinstance(value, dict):
        return Bad(row, "not a JSON object", f"it is {type(value).__name__}")
    if column not in value:
        return Bad(row, f"no `{column}`", f"keys: {', '.join(value)}", tuple(value))
    text = value[column]
    if not isinstance(text, str):
        return Bad(row, f"null `{column}`" if text is None else f"`{column}` is not text", "" if text is None else type(text).__name__)
    return _checked(row, text)


def _text(stream: IO[bytes]) -> Iterator[Item | Bad]:
    data = stream.read(LARGEST_BYTES + 1)
    if len(data) > LARGEST_BYTES:
        yield Bad(1, "too large", f"above {LARGEST_BYTES:,} bytes; give it as JSONL")
        return
    try:
        yield _checked(1, data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        yield Bad(1, "invalid UTF-8", f"byte {error.start}")


def _jsonl(stream: IO[bytes], column: str) -> Iterator[Item | Bad]:
    row = 0
    while line := stream.readline(LARGEST_BYTES):
        row += 1
        if row == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if len(line) == LARGEST_BYTES and not line.endswith(b"\n"):
            yield Bad(row, "too large", f"above {LARGEST_BYTES:,} bytes")
            while (rest := stream.readline(LARGEST_BYTES)) and not rest.endswith(b"\n"):
                pass
        elif not line.isspace():
            yield _json_line(row, line, column)


def _json_line(row: int, line: bytes, column: str) -> Item | Bad:
    try:
        return _field(row, json.loads(line.decode()), column)
    except UnicodeDecodeError as error:
        return Bad(row, "invalid UTF-8", f"byte {error.start} of the line")
    except json.JSONDecodeError as error:
        return Bad(row, "broken JSON", f"{error.msg}, column {error.colno}")
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or thousands of nested lists
        return Bad(row, "broken JSON", str(error)[:80])


def _json_list(stream: IO[bytes], column: str) -> Iterator[Item | Bad]:
    """The items of one large list, or of objects that merely follow each other, decoded one by one."""
    decoder, text = json.JSONDecoder(), _Text(stream)
    row = 0
    while text.skip(" \t\r\n,[]\ufeff"):
        row += 1
        try:
            yield _field(row, text.take(decoder), column)
        except (ValueError, RecursionError) as error:
            yield Bad(row, "broken JSON", f"item {row}: {str(error)[:80]}; the rest of the file is not read")
            return


class _Text:
    """A window on a stream of UTF-8 that grows only as far as one JSON value needs."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self._ended = stream, False
        self._decode = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode
        self._window, self._at = "", 0

    def _grow(self) -> None:
        self._window, self._at = self._window[self._at :], 0
        chunk = self._stream.read(max(CHUNK_BYTES, len(self._window)))
        self._ended = not chunk
        self._window += self._decode(chunk, self._ended)

    def skip(self, characters: str) -> bool:
        """Go on to the next character that is none of these; False at the end."""
        while True:
            while self._at < len(self._window) and self._window[self._at] in characters:
                self._at += 1
            if self._at < len(self._window) or self._ended:
                return self._at < len(self._window)
            self._grow()

    def take(self, decoder: json.JSONDecoder) -> Any:
        """The next JSON value. Raises ValueError where there is none."""
        while True:
            try:
                value, end = decoder.raw_decode(self._window, self._at)
                if end < len(self._window) or self._ended:
                    self._at = end
                    return value
            except json.JSONDecodeError as error:
                # A fault near the end of the window, or a string left open, may be only the window's end.
                cut = error.pos > len(self._window) - 16 or error.msg.startswith("Unterminated string")
                if self._ended or not cut or len(self._window) - self._at > LARGEST_BYTES:
                    raise
            self._grow()


def _table(stream: IO[bytes], path: str, kind: Format, column: str) -> Iterator[Item | Bad]:
    """Rows of a CSV file, quoted as RFC 4180 says; of a TSV file, whose fields are plain: quotes in them are text."""
    csv.field_size_limit(sys.maxsize)
    lines = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
    reader = csv.reader(lines) if kind == "csv" else csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
    header = next(reader, None)
    if header is None:
        yield Bad(1, "empty text", "no header line")
        return
    if column not in header:
        raise missing_column(path, column, header)
    place, row = header.index(column), reader.line_num + 1
    while True:
        try:
            fields = next(reader, None)
        except csv.Error as error:
            yield Bad(row, "broken row", str(error))
            fields = []
        if fields is None:
            return
        if fields:
            fits = len(fields) == len(header)
            yield _checked(row, fields[place]) if fits else Bad(row, "broken row", f"{len(fields)} fields, the header has {len(header)}")
        row = reader.line_num + 1


def _parquet(stream: IO[bytes], path: str, column: str) -> Iterator[Item | Bad]:
    try:
        file = pq.ParquetFile(stream)
    except (pa.ArrowException, OSError) as error:
        yield Bad(1, "broken Parquet", str(error)[:120])
        return
    if column not in file.schema_arrow.names:
        raise missing_column(path, column, file.schema_arrow.names)
    kind = file.schema_arrow.field(column).type
    if not _is_text(kind):
        raise WrongInput(f"{path}: column `{column}` holds {kind}, not text; set `text` to one of {', '.join(file.schema_arrow.names)}")
    row = 0
    try:
        for batch in file.iter_batches(batch_size=PARQUET_ROWS, columns=[column]):
            for value in _bytes(batch.column(0)):
                row += 1
                yield _parquet_value(row, value, column)
    except (pa.ArrowException, OSError) as error:
        yield Bad(row + 1, "broken Parquet", f"{str(error)[:120]}; the rest of the file is not read")


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    checks = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_binary, pa.types.is_large_binary)
    return any(check(kind) for check in checks)


def _bytes(values: pa.Array) -> list[bytes | None]:
    """Texts as bytes: a Parquet file may call bytes a string that are no UTF-8, and one such must not spoil its batch."""
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    return cast("list[bytes | None]", values.cast(pa.large_binary()).to_pylist())


def _parquet_value(row: int, value: bytes | None, column: str) -> Item | Bad:
    if value is None:
        return Bad(row, f"null `{column}`")
    try:
        return _checked(row, value.decode())
    except UnicodeDecodeError as error:
        return Bad(row, "invalid UTF-8", f"byte {error.start} of the text")


def missing_column(path: str, column: str, columns: list[str] | tuple[str, ...]) -> WrongInput:
    return WrongInput(f"{path} has no column `{column}`; it has {', '.join(columns)}: set `text` of this source to one of them")
