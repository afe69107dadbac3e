"""What of a record becomes a document: the text under one key, or a chat, preference, pair or
labelled text as the recipe says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ingot.base.errors import WrongInput
from ingot.config.sections.data import SourceSettings
from ingot.config.sections.objective import Documents
from ingot.data.chats import to_messages
from ingot.data.examples import LABELLED, PAIR, to_labelled, to_pair
from ingot.data.items import Bad, Item, checked, missing_column
from ingot.data.preferences import to_preference

IN_WORDS: dict[Documents, str] = {
    "text": "texts",
    "chat": "chats",
    "preference": "preferences",
    "pair": "pairs",
    "labelled": "labelled texts",
}


@dataclass(frozen=True)
class Wanted:
    """Makes a document of each record of a source. `names` are those of a table without a header
    line.
    """

    column: str = "text"
    documents: Documents = "text"
    layout: str = "auto"
    columns: Mapping[str, str] = field(default_factory=dict)
    labels: Sequence[str] = ()
    names: Sequence[str] = ()

    @classmethod
    def of(cls, source: SourceSettings, documents: Documents, labels: Sequence[str] = ()) -> Wanted:
        own = (
            {"text": source.text}
            if documents == "labelled" or (source.layout == "hh" and documents == "chat")
            else {}
        )
        return cls(
            source.text, documents, source.layout, own | source.columns, labels, source.names
        )

    @property
    def whole(self) -> bool:
        """Whether it takes whole records, rather than the text in one column."""
        return self.documents != "text"

    @property
    def exact(self) -> bool:
        """Whether records may hold what must be kept to the last digit: the arguments of a call, in
        a message.
        """
        return self.documents in ("chat", "preference")

    @property
    def needed(self) -> list[str]:
        """The columns that every record must have, where they do not depend on it."""
        if self.exact:
            return []
        return (
            [self.columns.get(name, name) for name in self._usual] if self.whole else [self.column]
        )

    def check(self, place: str, there: Sequence[str]) -> None:
        """Raises WrongInput where a table does not have the columns that are needed."""
        if any(name not in there for name in self.needed):
            raise self.missing(place, list(there))

    def take(self, row: int, record: Any) -> Item | Bad:
        """The document of one record, which may be any JSON value."""
        if not isinstance(record, dict):
            return Bad(row, "not a JSON object", f"it is {type(record).__name__}")
        if self.documents == "chat":
            return to_messages(row, record, self.layout, self.columns)
        if self.documents == "preference":
            return to_preference(row, record, self.layout, self.columns)
        if self.documents == "pair":
            return to_pair(row, record, self.columns)
        if self.documents == "labelled":
            return to_labelled(row, record, self.columns, self.labels)
        if self.column not in record:
            return Bad(
                row, f"no `{self.column}`", f"keys: {', '.join(record)[:200]}", tuple(record)
            )
        return self.text(row, record[self.column])

    def text(self, row: int, value: Any) -> Item | Bad:
        """The document of what stands under the wanted column."""
        if isinstance(value, str):
            return checked(row, value)
        return (
            Bad(row, f"null `{self.column}`")
            if value is None
            else Bad(row, f"`{self.column}` is not text", type(value).__name__)
        )

    def missing(self, place: str, keys: Sequence[str]) -> WrongInput:
        """The error for a source whose records do not have what is wanted."""
        if not self.whole:
            return missing_column(place, self.column, list(keys))
        there = ", ".join(keys)[:500]
        if self.exact:
            return WrongInput(
                f"{place} has no {self.documents} (layout {self.layout}) in its columns {there}:"
                " set `layout` and `columns` of this source"
            )
        lacking = " and ".join(f"`{name}`" for name in self.needed if name not in keys)
        return WrongInput(
            f"{place} has no column {lacking}; it has {there}: set `columns` of this source, such"
            f" as {{{', '.join(f'{name}: YOURS' for name in self._usual)}}}"
        )

    @property
    def _usual(self) -> Sequence[str]:
        return PAIR if self.documents == "pair" else LABELLED
