"""Chats as people write them down, brought to one form: `{"messages": [{"role": ..., "content": ...}, ...]}` as compact JSON.

Three layouts come in: OpenAI's `messages`, ShareGPT's `conversations`, Alpaca's `instruction`, `input`, `output`. Roles come
out as `system`, `user`, `assistant`, `tool`; contents as text. Descriptions of tools beside the messages are not kept.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from typing import Any

from ingot.base.errors import WrongInput
from ingot.data.items import Bad, Item, checked

Message = dict[str, Any]

ROLES = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user", "prompter": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant", "function_call": "assistant",
    "tool": "tool", "observation": "tool", "function": "tool", "function_response": "tool", "ipython": "tool",
}
TAGS = {"messages": ("role", "content"), "sharegpt": ("from", "value")}
CHAT_COLUMN = {"messages": "messages", "sharegpt": "conversations"}
COLUMNS = {
    "messages": {"messages", "role", "content", "system"},
    "sharegpt": {"conversations", "from", "value", "system"},
    "alpaca": {"instruction", "input", "output", "system", "history"},
}


class _Fault(Exception):
    """Why a record is no chat: a reason that is counted, and the details of this one."""

    def __init__(self, reason: str, detail: str = "", keys: tuple[str, ...] = ()) -> None:
        super().__init__(reason)
        self.reason, self.detail, self.keys = reason, detail, keys


def to_messages(row: int, record: Mapping[str, Any], layout: str, columns: Mapping[str, str]) -> Item | Bad:
    """The chat of one record as canonical JSON, or why it holds none.

    What is null counts as absent, so that a table with a column for every key gives the same chat as JSON without them. A
    list of messages may also be JSON in a text, as CSV has it. Keys of a message beside role and content are kept.

    Args:
        layout: `messages`, `sharegpt`, `alpaca`, or `auto`, which goes by the columns of the record.
        columns: usual name -> name in the record.

    Raises:
        WrongInput: `columns` renames what the layout does not have.
    """
    _check_columns(layout, tuple(columns))
    try:
        messages = _messages(record, layout, columns)
        return checked(row, _stored(messages))
    except _Fault as fault:
        return Bad(row, fault.reason, fault.detail, fault.keys)
    except (TypeError, ValueError, RecursionError) as error:
        return Bad(row, "not JSON", str(error)[:80])


def from_messages(stored: str) -> list[Message]:
    """The messages of a chat that `to_messages` wrote.

    Raises:
        WrongInput: it is no such chat.
    """
    try:
        messages: list[Message] = json.loads(stored)["messages"]
    except (ValueError, TypeError, KeyError):
        raise WrongInput(f"{stored[:60]!r} is not a chat as `ingot ingest` stores it; run `ingot ingest` again") from None
    return messages


def plain_text(stored: str) -> str:
    """What was said in a chat, one content after the other."""
    return "\n".join(message["content"] for message in from_messages(stored))


def _stored(messages: list[Message]) -> str:
    return json.dumps({"messages": messages}, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


@functools.lru_cache(maxsize=64)
def _check_columns(layout: str, renamed: tuple[str, ...]) -> None:
    known = set().union(*COLUMNS.values()) if layout == "auto" else COLUMNS[layout]
    if unknown := sorted(set(renamed) - known):
        raise WrongInput(
            f"`columns` of a source renames {', '.join(unknown)}, which layout {layout} does not have; write USUAL: YOURS, "
            f"where USUAL is one of {', '.join(sorted(known))}"
        )


def _messages(record: Mapping[str, Any], layout: str, columns: Mapping[str, str]) -> list[Message]:
    kind = _layout(record, columns) if layout == "auto" else layout
    if kind == "alpaca":
        messages = _alpaca(record, columns)
    else:
        column = columns.get(CHAT_COLUMN[kind], CHAT_COLUMN[kind])
        if record.get(column) is None:
            raise _no_columns(record, f"`{column}` is missing or null")
        turns = _turns(record[column])
        tags = _tags(turns, kind, columns, guess=layout == "auto")
        messages = [*_system(record, columns), *(_message(turn, *tags) for turn in turns)]
    if not messages:
        raise _Fault("empty chat")
    if not any(message["role"] == "assistant" and _says(message) for message in messages):
        raise _Fault("no assistant turn")
    return messages


def _layout(record: Mapping[str, Any], columns: Mapping[str, str]) -> str:
    """The first layout whose columns are there."""
    there = {usual for kind in COLUMNS.values() for usual in kind if record.get(columns.get(usual, usual)) is not None}
    for kind, column in CHAT_COLUMN.items():
        if column in there:
            return kind
    if {"instruction", "output"} <= there:
        return "alpaca"
    raise _no_columns(record, "neither messages, conversations, nor instruction and output")


def _no_columns(record: Mapping[str, Any], why: str) -> _Fault:
    keys = tuple(str(key) for key in record)
    return _Fault("no chat columns", f"{why}; keys: {', '.join(keys)[:200]}", keys)


def _turns(value: Any) -> list[Mapping[str, Any]]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise _Fault("not a list of messages", f"{value[:40]!r} is no JSON") from None
    if not isinstance(value, list | tuple):
        raise _Fault("not a list of messages", f"it is {type(value).__name__}")
    for number, turn in enumerate(value):
        if not isinstance(turn, Mapping):
            raise _Fault("not a list of messages", f"message {number} is {type(turn).__name__}")
    return list(value)


def _tags(turns: list[Mapping[str, Any]], kind: str, columns: Mapping[str, str], *, guess: bool) -> tuple[str, str]:
    """The keys of role and content; some write one layout's keys under the other one's column."""
    role, content = (columns.get(tag, tag) for tag in TAGS[kind])
    if guess and turns and role not in turns[0]:
        for other in TAGS.values():
            if other[0] in turns[0]:
                return other
    return role, content


def _message(turn: Mapping[str, Any], role_tag: str, content_tag: str) -> Message:
    role = turn.get(role_tag)
    if not isinstance(role, str) or role.lower() not in ROLES:
        raise _Fault("unknown role", f"`{role_tag}` is {str(role)[:40]!r}")
    others = {key: value for key, value in turn.items() if key not in (role_tag, content_tag, "role", "content") and value is not None}
    content = turn.get(content_tag)
    if content is None and others.get("tool_calls"):
        content = ""
    return {"role": ROLES[role.lower()], "content": _text(content, content_tag), **others}


def _text(value: Any, name: str) -> str:
    """A content that is a text, or a list of text parts."""
    if isinstance(value, list | tuple):
        return "".join(_part(part, name) for part in value)
    if not isinstance(value, str):
        raise _Fault("content is not text", f"`{name}` is {'null' if value is None else type(value).__name__}")
    return value


def _part(part: Any, name: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type", "text") == "text":
        for key in ("text", "value"):
            if isinstance(part.get(key), str):
                return str(part[key])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise _Fault("content is not text", f"`{name}` has a part of type {str(kind)[:40]}")


def _system(record: Mapping[str, Any], columns: Mapping[str, str]) -> list[Message]:
    """A system prompt in a column of its own."""
    name = columns.get("system", "system")
    value = record.get(name)
    return [{"role": "system", "content": _text(value, name)}] if value not in (None, "") else []


def _alpaca(record: Mapping[str, Any], columns: Mapping[str, str]) -> list[Message]:
    def field(usual: str, *, needed: bool = False) -> str:
        name = columns.get(usual, usual)
        if needed and record.get(name) is None:
            raise _no_columns(record, f"`{name}` is missing or null")
        return _text("" if record.get(name) is None else record[name], name)

    question = "\n".join(text for text in (field("instruction", needed=True), field("input")) if text)
    answer = field("output", needed=True)
    history = record.get(columns.get("history", "history"))
    return [*_system(record, columns), *_pairs([] if history in (None, "") else history), *_exchange(question, answer)]


def _pairs(history: Any) -> Iterable[Message]:
    if isinstance(history, str):
        try:
            history = json.loads(history)
        except (ValueError, RecursionError):
            raise _Fault("history is not a list of pairs", f"{history[:40]!r} is no JSON") from None
    if not isinstance(history, list | tuple):
        raise _Fault("history is not a list of pairs", f"it is {type(history).__name__}")
    for pair in history:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise _Fault("history is not a list of pairs")
        yield from _exchange(_text(pair[0], "history"), _text(pair[1], "history"))


def _exchange(question: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _says(message: Message) -> bool:
    return bool(message["content"].strip() or message.get("tool_calls"))
