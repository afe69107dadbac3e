"""Pairs and labelled texts, each as compact JSON: `{"source": ..., "target": ...}` and `{"text":
..., "label": number}`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ingot.base.errors import WrongInput
from ingot.data.items import Bad, Item
from ingot.data.messages import Columns, Fault, check_columns, stored

PAIR = ("source", "target")
LABELLED = ("text", "label")


class Pair(NamedTuple):
    """What is read, and what is to be written."""

    source: str
    target: str


class Labelled(NamedTuple):
    """A text and the number of its class."""

    text: str
    label: int


def to_pair(row: int, record: Mapping[str, Any], columns: Columns) -> Item | Bad:
    """The pair of one record as canonical JSON, or why it holds none. `columns`: usual name -> name
    in the record.

    Raises:
        WrongInput: `columns` renames what a pair does not have.
    """
    check_columns(frozenset(PAIR), tuple(columns), "a pair")
    return stored(
        row, lambda: Pair(*(_text(record, columns.get(name, name)) for name in PAIR))._asdict()
    )


def to_labelled(
    row: int, record: Mapping[str, Any], columns: Columns, labels: Sequence[str]
) -> Item | Bad:
    """The labelled text of one record as canonical JSON, or why it holds none. `columns`: usual
    name -> name in the record.

    A label is one of `labels` by name, else its number there from 0; a number that is a name itself
    is a name, whether the file has it as a number or as text.

    Raises:
        WrongInput: `columns` renames what a labelled text does not have.
    """
    check_columns(frozenset(LABELLED), tuple(columns), "a labelled text")
    text, label = (columns.get(name, name) for name in LABELLED)
    return stored(
        row, lambda: Labelled(_text(record, text), _label(record, label, labels))._asdict()
    )


def from_pair(pair: str) -> Pair:
    """What `to_pair` wrote. Raises WrongInput where it is no such pair."""
    try:
        return Pair(**json.loads(pair))
    except (ValueError, TypeError):
        raise WrongInput(
            f"{pair[:60]!r} is not a pair as `ingot ingest` stores it; run `ingot ingest` again"
        ) from None


def from_labelled(labelled: str) -> Labelled:
    """What `to_labelled` wrote. Raises WrongInput where it is no such text."""
    try:
        return Labelled(**json.loads(labelled))
    except (ValueError, TypeError):
        raise WrongInput(
            f"{labelled[:60]!r} is not a labelled text as `ingot ingest` stores it; run `ingot"
            " ingest` again"
        ) from None


def _text(record: Mapping[str, Any], name: str) -> str:
    value = _there(record, name)
    if not isinstance(value, str):
        raise Fault(f"`{name}` is not text", type(value).__name__)
    if not value.strip():
        raise Fault(f"empty `{name}`")
    return value


def _label(record: Mapping[str, Any], name: str, labels: Sequence[str]) -> int:
    value = _there(record, name)
    if str(value) in labels and isinstance(value, str | int) and not isinstance(value, bool):
        return labels.index(str(value))
    digits = isinstance(value, str) and value.isascii() and value.isdigit()
    number = int(value) if digits and len(value) < 10 else value
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < len(labels):
        raise Fault(
            "label outside objective.labels",
            f"`{name}` is {str(value)[:40]!r}, the labels are {', '.join(labels)[:200]}",
        )
    return number


def _there(record: Mapping[str, Any], name: str) -> Any:
    """What stands in a column."""
    if name not in record:
        keys = tuple(str(key) for key in record)
        raise Fault(f"no `{name}`", f"keys: {', '.join(keys)[:200]}", keys)
    if record[name] is None:
        raise Fault(f"null `{name}`")
    return record[name]
