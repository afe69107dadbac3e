"""What parsing a file yields: documents with their rows, and bad records with reasons."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ingot.base.errors import WrongInput

LARGEST_BYTES = 1 << 30
EMPTY = "empty text"
"""The reason of records that hold nothing, as every second line of some corpora does."""
FEW = 3
"""Up to this many skipped records are named one by one, whatever their share."""


@dataclass(frozen=True, slots=True)
class ParsedDocument:
    """A text and its row, counted from 1: the line for JSONL, CSV and TSV, the item for a JSON list
    and Parquet.
    """

    row: int
    text: str


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that could not be read: a short reason, which is counted, and details."""

    row: int
    reason: str
    detail: str = ""
    keys: tuple[str, ...] = ()
    """The record's keys if the text column was missing."""
    ends_file: bool = False
    """Whether the file is damaged or cut short here, so that the rest of it is not read."""
    stops: bool = False
    """Whether it shows that the other records would be misread too, so that skipping it is not
    enough.
    """

    def __str__(self) -> str:
        details = [self.detail] if self.detail else []
        details += ["the rest of the file is not read"] if self.ends_file else []
        return f"{self.reason} ({'; '.join(details)})" if details else self.reason


def not_an_object(row: int, record: Any) -> BadRecord:
    """The error for a record that is another JSON value; for a list with what is done with a file
    that is one.
    """
    detail = f"it is {type(record).__name__}"
    if isinstance(record, list):
        detail += "; a file that is one JSON array of records must be named .json"
    return BadRecord(row, "not a JSON object", detail)


def checked(row: int, text: str) -> ParsedDocument | BadRecord:
    """The text as a document if it can be encoded as UTF-8 and is not only white space."""
    if not text or text.isspace():
        return BadRecord(row, EMPTY)
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            return BadRecord(row, "invalid UTF-8", f"character {error.start} of the text")
    return ParsedDocument(row, text)


def missing_column(path: str, column: str, columns: list[str] | tuple[str, ...]) -> WrongInput:
    return WrongInput(
        f"{path} has no column `{column}`; it has {', '.join(columns)[:500]}: set `text` of this"
        " source to one of them"
    )


def refuse_many(told: str, skipped: int, total: int, most: float) -> None:
    """Raise WrongInput, with what was `told` of it, if more than a few and more than the share
    `most` (`data.max_skipped`) is skipped: training on the rest would be training on other data.
    """
    if skipped > FEW and skipped > most * total:
        share = math.ceil(100 * skipped / total) / 100
        allow = f", or allow it by data.max_skipped={share:g}" if skipped < total else ""
        raise WrongInput(f"{told}: more than data.max_skipped={most:g}; mend the source{allow}")
