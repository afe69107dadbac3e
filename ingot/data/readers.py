"""One file of any format as a stream of texts, each with its row; what cannot be read comes as a `Bad` with its reason.

Memory stays flat: nothing holds more than a batch of rows, or one document.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, Literal

from ingot.data import items
from ingot.data.compression import BROKEN, decompressed
from ingot.data.items import Bad, Item, checked
from ingot.data.json_texts import json_lines, json_list
from ingot.data.sources import Format
from ingot.data.tables import delimited, parquet


def read_items(stream: IO[bytes], path: str, kind: Format, column: str) -> Iterator[Item | Bad]:
    """The texts of one file. `stream` gives its bytes as stored; `path` tells the compression and is named in errors.

    Raises:
        WrongInput: the file is a table without the column `column`; the columns that there are are named.
    """
    if kind == "parquet":
        yield from parquet(stream, path, column)
        return
    row = 0
    try:
        for item in _text_formats(decompressed(stream, path), path, kind, column):
            row = item.row
            yield item
    except BROKEN as error:
        yield Bad(row + 1, "broken compression", f"{error}; the rest of the file is not read")


def _text_formats(stream: IO[bytes], path: str, kind: Literal["jsonl", "json", "text", "csv", "tsv"], column: str) -> Iterator[Item | Bad]:
    if kind == "jsonl":
        return json_lines(stream, column)
    if kind == "json":
        return json_list(stream, column)
    if kind == "text":
        return _text(stream)
    return delimited(stream, path, kind, column)


def _text(stream: IO[bytes]) -> Iterator[Item | Bad]:
    data = stream.read(items.LARGEST_BYTES + 1)
    if len(data) > items.LARGEST_BYTES:
        yield Bad(1, "too large", f"above {items.LARGEST_BYTES:,} bytes; give it as JSONL")
        return
    try:
        yield checked(1, data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        yield Bad(1, "invalid UTF-8", f"byte {error.start}")
