"""What is said in a document as `ingest` stores it, whatever its kind: what cleaning compares, and
what a vocabulary is learnt from.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from ingot.config.sections.objective import Documents
from ingot.data.chats import from_messages
from ingot.data.examples import from_labelled, from_pair
from ingot.data.messages import Message, compact
from ingot.data.preferences import from_preference


def said(documents: Documents, stored: str) -> list[str]:
    """The texts of a document, one after another: contents of messages, both sides of a pair, the
    text that has a label.

    Raises:
        WrongInput: it is not what `ingest` stores for this kind.
    """
    if documents == "text":
        return [stored]
    if documents == "chat":
        return _contents(from_messages(stored))
    if documents == "preference":
        return [content for messages in from_preference(stored) for content in _contents(messages)]
    return list(from_pair(stored)) if documents == "pair" else [from_labelled(stored).text]


def plain_text(documents: Documents, stored: str) -> str:
    """All that is said in a document as one text.

    Raises:
        WrongInput: as `said`.
    """
    return stored if documents == "text" else "\n".join(said(documents, stored))


def with_said(
    documents: Documents, stored: str, change: Callable[[list[str]], Sequence[str]]
) -> str:
    """The document with its texts changed, and nothing else; `change` gets those of `said` and
    gives as many.

    Raises:
        WrongInput: as `said`.
    """
    texts = iter(change(said(documents, stored)))
    if documents == "text":
        return next(texts)
    value: dict[str, Any] = json.loads(stored)
    return compact(
        {
            name: field if isinstance(field, int) else _changed(field, texts)
            for name, field in value.items()
        }
    )


def _changed(field: Any, texts: Any) -> Any:
    return (
        next(texts)
        if isinstance(field, str)
        else [{**message, "content": next(texts)} for message in field]
    )


def _contents(messages: Sequence[Message]) -> list[str]:
    return [message["content"] for message in messages]
