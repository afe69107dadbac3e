"""One file of any format as a stream of documents, each with its row number; unreadable records are
yielded as bad records with a reason.

Memory stays flat: at most a batch of rows, or one document, is held. A compressed file that is
truncated or has trailing data is refused, never taken for a complete one.
"""

from __future__ import annotations

import codecs
import functools
import json
import sys
from collections.abc import Iterator
from typing import IO, Any

import orjson

from ingot.base.exact_json import is_rounded
from ingot.data.documents import records as items
from ingot.data.documents.kinds import DocumentExtractor
from ingot.data.documents.records import BadRecord, ParsedDocument, checked
from ingot.data.sources.compressed import BROKEN, decompressed, is_broken
from ingot.data.sources.source_file import Format
from ingot.data.sources.tables import arrow, delimited, parquet
from ingot.data.sources.wikipedia import multistream, pages

JSON_CHUNK_BYTES = 1 << 20
# What may remain after a decoded number at the window's end if the number continues behind it.
NUMBER_CUT = ("", ".", "e", "E", "e+", "e-", "E+", "E-")


def json_lines(
    stream: IO[bytes], extractor: DocumentExtractor, row: int = 0, size: int = sys.maxsize
) -> Iterator[ParsedDocument | BadRecord]:
    """The document of each line; rows are line numbers, empty lines are skipped.

    `stream` is at the beginning of a line, after `row` lines; lines that begin within the next
    `size` bytes are read.
    """
    while size > 0 and (line := stream.readline(items.LARGEST_BYTES)):
        row += 1
        size -= len(line)
        if row == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if len(line) == items.LARGEST_BYTES and not line.endswith(b"\n"):
            yield BadRecord(row, "too large", f"above {items.LARGEST_BYTES:,} bytes")
            while (rest := stream.readline(items.LARGEST_BYTES)) and not rest.endswith(b"\n"):
                size -= len(rest)
            size -= len(rest)
        elif not line.isspace():
            yield _json_line(row, line, extractor)


def _json_line(row: int, line: bytes, extractor: DocumentExtractor) -> ParsedDocument | BadRecord:
    try:
        value = orjson.loads(line)
        # A chat may hold the arguments of a tool call.
        rounded = extractor.exact_numbers and is_rounded(value)
    except (orjson.JSONDecodeError, RecursionError):
        # The standard library's parser decides: it accepts some values that orjson does not, and
        # describes the error.
        return _exact_line(row, line, extractor)
    return _exact_line(row, line, extractor) if rounded else extractor.extract(row, value)


def _exact_line(row: int, line: bytes, extractor: DocumentExtractor) -> ParsedDocument | BadRecord:
    try:
        return extractor.extract(row, json.loads(line.decode()))
    except UnicodeDecodeError as error:
        return BadRecord(row, "invalid UTF-8", f"byte {error.start} of the line")
    except json.JSONDecodeError as error:
        return BadRecord(row, "broken JSON", f"{error.msg}, column {error.colno}")
    except (
        ValueError,
        RecursionError,
    ) as error:  # a number of thousands of digits, or thousands of nested lists
        return BadRecord(row, "broken JSON", str(error)[:80])


def json_list(
    stream: IO[bytes], extractor: DocumentExtractor
) -> Iterator[ParsedDocument | BadRecord]:
    """The items of one large list, or of objects one after another, decoded one by one. A list that
    is not closed was cut off, by a download that broke for one.
    """
    decoder, text = json.JSONDecoder(), _Text(stream)
    row = 0
    while text.skip(" \t\r\n,[]\ufeff"):
        row += 1
        try:
            value = text.take(decoder)
        except (ValueError, RecursionError) as error:
            detail = f"item {row}: {str(error)[:80]}"
            yield BadRecord(row, "broken JSON", detail, ends_file=True)
            return
        yield extractor.extract(row, value)
    if text.open_lists > 0:
        detail = f"the list is not closed after item {row}"
        yield BadRecord(row + 1, "broken JSON", detail, ends_file=True)


