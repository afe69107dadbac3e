"""Which class the label of a record stands for."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

from ingot.base.progress import say
from ingot.data.documents.messages import RecordError

_NUMERAL = re.compile(r"[-+]?\d+(\.\d+)?")


def label_of(value: Any, name: str, labels: Sequence[str], classes: Sequence[str] = ()) -> int:
    """The place in `labels` of what the column `name` says.

    A text is a name, and a number the name that it has in `classes`, the file's own, if any of
    these is in `labels`. Any other number is a place itself, but for a number that is a name and
    those beside it: where classes are called 1 to 5, none is 0.

    Raises:
        RecordError: there is no such label.
    """
    place = _place(value, tuple(labels), tuple(classes))
    if place is None:
        counted = "; numbers are names here" if _are_numbers(tuple(labels)) else ""
        raise RecordError(
            "label outside objective.labels",
            f"`{name}` is {str(value)[:40]!r}, the labels are {', '.join(labels)[:200]}{counted}",
        )
    return place


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
    digits = isinstance(value, str) and value.isascii() and value.isdigit()
    number = int(value) if digits and len(value) < 10 else value
    return number if isinstance(number, int) and 0 <= number < len(labels) else None


@functools.lru_cache(maxsize=8)
def _are_numbers(labels: tuple[str, ...]) -> bool:
    return any(map(_NUMERAL.fullmatch, labels))


@functools.lru_cache(maxsize=8)
def _tell_order(labels: tuple[str, ...], classes: tuple[str, ...]) -> bool:
    """Whether numbers count `labels`, since the file's own names are others; said once."""
    if not set(labels).isdisjoint(classes):
        return False
    say(
        f"warning: the data set calls its classes {', '.join(classes)[:200]}, objective.labels"
        f" {', '.join(labels)[:200]}: its numbers are taken in this order, 0 for {labels[0]}"
    )
    return True
