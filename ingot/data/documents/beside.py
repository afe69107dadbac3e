"""What stands beside the messages of a record: the tools, and what would change the chat and is not
read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ingot.base.exact_json import parse_json
from ingot.data.documents.messages import UNREAD, ColumnNames, RecordError, column
from ingot.tokenizers.chats.chat import tool


def tools_of(record: Mapping[str, Any], columns: ColumnNames) -> list[dict[str, Any]] | None:
    """The functions that the model may call, in OpenAI's format, from a column that has them so,
    or without the frame of that format, or as JSON in a string; None if there are none. The column
    is `tools`, or what OpenAI called it before, `functions`.
    """
    name = columns.get("tools", "tools")
    found = _tools(record.get(name), name)
    if found is None and "tools" not in columns:
        name = columns.get("functions", "functions")
        found = _tools(record.get(name), name)
    return found


def refuse_unread(record: Mapping[str, Any], columns: ColumnNames) -> None:
    """Raises RecordError if the chat has images or the like, or variables of its own for the
    template: without them it would be trained on as another chat.
    """
    for usual, told in UNREAD.items():
        if _holds(column(record, usual, columns)):
            name = columns.get(usual, usual)
            raise RecordError(
                f"`{name}` is not read", f"{told}; columns={{{usual}: none}} leaves them out"
            )


def _holds(value: Any) -> bool:
    """Whether there is anything in a value, which may be JSON in a string."""
    if isinstance(value, str):
        try:
            return bool(value.strip()) and _holds(parse_json(value))
        except (ValueError, RecursionError):
            return True
    if isinstance(value, Mapping):
        return any(map(_holds, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds, value))
    return value is not None


def _tools(value: Any, name: str) -> list[dict[str, Any]] | None:
    if isinstance(value, str):
        try:
            value = parse_json(value) if value.strip() else None
        except (ValueError, RecursionError):
            raise RecordError("not a list of tools", f"`{name}` is no JSON") from None
    if value is None or value == []:
        return None
    if not isinstance(value, list | tuple):
        raise RecordError("not a list of tools", f"`{name}` is {type(value).__name__}")
    return [_tool(item, name) for item in value]


def _tool(value: Any, name: str) -> dict[str, Any]:
    function = value.get("function", value) if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RecordError("not a list of tools", f"`{name}` has {str(value)[:40]!r}")
    return tool(function)
