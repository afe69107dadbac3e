"""The tools that are described beside the messages of a record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ingot.base.exact_json import parse_json
from ingot.data.documents.messages import ColumnNames, RecordError, column
from ingot.tokenizers.chats.chat import tool


def tools_of(record: Mapping[str, Any], columns: ColumnNames) -> list[dict[str, Any]] | None:
    """The functions that the model may call, in OpenAI's format, from a column that has them so,
    or without the frame of that format, or as JSON in a string; None if there are none.
    """
    value, name = column(record, "tools", columns), columns.get("tools", "tools")
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
