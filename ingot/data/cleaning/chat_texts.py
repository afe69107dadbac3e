"""The texts of chats: what is compared is what was said, whoever said it."""

from __future__ import annotations

import json

import pyarrow as pa

from ingot.data.chats import from_messages, plain_text
from ingot.data.cleaning.normal import normalize


def plain_texts(chats: pa.Array) -> pa.Array:
    """The contents of each chat's messages, one after another.

    Raises:
        WrongInput: a text is no chat as `ingest` stores it.
    """
    return pa.array([plain_text(chat) for chat in chats.to_pylist()], pa.string())


def normalize_chats(chats: pa.Array, form: str) -> pa.Array:
    """Chats whose contents are in a normal form, by the library that normalises all other texts.

    Raises:
        WrongInput: a text is no chat as `ingest` stores it.
    """
    if form == "none" or normalize(chats, form).equals(chats):
        return chats
    return pa.array([_normalized(chat, form) for chat in chats.to_pylist()], pa.string())


def _normalized(chat: str, form: str) -> str:
    messages = from_messages(chat)
    contents = normalize(pa.array([message["content"] for message in messages], pa.string()), form).to_pylist()
    found = [{**message, "content": content} for message, content in zip(messages, contents, strict=True)]
    return json.dumps({"messages": found}, ensure_ascii=False, separators=(",", ":"))
