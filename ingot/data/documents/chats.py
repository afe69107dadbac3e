"""Converts chats in the usual layouts to one form: `{"messages": [{"role": ..., "content": ...},
...]}` as compact JSON, with `tools` beside the messages where a record describes such.

Accepted are OpenAI's `messages`, TRL's `prompt` and `completion`, ShareGPT's `conversations`,
Alpaca's `instruction`, `input`, `output`, and texts with `Human:` and `Assistant:` in them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ingot.data.documents.extra_columns import refuse_unread, tools_of
from ingot.data.documents.messages import (
    LAYOUTS,
    ColumnNames,
    Message,
    RecordError,
    alpaca_prompt,
    assistant,
    check_columns,
    column,
    has_content,
    hh_messages,
    messages_of,
    missing_columns,
    parse_stored,
    stored,
    text_of,
    with_system,
)
from ingot.data.documents.prompts import answer_in, conversations, prompt_in
from ingot.data.documents.records import BadRecord, ParsedDocument
from ingot.tokenizers.chats.chat import Chat

CHAT_COLUMN = {"messages": "messages", "sharegpt": "conversations"}
PROMPTED = ("prompt", "completion")
"""The columns of one exchange, in place of `messages`; each is a string or messages."""
ALL = frozenset().union(*LAYOUTS.values())


def to_chat(
    row: int, record: Mapping[str, Any], layout: str, columns: ColumnNames
) -> ParsedDocument | BadRecord:
    """The chat of one record as canonical JSON, or the reason why there is none.

    Null counts as absent, so that a table with a column for every key gives the same chat as JSON
    without them. A list of messages may also be JSON in a string, as in CSV. Keys of a message
    beside role and content are kept.

    Args:
        layout: `messages`, `sharegpt`, `alpaca`, `hh`, or `auto`, which chooses by the columns of
            the record.
        columns: standard name -> name in the record.

    Raises:
        WrongInput: `columns` renames a column that the layout does not have.
    """
    check_columns(ALL if layout == "auto" else LAYOUTS[layout], tuple(columns), f"layout {layout}")
    return stored(
        row,
        lambda: {
            "messages": _messages(record, layout, columns),
            "tools": tools_of(record, columns),
        },
    )


def from_chat(chat: str) -> Chat:
    """The chat that `to_chat` wrote.

    Raises:
        WrongInput: it is no such chat.
    """
    return parse_stored(Chat, chat, "a chat")


def _messages(record: Mapping[str, Any], layout: str, columns: ColumnNames) -> list[Message]:
    refuse_unread(record, columns)
    kind = _layout(record, columns) if layout == "auto" else layout
    if kind == "alpaca":
        messages = _alpaca(record, columns)
    elif kind == "hh":
        messages = hh_messages(_needed(record, "text", columns), columns.get("text", "text"))
    else:
        messages = _turns(record, kind, columns, guess=layout == "auto")
    messages = with_system(messages, record, columns)
    if not messages:
        raise RecordError("empty chat")
    if not any(message["role"] == "assistant" and has_content(message) for message in messages):
        raise RecordError("no assistant turn")
    return messages


def _turns(
    record: Mapping[str, Any], kind: str, columns: ColumnNames, *, guess: bool
) -> list[Message]:
    """The messages of a conversation, or those of a prompt and its completion."""
    if kind != "messages" or not _is_prompted(record, columns):
        value = _needed(record, CHAT_COLUMN[kind], columns)
        return messages_of(value, kind, columns, guess=guess)
    prompt = prompt_in(record, kind, columns, "chat", guess=guess) or []
    if any(message["role"] == "assistant" for message in prompt):
        # TRL would train the completion alone.
        raise RecordError(
            "the prompt has answers",
            "give it as `messages`, and what is not to be trained a `weight` of 0",
        )
    answer = answer_in(record, "completion", kind, columns, guess=guess)
    way_out = f"columns={{messages: {columns.get('completion', 'completion')}}}"
    talks = conversations([answer], prompt, way_out)
    return talks[0] if talks else [*prompt, *answer]


def _is_prompted(record: Mapping[str, Any], columns: ColumnNames) -> bool:
    return column(record, "messages", columns) is None and all(
        column(record, name, columns) is not None for name in PROMPTED
    )


def _layout(record: Mapping[str, Any], columns: ColumnNames) -> str:
    """The first layout whose columns are present. A text column alone is too common to be taken for
    a chat.
    """
    for kind, name in CHAT_COLUMN.items():
        if column(record, name, columns) is not None:
            return kind
    if all(column(record, name, columns) is not None for name in ("instruction", "output")):
        return "alpaca"
    if _is_prompted(record, columns):
        return "messages"
    raise missing_columns(
        record,
        "chat",
        "neither messages, conversations, instruction and output, nor prompt and completion",
    )


def _needed(record: Mapping[str, Any], usual: str, columns: ColumnNames) -> Any:
    value = column(record, usual, columns)
    if value is None:
        raise missing_columns(record, "chat", f"`{columns.get(usual, usual)}` is missing or null")
    return value


def _alpaca(record: Mapping[str, Any], columns: ColumnNames) -> list[Message]:
    prompt = alpaca_prompt(record, columns, "chat")
    return [
        *prompt,
        assistant(text_of(_needed(record, "output", columns), columns.get("output", "output"))),
    ]
