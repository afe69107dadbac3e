"""One file of any format as a stream of documents, each with its row; what cannot be read comes as
a `Bad` with its reason.

Memory stays flat: nothing holds more than a batch of rows, or one document.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import IO

from ingot.data import items
from ingot.data.compression import BROKEN, decompressed, is_broken
from ingot.data.items import Bad, Item, checked
from ingot.data.json_texts import json_lines, json_list
from ingot.data.sourcefile import Format
from ingot.data.tables import arrow, delimited, parquet
from ingot.data.wanted import Wanted
from ingot.data.wikipedia import multistream, pages

CHUNK_BYTES = 1 << 16


def read_items(
    stream: IO[bytes],
    path: str,
    kind: Format,
    wanted: Wanted,
    row: int = 0,
    size: int = sys.maxsize,
) -> Iterator[Item | Bad]:
    """The documents of one file. `stream` gives its bytes as stored; `path` tells the compression
    and is named in errors.

    For JSON Lines, `stream` may stand after `row` lines, of which the next `size` bytes are read;
    for a multistream dump, at the beginning of one of its streams.

    Raises:
        WrongInput: the file is a table without the wanted column; the columns that there are are
            named.
    """
    if kind == "parquet":
        yield from parquet(stream, path, wanted)
        return
    if kind == "arrow":
        yield from arrow(stream, path, wanted)
        return
    try:
        for item in _streamed(stream, path, kind, wanted, row, size):
            row = item.row
            yield item
    except (*BROKEN, OSError) as error:
        if not is_broken(error):
            raise
        yield Bad(row + 1, "broken compression", f"{error}; the rest of the file is not read")


def _streamed(
    stream: IO[bytes], path: str, kind: Format, wanted: Wanted, row: int, size: int
) -> Iterator[Item | Bad]:
    if kind == "wikipedia" and size < sys.maxsize:
        return pages(multistream(stream, size), whole=False)
    stream = decompressed(stream, path)
    if kind == "jsonl":
        return json_lines(stream, wanted, row, size)
    if kind == "json":
        return json_list(stream, wanted)
    if kind == "csv" or kind == "tsv":
        return delimited(stream, path, kind, wanted)
    if kind == "wikipedia":
        return pages(iter(functools.partial(stream.read, CHUNK_BYTES), b""))
    return _text(stream)


def _text(stream: IO[bytes]) -> Iterator[Item | Bad]:
    data = stream.read(items.LARGEST_BYTES + 1)
    if len(data) > items.LARGEST_BYTES:
        yield Bad(1, "too large", f"above {items.LARGEST_BYTES:,} bytes; give it as JSONL")
        return
    try:
        yield checked(1, data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        yield Bad(1, "invalid UTF-8", f"byte {error.start}")
