"""Documents from tables: CSV, TSV, Parquet, Arrow; of the last two only what is needed is read."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import IO, TYPE_CHECKING, Any, Literal, cast

from ingot.base.errors import WrongInput
from ingot.base.exact_json import parse_json
from ingot.base.lazy import lazy_import
from ingot.data.documents.kinds import DocumentExtractor
from ingot.data.documents.records import EMPTY, BadRecord, ParsedDocument
from ingot.data.sources.arrow_batches import arrow_batches, whole
from ingot.data.sources.presence import files_among, is_list, smallest_leaf, with_presence

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq
else:  # `ingot run` of a finished run comes by here
    pa, pq = lazy_import("pyarrow"), lazy_import("pyarrow.parquet")

PARQUET_ROWS = 1024
FILE_ROWS = 64
"""So many where each may have images beside it, of which there may be no smaller part."""
BUFFER_BYTES = 1 << 20
UNREADABLE = (ValueError, OverflowError, RecursionError)
"""What Arrow raises for a value that Python has not, text that is not UTF-8 among them; and what
the parser does for a text that is not JSON.
"""
CUT = "unexpected end of data"
"""What the csv module says of quotes that are never closed."""
_FIELD = re.compile(r'(?:"((?:[^"]|"")*)"[ \t]*|([^",\r\n]*))(,|\r?\n?\Z)')
"""A field of one line, with blanks behind its quotes, and what ends it."""


def delimited(
    stream: IO[bytes], path: str, kind: Literal["csv", "tsv"], extractor: DocumentExtractor
) -> Iterator[ParsedDocument | BadRecord]:
    """Rows of a CSV file, quoted as in RFC 4180; or of a TSV file, in which quotes are literal.

    The first line holds the column names unless `extractor.names` gives them.
    """
    csv.field_size_limit(sys.maxsize)
    lines = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
    here: list[str] = []  # the lines of a row
    # Not strict, a quote that is never closed takes in all that follows.
    reader = (
        csv.reader(_noted(lines, here), strict=True)
        if kind == "csv"
        else csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
    )
    try:
        header = list(extractor.names) if extractor.names else next(reader, None)
    except csv.Error as error:
        yield _broken(1, reader.line_num, error, ends_file=True)
        return
    if header is None:
        yield BadRecord(1, EMPTY, "no header line")
        return
    if len(header) == 1 and ";" in header[0] and kind == "csv":
        raise WrongInput(
            f"{path} has semicolons between its columns ({header[0][:100]}); save it with commas,"
            " or as .tsv with tabs"
        )
    extractor.check(path, header)
    place = 0 if extractor.takes_records else header.index(extractor.column)
    row = reader.line_num + 1
    while True:
        here.clear()
        try:
            fields = next(reader, None)
        except csv.Error as error:
            cut = str(error) == CUT
            fields = None if cut else _spaced(here)
            if not fields:
                yield _broken(row, reader.line_num, error, ends_file=cut)
        if fields is None:
            return
        if fields and len(fields) != len(header):
            yield BadRecord(
                row,
                "broken row",
                f"{len(fields)} fields, {'`names`' if extractor.names else 'the header'} has"
                f" {len(header)}",
            )
        elif fields:
            yield (
                extractor.extract(row, dict(zip(header, fields, strict=True)))
                if extractor.takes_records
                else extractor.extract_text(row, fields[place])
            )
        row = reader.line_num + 1


def _noted(lines: Iterable[str], here: list[str]) -> Iterator[str]:
    for line in lines:
        here.append(line)
        yield line


def _spaced(lines: Sequence[str]) -> list[str]:
    """The fields of a row of one line with blanks between quotes and commas, which a strict reader
    refuses; none if there is more to it.
    """
    fields, place = list[str](), 0
    while len(lines) == 1 and (found := _FIELD.match(lines[0], place)):
        quoted, plain, end = found.groups()
        fields.append(plain if quoted is None else quoted.replace('""', '"'))
        if end != ",":
            return fields
        place = found.end()
    return []


def _broken(row: int, last: int, error: csv.Error, *, ends_file: bool) -> BadRecord:
    """The record from line `row` to `last` that is no row of a CSV file."""
    if str(error) == CUT:
        told = f"the file ends within quotes that row {row} opened"
    else:
        told = str(error) + (f", in quotes up to line {last}" if last > row else "")
    return BadRecord(row, "broken row", told, ends_file=ends_file)


def parquet(
    stream: IO[bytes], path: str, extractor: DocumentExtractor
) -> Iterator[ParsedDocument | BadRecord]:
    """Rows of a Parquet file, counted from 1."""
    try:
        # Without the buffer a whole row group is read at once, however large.
        file = pq.ParquetFile(
            stream, buffer_size=BUFFER_BYTES, pre_buffer=False, page_checksum_verification=True
        )
    except (pa.ArrowException, OSError) as error:
        yield BadRecord(1, "broken Parquet", str(error)[:120], ends_file=True)
        return
    schema = file.schema_arrow
    columns, extractor = columns_of(schema, path, extractor), with_classes(extractor, schema)
    files = files_among(schema, extractor.asked_columns)
    batches = file.iter_batches(
        batch_size=FILE_ROWS if files else PARQUET_ROWS,
        columns=[smallest_leaf(file, name) if name in files else name for name in columns],
    )
    told = (with_presence(batch, files) for batch in batches)
    yield from _rows(told, "Parquet", extractor, schema.names)


def arrow(
    stream: IO[bytes], path: str, extractor: DocumentExtractor
) -> Iterator[ParsedDocument | BadRecord]:
    """Rows of an Arrow IPC stream (what the `datasets` library saves) or file, counted from 1."""
    try:
        batches = arrow_batches(stream)
    except (pa.ArrowException, OSError) as error:
        yield BadRecord(1, "broken Arrow", str(error)[:120], ends_file=True)
        return
    schema = next(batches)
    columns, extractor = columns_of(schema, path, extractor), with_classes(extractor, schema)
    files = files_among(schema, extractor.asked_columns)
    told = (with_presence(whole(batch.select(columns)), files) for batch in batches)
    yield from _rows(told, "Arrow", extractor, schema.names)


def batch_documents(
    batch: pa.RecordBatch, row: int, extractor: DocumentExtractor, names: Sequence[str]
) -> Iterator[ParsedDocument | BadRecord]:
    """The documents of a batch that is preceded by `row` rows. `names`: all columns of its table,
    also those that are not read.
    """
    values = (
        _records(batch, dict.fromkeys(names))
        if extractor.takes_records
        else _texts(batch.column(extractor.column))
    )
    for number, value in enumerate(values, start=row + 1):
        if isinstance(value, UnicodeDecodeError):
            yield BadRecord(number, "invalid UTF-8", f"byte {value.start} of the text")
        elif isinstance(value, UNREADABLE):
            yield BadRecord(number, "not JSON", str(value)[:80])
        else:
            yield (
                extractor.extract(number, value)
                if extractor.takes_records
                else extractor.extract_text(number, value)
            )


def _rows(
    batches: Iterable[pa.RecordBatch],
    name: str,
    extractor: DocumentExtractor,
    names: Sequence[str],
) -> Iterator[ParsedDocument | BadRecord]:
    row = 0
    try:
        for batch in batches:
            yield from batch_documents(batch, row, extractor, names)
            row += batch.num_rows
    except (pa.ArrowException, OSError) as error:
        yield BadRecord(row + 1, f"broken {name}", str(error)[:120], ends_file=True)


def columns_of(schema: pa.Schema, path: str, extractor: DocumentExtractor) -> list[str]:
    """The columns to read.

    Raises:
        WrongInput: one is missing, or the text column does not hold text.
    """
    extractor.check(path, schema.names)
    if not extractor.takes_records and not _is_text(kind := schema.field(extractor.column).type):
        raise WrongInput(
            f"{path}: column `{extractor.column}` holds {kind}, not text; set `text` to one of"
            f" {', '.join(schema.names)}"
        )
    return extractor.read_columns(schema.names)


def with_classes(extractor: DocumentExtractor, schema: pa.Schema) -> DocumentExtractor:
    """The extractor with the names that `datasets` has put beside a table for its numbers of
    classes.
    """
    if extractor.documents != "labelled":
        return extractor
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        names = features[extractor.columns.get("label", "label")]["names"]
    except (KeyError, TypeError, ValueError):
        return extractor
    return replace(extractor, classes=list(map(str, names)))


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    checks = (
        pa.types.is_string,
        pa.types.is_large_string,
        pa.types.is_string_view,
        pa.types.is_binary,
        pa.types.is_large_binary,
    )
    return any(check(kind) for check in checks)


def _texts(values: pa.Array) -> list[str | UnicodeDecodeError | None]:
    """Texts as Python strings; a string column may hold bytes that are not UTF-8, and one such
    value must not fail its whole batch.
    """
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    kind = (
        pa.large_string()
        if pa.types.is_binary(values.type) or pa.types.is_large_binary(values.type)
        else values.type
    )
    try:
        return cast("list[str | UnicodeDecodeError | None]", values.cast(kind).to_pylist())
    except (pa.ArrowInvalid, UnicodeDecodeError):
        return [
            None if value is None else _decoded(value)
            for value in values.cast(pa.large_binary()).to_pylist()
        ]


def _decoded(value: bytes) -> str | UnicodeDecodeError:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        return error


def _records(batch: pa.RecordBatch, unread: Mapping[str, None]) -> list[Any]:
    """Whole rows as Python values, with null for columns that are not read; an error in place of a
    row that has no such value, such as a time in nanoseconds.
    """
    readers = {
        field.name: reader
        for field in batch.schema
        if (reader := _reader(field.type)) is not _unchanged
    }

    def row_of(record: dict[str, Any]) -> dict[str, Any]:
        return {**unread, **record} | {name: read(record[name]) for name, read in readers.items()}

    try:
        return list(map(row_of, batch.to_pylist()))
    except UNREADABLE:
        return [_alone(batch.slice(row, 1), row_of) for row in range(batch.num_rows)]


def _alone(row: pa.RecordBatch, row_of: Callable[[dict[str, Any]], Any]) -> Any:
    try:
        return row_of(row.to_pylist()[0])
    except UNREADABLE as error:
        return error


def _unchanged(value: Any) -> Any:
    return value


def _reader(kind: pa.DataType) -> Callable[[Any], Any]:
    """What makes of a value of this type the one that a record in JSON has in its place.

    All structs of a column have the same keys, those of other records included, such as the
    parameters of tools that this one does not describe: one whose value is null is left out. Maps
    and JSON in a text, which is how `datasets` stores what differs between records, have keys of
    their own, and a null there is meant.
    """
    if isinstance(kind, pa.JsonType):
        return _unless_null(parse_json)
    if pa.types.is_struct(kind):
        fields = {field.name: _reader(field.type) for field in kind}
        return _unless_null(
            lambda value: {
                name: item
                for name, read in fields.items()
                if (item := read(value[name])) is not None
            }
        )
    if pa.types.is_map(kind) and _is_text(kind.key_type):
        of_value = _reader(kind.item_type)
        return _unless_null(lambda pairs: {key: of_value(value) for key, value in pairs})
    if is_list(kind):
        of_item = _reader(kind.value_type)
        if of_item is not _unchanged:
            return _unless_null(lambda items: [of_item(item) for item in items])
    return _unchanged


def _unless_null(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else read(value)
