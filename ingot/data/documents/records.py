"""What parsing a file yields: documents with their rows, and bad records with reasons."""

from __future__ import annotations

from dataclasses import dataclass

from ingot.base.errors import WrongInput

LARGEST_BYTES = 1 << 30


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

    def __str__(self) -> str:
        return f"{self.reason} ({self.detail})" if self.detail else self.reason


def checked(row: int, text: str) -> ParsedDocument | BadRecord:
    """The text as a document if it can be encoded as UTF-8 and is not only white space."""
    if not text or text.isspace():
        return BadRecord(row, "empty text")
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
