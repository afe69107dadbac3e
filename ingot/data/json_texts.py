"""Documents out of JSON Lines and out of JSON lists of any length."""

from __future__ import annotations

import codecs
import json
import sys
from collections.abc import Iterator
from typing import IO, Any

import orjson

from ingot.data import items
from ingot.data.items import Bad, Item
from ingot.data.wanted import Wanted

CHUNK_BYTES = 1 << 20
# What may be left at the end of a window of a number that goes on behind it.
NUMBER_CUT = ("", ".", "e", "E", "e+", "e-", "E+", "E-")


def json_lines(
    stream: IO[bytes], wanted: Wanted, row: int = 0, size: int = sys.maxsize
) -> Iterator[Item | Bad]:
    """The document of each line; rows are line numbers, empty lines are passed over.

    `stream` stands at the beginning of a line, after `row` lines; lines that begin within the next
    `size` bytes are read.
    """
    while size > 0 and (line := stream.readline(items.LARGEST_BYTES)):
        row += 1
        size -= len(line)
        if row == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if len(line) == items.LARGEST_BYTES and not line.endswith(b"\n"):
            yield Bad(row, "too large", f"above {items.LARGEST_BYTES:,} bytes")
            while (rest := stream.readline(items.LARGEST_BYTES)) and not rest.endswith(b"\n"):
                size -= len(rest)
            size -= len(rest)
        elif not line.isspace():
            # A chat may hold the arguments of a call, and orjson rounds integers of more than 64
            # bits.
            yield _exact_line(row, line, wanted) if wanted.exact else _json_line(row, line, wanted)


def _json_line(row: int, line: bytes, wanted: Wanted) -> Item | Bad:
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError:
        # The standard library's reader decides: it takes some values that orjson does not, and
        # names the fault.
        return _exact_line(row, line, wanted)
    return wanted.take(row, value)


def _exact_line(row: int, line: bytes, wanted: Wanted) -> Item | Bad:
    try:
        return wanted.take(row, json.loads(line.decode()))
    except UnicodeDecodeError as error:
        return Bad(row, "invalid UTF-8", f"byte {error.start} of the line")
    except json.JSONDecodeError as error:
        return Bad(row, "broken JSON", f"{error.msg}, column {error.colno}")
    except (
        ValueError,
        RecursionError,
    ) as error:  # a number of thousands of digits, or thousands of nested lists
        return Bad(row, "broken JSON", str(error)[:80])


def json_list(stream: IO[bytes], wanted: Wanted) -> Iterator[Item | Bad]:
    """The items of one large list, or of objects that merely follow each other, decoded one by
    one.
    """
    decoder, text = json.JSONDecoder(), _Text(stream)
    row = 0
    while text.skip(" \t\r\n,[]\ufeff"):
        row += 1
        try:
            value = text.take(decoder)
        except (ValueError, RecursionError) as error:
            yield Bad(
                row,
                "broken JSON",
                f"item {row}: {str(error)[:80]}; the rest of the file is not read",
            )
            return
        yield wanted.take(row, value)


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
                if self._window[end : end + 3] not in NUMBER_CUT or self._ended:
                    self._at = end
                    return value
            except json.JSONDecodeError as error:
                # A fault near the end of the window, or a string left open, may be only the
                # window's end.
                cut = error.pos > len(self._window) - 16 or error.msg.startswith(
                    "Unterminated string"
                )
                if self._ended or not cut or len(self._window) - self._at > items.LARGEST_BYTES:
                    raise
            self._grow()
