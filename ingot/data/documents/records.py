"""What a reader gives: texts with their rows, and records that are bad, with the reason."""

from __future__ import annotations

from dataclasses import dataclass

from ingot.base.errors import WrongInput

LARGEST_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class ParsedDocument:
    """A text and its row: the line for JSONL, CSV and TSV, the number of the item for a JSON list
    and Parquet, from 1.
    """

    row: int
    text: str


@dataclass(frozen=True, slots=True)
class BadRecord:
    """What could not be read, why in a few words that are counted, and the details of this one."""

    row: int
    reason: str
    detail: str = ""
    keys: tuple[str, ...] = ()
    """The keys that there were, where the wanted one was missing."""

    def __str__(self) -> str:
        return f"{self.reason} ({self.detail})" if self.detail else self.reason


def checked(row: int, text: str) -> ParsedDocument | BadRecord:
    """A text that can be written as UTF-8 and holds something else than white space."""
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
