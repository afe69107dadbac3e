"""A prompt and what answers it, in columns of their own: each is a string or messages, which may be
JSON in a string, as in CSV.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ingot.data.documents.messages import (
    ROLES,
    TAGS,
    THOUGHTS,
    ColumnNames,
    Message,
    RecordError,
    alpaca_prompt,
    assistant,
    column,
    messages_of,
    text_of,
    user,
)
from ingot.tokenizers.chats.chat import MARKS

BESIDE_CONTENTS = frozenset(
    {*THOUGHTS, *MARKS, "name", "tool_call_id", "refusal", "annotations", "audio"}
)
"""What messages have beside role and content."""


def prompt_in(
    record: Mapping[str, Any], kind: str, columns: ColumnNames, *, guess: bool
) -> list[Message] | None:
    """The messages before the answers; None if no column has them."""
    if kind == "alpaca":
        return alpaca_prompt(record, columns, "preference")
    for name in ("conversations",) if kind == "sharegpt" else ("prompt", "messages"):
        if (value := column(record, name, columns)) is not None:
            own = _in_json(value, columns)
            # A list in a column for messages is one of messages, or wrong.
            return (
                [user(value)]
                if isinstance(own, str) and (name == "prompt" or not own.lstrip().startswith("[{"))
                else messages_of(own, kind, columns, guess=guess)
            )
    return None


def answer_in(
    record: Mapping[str, Any], name: str, kind: str, columns: ColumnNames, *, guess: bool
) -> list[Message]:
    """An answer: a string, one message, or several."""
    value = _in_json(column(record, name, columns), columns)
    if isinstance(value, str):
        return [assistant(text_of(value, columns.get(name, name)))]
    return messages_of(
        [value] if isinstance(value, Mapping) else value,
        "messages" if kind == "alpaca" else kind,
        columns,
        guess=guess or kind == "alpaca",
    )


def _in_json(value: Any, columns: ColumnNames) -> Any:
    """Parse a string that is JSON of one or several messages; any other string is returned
    unchanged, such as an answer that is JSON itself.
    """
    if not isinstance(value, str) or not value.lstrip().startswith(("[{", "{")):
        return value
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        _refuse_python(value, columns)
        return value
    return found if _are_messages(found, columns) else value


def _refuse_python(text: str, columns: ColumnNames) -> None:
    """Refuse messages as Python or NumPy show them, which would be trained on as they stand."""
    if not text.rstrip().endswith(("}", "}]")):
        return
    for tags in TAGS.values():
        role, content = (re.escape(columns.get(tag, tag)) for tag in tags)
        known = "|".join(ROLES)
        if re.search(rf"'{role}': *'({known})'", text, re.IGNORECASE) and re.search(
            rf"'({content}|tool_calls|function_call)': ", text
        ):
            raise RecordError(
                "messages as Python shows them",
                f"{text[:40]!r} is no JSON; save the data set as JSON lines or Parquet instead of"
                " CSV",
            )


def _are_messages(found: Any, columns: ColumnNames) -> bool:
    """Whether all have a role in one layout, and one a role that is known and a content, so that a
    message with a fault is found; an object alone, as answers in JSON are, must be no more than
    a message.
    """
    turns = found if isinstance(found, list) else [found]
    if not all(isinstance(turn, Mapping) for turn in turns):
        return False
    for tags in TAGS.values():
        role, content = (columns.get(tag, tag) for tag in tags)
        contents = {content, "tool_calls", "function_call"}
        if all(role in turn for turn in turns) and any(
            contents & set(turn) and str(turn[role]).lower() in ROLES for turn in turns
        ):
            given = {key for turn in turns for key, field in turn.items() if field is not None}
            return isinstance(found, list) or given <= {role, *contents, *BESIDE_CONTENTS}
    return False


def begins_with(side: Sequence[Message], prompt: Sequence[Message]) -> bool:
    return bool(prompt) and list(side[: len(prompt)]) == list(prompt)
