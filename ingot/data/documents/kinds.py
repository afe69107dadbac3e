"""The kinds of documents: how a record becomes one, and which texts a stored document of any kind
contains.

All kinds but plain texts are stored as compact JSON, and have files of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ingot.base.errors import WrongInput
from ingot.base.exact_json import compact_json, parse_json
from ingot.config.sections.data import SourceSettings
from ingot.config.sections.objective import CHAT_TEMPLATED, PLAIN, Documents
from ingot.data.documents import chats, preferences, rated
from ingot.data.documents.chats import from_chat, to_chat
from ingot.data.documents.examples import (
    LABELLED,
    PAIR,
    from_labelled,
    from_pair,
    to_labelled,
    to_pair,
)
from ingot.data.documents.messages import UNREAD, check_columns, written
from ingot.data.documents.preferences import from_preference, to_preference
from ingot.data.documents.rated import from_rated, to_rated
from ingot.data.documents.records import (
    BadRecord,
    ParsedDocument,
    checked,
    missing_column,
    not_an_object,
)
from ingot.tokenizers.chats.chat import THOUGHTS, Messages

TEXT = frozenset({"text"})
OF_SEVERAL_TEXTS: tuple[Documents, ...] = (*CHAT_TEMPLATED, "pair")
CHATS = {"chat": to_chat, "preference": to_preference, "rated": to_rated}
CHAT_COLUMNS = {"chat": chats.ALL, "preference": preferences.ALL, "rated": rated.ALL}
USUAL = {
    "chat": "{prompt: YOURS, completion: YOURS}",
    "preference": "{prompt: YOURS, chosen: YOURS, rejected: YOURS}",
    "rated": "{prompt: YOURS, completion: YOURS, label: YOURS}",
}
"""What `columns` may say for kinds that are found in several layouts."""

PLURALS: dict[Documents, str] = {
    "text": "texts",
    "chat": "chats",
    "preference": "preferences",
    "rated": "rated answers",
    "pair": "pairs",
    "labelled": "labelled texts",
    "masked": "texts",
}


@dataclass(frozen=True)
class DocumentExtractor:
    """Makes a document of each record of a source. `names` are the column names of a table without
    a header line, `classes` the names that a table itself has for numbers of classes.
    """

    column: str = "text"
    documents: Documents = "text"
    layout: str = "auto"
    columns: Mapping[str, str] = field(default_factory=dict)
    labels: Sequence[str] = ()
    names: Sequence[str] = ()
    classes: Sequence[str] = ()

    @classmethod
    def for_source(
        cls, source: SourceSettings, documents: Documents, labels: Sequence[str] = ()
    ) -> DocumentExtractor:
        """Raises WrongInput if `columns` of a source of plain texts renames another column, or a
        layout is given for documents that have one form alone.
        """
        if source.layout != "auto" and documents not in CHAT_TEMPLATED:
            raise WrongInput(
                f"{source.source}: layout {source.layout} is how chats and preferences are written"
                f" down, and {PLURALS[documents]} are read; remove it, or set an objective for"
                " those"
            )
        if documents in PLAIN:
            check_columns(TEXT, tuple(source.columns), "a text")
            column = source.columns.get("text", source.text)
            return cls(column, documents, names=source.names)
        own = (
            {"text": source.text}
            if documents == "labelled" or (source.layout == "hh" and documents == "chat")
            else {}
        )
        return cls(
            source.text, documents, source.layout, own | source.columns, labels, source.names
        )

    @property
    def takes_records(self) -> bool:
        """Whether a document is made of a whole record rather than of one text column."""
        return self.documents not in PLAIN

    @property
    def exact_numbers(self) -> bool:
        """Whether numbers in records must be kept exactly: the arguments of a tool call in a
        message.
        """
        return self.documents in CHAT_TEMPLATED

    @property
    def required_columns(self) -> list[str]:
        """The columns that every record must have, as far as that does not depend on the record."""
        if self.exact_numbers:
            return []
        return (
            [self.columns.get(name, name) for name in self._usual_columns]
            if self.takes_records
            else [self.column]
        )

    def read_columns(self, there: Sequence[str]) -> list[str]:
        """The columns of a table that records are made of; others may hold what no Python value
        can, such as dates far away.
        """
        if not self.exact_numbers:
            return self.required_columns
        known = {self.columns.get(name, name) for name in CHAT_COLUMNS[self.documents]}
        return [name for name in there if name in known]

    @property
    def asked_columns(self) -> set[str]:
        """The columns of which a record only tells whether there is anything in them."""
        return {self.columns.get(name, name) for name in UNREAD} if self.exact_numbers else set()

    def check(self, place: str, there: Sequence[str]) -> None:
        """Raises WrongInput if a table lacks required columns, or has two of one that is read."""
        if any(name not in there for name in self.required_columns):
            raise self.missing_error(place, list(there))
        for name in self.read_columns(there):
            if there.count(name) > 1:
                raise WrongInput(
                    f"{place} has {there.count(name)} columns `{name}`; rename or remove the others"
                )

    def extract(self, row: int, record: Any) -> ParsedDocument | BadRecord:
        """The document of one record, which may be any JSON value."""
        if not isinstance(record, dict):
            return not_an_object(row, record)
        if self.exact_numbers:
            to_chats = CHATS[self.documents]
            return to_chats(row, record, self.layout, self.columns)
        if self.documents == "pair":
            return to_pair(row, record, self.columns)
        if self.documents == "labelled":
            return to_labelled(row, record, self.columns, self.labels, self.classes)
        if self.column not in record:
            return BadRecord(
                row, f"no `{self.column}`", f"keys: {', '.join(record)[:200]}", tuple(record)
            )
        return self.extract_text(row, record[self.column])

    def extract_text(self, row: int, value: Any) -> ParsedDocument | BadRecord:
        """The document of the value in the text column."""
        if isinstance(value, str):
            return checked(row, value)
        return (
            BadRecord(row, f"null `{self.column}`")
            if value is None
            else BadRecord(row, f"`{self.column}` is not text", type(value).__name__)
        )

    def missing_error(self, place: str, keys: Sequence[str]) -> WrongInput:
        """The error for a source whose records lack the required columns."""
        if not self.takes_records:
            return missing_column(place, self.column, list(keys))
        there = ", ".join(keys)[:500]
        if self.exact_numbers:
            return WrongInput(
                f"{place} has no {self.documents} (layout {self.layout}) in its columns {there}:"
                f" set `columns` of this source, such as {USUAL[self.documents]}{_other_way(keys)}"
            )
        lacking = " and ".join(f"`{name}`" for name in self.required_columns if name not in keys)
        return WrongInput(
            f"{place} has no column {lacking}; it has {there}: set `columns` of this source, such"
            f" as {{{', '.join(f'{name}: YOURS' for name in self._usual_columns)}}}"
        )

    @property
    def _usual_columns(self) -> Sequence[str]:
        return PAIR if self.documents == "pair" else LABELLED


def _other_way(keys: Sequence[str]) -> str:
    """What records with such columns are meant for."""
    if "chosen" in keys:
        return "; `chosen` and `rejected` are for dpo, ipo, simpo, orpo and reward"
    return "; rated answers with a `label` are for kto" if "label" in keys else ""


def said(documents: Documents, stored: str) -> list[str]:
    """The texts of a document in order: contents of messages, both sides of a pair, the text that
    is labelled.

    Raises:
        WrongInput: it is not what `ingest` stores for this kind.
    """
    if documents in PLAIN:
        return [stored]
    if documents in CHAT_TEMPLATED:
        return [message["content"] for message in _messages(documents, stored)]
    return list(from_pair(stored)) if documents == "pair" else [from_labelled(stored).text]


def plain_text(documents: Documents, stored: str) -> str:
    """All texts of a document as one string; of chats the thoughts and calls as well, but not the
    tools, which are often the same for all.

    Raises:
        WrongInput: as `said`.
    """
    if documents in PLAIN:
        return stored
    if documents not in CHAT_TEMPLATED:
        return "\n".join(said(documents, stored))
    return "\n".join(text for message in _messages(documents, stored) for text in written(message))


def whole_text(stored: str) -> str:
    """All of a document of several texts as compact JSON, in which texts do not run into each
    other: who says what, which side it is on, what else messages have, and the tools. Any white
    space in texts is a space here, which JSON writes as it is. The verdict on a rated answer is not
    part of it.
    """
    value: dict[str, Any] = parse_json(stored)
    return compact_json(
        {
            name: field if name == "tools" else _spaced(field)
            for name, field in value.items()
            if not isinstance(field, int)
        }
    )


def _spaced(field: Any) -> Any:
    """A text, or the texts of messages, with one space for any white space."""
    if isinstance(field, str):
        return " ".join(field.split())
    texts = ("content", *THOUGHTS)
    return [
        {
            key: _spaced(value) if key in texts and isinstance(value, str) else value
            for key, value in message.items()
        }
        for message in field
    ]


def with_texts(
    documents: Documents, stored: str, change: Callable[[list[str]], Sequence[str]]
) -> str:
    """The document with its texts replaced and all else unchanged; `change` maps the texts of
    `said` to as many new ones.

    Raises:
        WrongInput: as `said`.
    """
    texts = iter(change(said(documents, stored)))
    if documents in PLAIN:
        return next(texts)
    value: dict[str, Any] = parse_json(stored)
    return compact_json(
        {
            name: field if isinstance(field, int) or name == "tools" else _changed(field, texts)
            for name, field in value.items()
        }
    )


def _changed(field: Any, texts: Any) -> Any:
    return (
        next(texts)
        if isinstance(field, str)
        else [{**message, "content": next(texts)} for message in field]
    )


def _messages(documents: Documents, stored: str) -> Messages:
    """All messages of a chat, of a preference those of both sides."""
    if documents == "chat":
        return from_chat(stored).messages
    if documents == "preference":
        one = from_preference(stored)
        return [*one.prompt, *one.chosen, *one.rejected]
    return from_rated(stored).chat.messages
