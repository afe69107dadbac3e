"""Pairs and labelled texts: examples of what to answer, in columns of their own."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ingot.base.progress import say
from ingot.data.documents.messages import (
    ColumnNames,
    RecordError,
    check_columns,
    parse_stored,
    stored,
)
from ingot.data.documents.records import BadRecord, ParsedDocument

PAIR = ("source", "target")
LABELLED = ("text", "label")
_NUMERAL = re.compile(r"[-+]?\d+(\.\d+)?")


class Pair(NamedTuple):
    """A source text and the target to be generated from it."""

    source: str
    target: str


class Labelled(NamedTuple):
    """A text and the number of its class."""

    text: str
    label: int


def to_pair(
    row: int, record: Mapping[str, Any], columns: ColumnNames
) -> ParsedDocument | BadRecord:
    """The pair of one record as canonical JSON, or the reason why there is none. `columns`:
    standard name -> name in the record.

    Raises:
        WrongInput: `columns` renames a column that a pair does not have.
    """
    check_columns(frozenset(PAIR), tuple(columns), "a pair")
    return stored(
        row, lambda: Pair(*(_text(record, columns.get(name, name)) for name in PAIR))._asdict()
    )


def to_labelled(
    row: int,
    record: Mapping[str, Any],
    columns: ColumnNames,
    labels: Sequence[str],
    classes: Sequence[str] = (),
) -> ParsedDocument | BadRecord:
    """The labelled text of one record as canonical JSON, or the reason why there is none.
    `columns`: standard name -> name in the record.

    A label that is a text is a name in `labels`, and a number has the name that the file itself has
    for it, in `classes`, if any of these is in `labels`; but in as long a list, in which the names
    of both stand at one place, the others are only spelled otherwise. Any other number is a place
    in `labels`, unless names are numbers: then it is one of them or wrong. Of classes 1 to 5, none
    is 0, and one that is says that the source counts from 0, which stops it.

    Raises:
        WrongInput: `columns` renames a column that a labelled text does not have.
    """
    check_columns(frozenset(LABELLED), tuple(columns), "a labelled text")
    text, label = (columns.get(name, name) for name in LABELLED)
    return stored(
        row,
        lambda: Labelled(
            _text(record, text), _label(_there(record, label), label, labels, classes)
        )._asdict(),
    )


def from_pair(pair: str) -> Pair:
    """Parse what `to_pair` wrote. Raises WrongInput if it is no such pair."""
    return parse_stored(Pair, pair, "a pair")


def from_labelled(labelled: str) -> Labelled:
    """Parse what `to_labelled` wrote. Raises WrongInput if it is no such text."""
    return parse_stored(Labelled, labelled, "a labelled text")


def _label(value: Any, name: str, labels: Sequence[str], classes: Sequence[str]) -> int:
    """The place in `labels` of what the column `name` says."""
    place = _place(value, tuple(labels), tuple(classes))
    if place is not None:
        return place
    told = f"`{name}` is {str(value)[:40]!r}"
    if type(value) is int and 0 <= value < len(classes):
        told += f", which the data set calls {classes[value]}"
    told += f", the labels are {', '.join(labels)[:200]}"
    stops = False
    if _are_numbers(tuple(labels)):
        told += "; numbers are names here"
        # Left out, a rare class 0 would leave others behind that are shifted by one.
        stops = not classes and _counted(value, labels) is not None
    if stops:
        told += (
            f": if the data set counts its classes from 0, list the labels 0 to {len(labels) - 1};"
            " if it is no class, take such records out of the source"
        )
    raise RecordError("label outside objective.labels", told, stops=stops)


def _place(value: Any, labels: tuple[str, ...], classes: tuple[str, ...]) -> int | None:
    if isinstance(value, bool) or not isinstance(value, str | int):
        return None
    if isinstance(value, int) and classes:
        if not _tell_order(labels, classes):
            value = classes[value] if 0 <= value < len(classes) else ""
            return labels.index(value) if value in labels else None
    elif str(value) in labels:
        return labels.index(str(value))
    elif _are_numbers(labels):
        return None
    return _counted(value, labels)


def _counted(value: Any, labels: Sequence[str]) -> int | None:
    """The place in `labels` that a number says, or a text of digits."""
    digits = isinstance(value, str) and value.isascii() and value.isdigit()
    number = int(value) if digits and len(value) < 10 else value
    return number if type(number) is int and 0 <= number < len(labels) else None


@functools.lru_cache(maxsize=8)
def _are_numbers(labels: tuple[str, ...]) -> bool:
    return any(map(_NUMERAL.fullmatch, labels))


@functools.lru_cache(maxsize=8)
def _tell_order(labels: tuple[str, ...], classes: tuple[str, ...]) -> bool:
    """Whether numbers count `labels`, since the file's own names are others, all of them or some
    while those of both stand at one place; said once.
    """
    shared = set(labels) & set(classes)
    in_place = {one for one, other in zip(labels, classes, strict=False) if one == other}
    if shared and (len(labels) != len(classes) or shared != in_place or labels == classes):
        return False
    say(
        f"warning: the data set calls its classes {', '.join(classes)[:200]}, objective.labels"
        f" {', '.join(labels)[:200]}: its numbers are taken in this order, 0 for {labels[0]}"
    )
    return True


def _text(record: Mapping[str, Any], name: str) -> str:
    value = _there(record, name)
    if not isinstance(value, str):
        raise RecordError(f"`{name}` is not text", type(value).__name__)
    if not value.strip():
        raise RecordError(f"empty `{name}`")
    return value


def _there(record: Mapping[str, Any], name: str) -> Any:
    """The value of a column."""
    if name not in record:
        keys = tuple(str(key) for key in record)
        raise RecordError(f"no `{name}`", f"keys: {', '.join(keys)[:200]}", keys)
    if record[name] is None:
        raise RecordError(f"null `{name}`")
    return record[name]
