"""Reads a task's items, from its own files or a data set on the hub, as complete records with all
columns.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ingot.base.environment import ranks
from ingot.base.errors import WrongInput
from ingot.base.progress import say
from ingot.base.storage import open_read
from ingot.config.sections.data import SourceSettings
from ingot.config.sections.objective import Documents
from ingot.data.documents.kinds import DocumentExtractor
from ingot.data.documents.records import BadRecord, ParsedDocument, not_an_object
from ingot.data.sources.find import fetch_files, find_source, records_of
from ingot.data.sources.readers import parse_file
from ingot.data.sources.selection import Tell
from ingot.data.sources.source_file import SourceFile, of_one_version, remote_errors

FILES = ("jsonl", "json", "parquet", "csv", "tsv", "arrow")


@dataclass(frozen=True)
class _WholeRecords(DocumentExtractor):
    """Keeps each record complete, as JSON."""

    documents: Documents = "chat"

    def read_columns(self, there: Sequence[str]) -> list[str]:
        return list(there)

    @property
    def asked_columns(self) -> set[str]:
        return set()

    def extract(self, row: int, record: Any) -> ParsedDocument | BadRecord:
        if not isinstance(record, dict):
            return not_an_object(row, record)
        return ParsedDocument(row, json.dumps(record, ensure_ascii=False, default=str))


@dataclass(frozen=True)
class TaskRecord:
    """One record; `place` (`FILE:ROW`) names it in messages and in the examples."""

    place: str
    values: dict[str, Any]

    def get(self, column: str) -> Any:
        return self.values[column]

    def text(self, column: str) -> str:
        """The text in a column; raises WrongInput if it is not a string."""
        value = self.values[column]
        if not isinstance(value, str):
            raise WrongInput(
                f"{self.place}: `{column}` is {type(value).__name__}, not text; mend it, or name"
                " another column"
            )
        return value


def read_records(
    source: str,
    knob: str,
    columns: Sequence[str],
    *,
    names: Mapping[str, str] | None = None,
    split: str = "validation",
    limit: int | None = None,
    tell: Tell = None,
) -> list[TaskRecord]:
    """Read the first `limit` records of a source, with `columns` under their standard names.

    Args:
        source: path, folder or glob of JSONL, JSON, Parquet, CSV, TSV or Arrow files, or
            `SCHEME:...` of a kind of source that yields records, such as `hf:NAME[:SUBSET]`.
        names: standard name -> name in the records.
        tell: as of `find_source`.

    Raises:
        WrongInput: no such source, a record that cannot be read or lacks a column, or no record at
            all. No item is silently skipped.
    """
    names = names or {}
    if unknown := [name for name in names if name not in columns]:
        raise WrongInput(
            f"{knob.rpartition('.')[0]}.columns renames {', '.join(unknown)}; the columns are"
            f" {', '.join(columns)}"
        )
    found = [
        TaskRecord(place, _named_columns(place, values, columns, names, knob))
        for place, values in itertools.islice(_read(source, knob, split, tell), limit)
    ]
    if not found:
        raise WrongInput(f"{knob} {source} holds no record; give items to evaluate on")
    return found


@functools.cache
def tell_once(line: str) -> None:
    """Tells the user of a task's items, which several models are measured on, on all ranks."""
    if ranks().is_main:
        say(line)


def whole_records(source: str, knob: str) -> Iterator[TaskRecord]:
    """All records of a source with all of their columns: of files those of every split, of a data
    set on the hub its validation split. Raises as `read_records` does.
    """
    for place, values in _read(source, knob, "validation", whole=True):
        yield TaskRecord(place, values)


def _named_columns(
    place: str, values: dict[str, Any], columns: Sequence[str], names: Mapping[str, str], knob: str
) -> dict[str, Any]:
    missing = [
        names.get(column, column) for column in columns if names.get(column, column) not in values
    ]
    if missing:
        raise WrongInput(
            f"{place} has no column `{missing[0]}`; it has {', '.join(values)[:300]}: set"
            f" {knob.rpartition('.')[0]}.columns"
        )
    return {column: values[names.get(column, column)] for column in columns}


def _read(
    source: str, knob: str, split: str, tell: Tell = None, *, whole: bool = False
) -> Iterator[tuple[str, dict[str, Any]]]:
    asked = SourceSettings(source=source, split=split)
    for file in find_source(asked, knob, whole=whole, tell=tell):
        if file.format not in FILES and records_of(file) is None:
            raise WrongInput(
                f"{knob} {file.path} is read as {file.format}; items are JSONL, JSON, Parquet, CSV,"
                " TSV, Arrow, hf:NAME or records of another package's source"
            )
        fetch_files([file])
        for item in _items(file):
            if isinstance(item, BadRecord):
                raise WrongInput(f"{file.name}:{item.row}: {item}; mend it")
            yield f"{file.name}:{item.row}", json.loads(item.text)


def _items(file: SourceFile) -> Iterator[ParsedDocument | BadRecord]:
    if (kind := records_of(file)) is not None:
        yield from kind.read(file, _WholeRecords())
        return
    with remote_errors(file), open_read(file.path) as stream:
        items = parse_file(stream, file.path, file.format, _WholeRecords())
        yield from of_one_version(file, items)
