"""Texts out of one column of a table: CSV, TSV, Parquet."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterator
from typing import IO, Literal, cast

import pyarrow as pa
import pyarrow.parquet as pq

from ingot.base.errors import WrongInput
from ingot.data.items import Bad, Item, checked, missing_column

PARQUET_ROWS = 1024


def delimited(stream: IO[bytes], path: str, kind: Literal["csv", "tsv"], column: str) -> Iterator[Item | Bad]:
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
            yield checked(row, fields[place]) if fits else Bad(row, "broken row", f"{len(fields)} fields, the header has {len(header)}")
        row = reader.line_num + 1


def parquet(stream: IO[bytes], path: str, column: str) -> Iterator[Item | Bad]:
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
        return checked(row, value.decode())
    except UnicodeDecodeError as error:
        return Bad(row, "invalid UTF-8", f"byte {error.start} of the text")