class _Text:
    """A window on a UTF-8 stream that grows only as far as one JSON value needs."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self._ended = stream, False
        self._decode = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode
        self._window, self._at = "", 0
        self.open_lists = 0
        """Brackets that were skipped: those that open less those that close."""

    def _grow(self) -> None:
        self._window, self._at = self._window[self._at :], 0
        chunk = self._stream.read(max(JSON_CHUNK_BYTES, len(self._window)))
        self._ended = not chunk
        self._window += self._decode(chunk, self._ended)

    def skip(self, characters: str) -> bool:
        """Skip these characters; False at the end of the stream."""
        while True:
            begin = self._at
            while self._at < len(self._window) and self._window[self._at] in characters:
                self._at += 1
            skipped = self._window[begin : self._at]
            self.open_lists += skipped.count("[") - skipped.count("]")
            if self._at < len(self._window) or self._ended:
                return self._at < len(self._window)
            self._grow()

    def take(self, decoder: json.JSONDecoder) -> Any:
        """The next JSON value. Raises ValueError if there is none."""
        while True:
            try:
                value, end = decoder.raw_decode(self._window, self._at)
                if self._window[end : end + 3] not in NUMBER_CUT or self._ended:
                    self._at = end
                    return value
            except json.JSONDecodeError as error:
                # An error near the end of the window, or an unterminated string, may be due to the
                # window's end.
                cut = error.pos > len(self._window) - 16 or error.msg.startswith(
                    "Unterminated string"
                )
                if self._ended or not cut or len(self._window) - self._at > items.LARGEST_BYTES:
                    raise
            self._grow()


DUMP_CHUNK_BYTES = 1 << 16
TAR = b"ustar"
"""What stands at byte 257 of a tar archive, whose headers and NULs are valid UTF-8."""


def parse_file(
    stream: IO[bytes],
    path: str,
    kind: Format,
    extractor: DocumentExtractor,
    row: int = 0,
    size: int = sys.maxsize,
) -> Iterator[ParsedDocument | BadRecord]:
    """The documents of one file. `stream` yields its bytes as stored; `path` determines the
    compression and is named in errors.

    For JSON Lines, `stream` may start after `row` lines, of which the next `size` bytes are read;
    for a multistream dump, at the beginning of one of its streams.

    Raises:
        WrongInput: the file is a table without the text column; the existing columns are named.
    """
    if kind == "parquet":
        yield from parquet(stream, path, extractor)
        return
    if kind == "arrow":
        yield from arrow(stream, path, extractor)
        return
    try:
        for item in _streamed(stream, path, kind, extractor, row, size):
            row = item.row
            yield item
    except (*BROKEN, OSError) as error:
        if not is_broken(error):
            raise
        yield BadRecord(row + 1, "broken compression", str(error), ends_file=True)


def _streamed(
    stream: IO[bytes], path: str, kind: Format, extractor: DocumentExtractor, row: int, size: int
) -> Iterator[ParsedDocument | BadRecord]:
    if kind == "wikipedia" and size < sys.maxsize:
        return pages(multistream(stream, size), whole=False)
    stream = decompressed(stream, path)
    if kind == "jsonl":
        return json_lines(stream, extractor, row, size)
    if kind == "json":
        return json_list(stream, extractor)
    if kind == "csv" or kind == "tsv":
        return delimited(stream, path, kind, extractor)
    if kind == "wikipedia":
        return pages(iter(functools.partial(stream.read, DUMP_CHUNK_BYTES), b""))
    return _text(stream)


def _text(stream: IO[bytes]) -> Iterator[ParsedDocument | BadRecord]:
    data = stream.read(items.LARGEST_BYTES + 1)
    if data[257:262] == TAR:
        yield BadRecord(1, "not text", "a tar archive; unpack it")
        return
    if len(data) > items.LARGEST_BYTES:
        yield BadRecord(1, "too large", f"above {items.LARGEST_BYTES:,} bytes; give it as JSONL")
        return
    if (place := data.find(0)) >= 0:
        yield BadRecord(1, "not text", f"byte {place} is NUL, as in UTF-16 and in programs")
        return
    try:
        yield checked(1, data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        yield BadRecord(1, "invalid UTF-8", f"byte {error.start}")
