"""What of a record becomes a document: the text under one key, or a chat in the layout that the recipe names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ingot.base.errors import WrongInput
from ingot.config.data import Source
from ingot.data.chats import to_messages
from ingot.data.items import Bad, Item, checked, missing_column


@dataclass(frozen=True)
class Wanted:
    """Makes a document of each record of a source."""

    column: str = "text"
    chat: bool = False
    layout: str = "auto"
    columns: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, source: Source, *, chat: bool) -> Wanted:
        return cls(source.text, chat, source.layout, source.columns)

    def take(self, row: int, record: Any) -> Item | Bad:
        """The document of one record, which may be any JSON value."""
        if not isinstance(record, dict):
            return Bad(row, "not a JSON object", f"it is {type(record).__name__}")
        if self.chat:
            return to_messages(row, record, self.layout, self.columns)
        if self.column not in record:
            return Bad(row, f"no `{self.column}`", f"keys: {', '.join(record)[:200]}", tuple(record))
        return self.text(row, record[self.column])

    def text(self, row: int, value: Any) -> Item | Bad:
        """The document of what stands under the wanted column."""
        if isinstance(value, str):
            return checked(row, value)
        return Bad(row, f"null `{self.column}`") if value is None else Bad(row, f"`{self.column}` is not text", type(value).__name__)

    def missing(self, place: str, keys: tuple[str, ...] | list[str]) -> WrongInput:
        """The error for a source whose records do not have what is wanted."""
        if not self.chat:
            return missing_column(place, self.column, keys)
        return WrongInput(f"{place} has no chat (layout {self.layout}) in its columns {', '.join(keys)[:500]}: set `layout` and `columns` of this source")
