"""What stands beside the messages of a record: the tools, and what would change the chat and is not
read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ingot.base.exact_json import parse_json
from ingot.data.documents.messages import UNREAD, ColumnNames, RecordError, column
from ingot.tokenizers.chats.chat import tool


def tools_of(record: Mapping[str, Any], columns: ColumnNames) -> list[dict[str, Any]] | None:
    """The functions that the model may call, in OpenAI's format, from a column that has them so,
    or without the frame of that format, or as JSON in a string; None if there are none. The column
    is `tools`, or what OpenAI called it before, `functions`.
    """
    found = _tools(record, "tools", columns)
    if found is None and "tools" not in columns:
        found = _tools(record, "functions", columns)
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


def _holds(value: Any, *, within: bool = False) -> bool:
    """Whether there is anything in a value, which may be text of JSON or of Python. False and 0 are
    nothing in the place of images or variables, but may be the value of one.
    """
    if isinstance(value, str):
        text = value.strip()
        if not text or text.lower() in ("none", "nan"):
            return False
        try:
            return _holds(_of_text(text), within=within)
        except (ValueError, RecursionError):
            return True
    if isinstance(value, Mapping):
        return any(_holds(item, within=True) for item in value.values())
    if isinstance(value, list | tuple):
        return any(_holds(item, within=True) for item in value)
    return value is not None and value == value and (within or bool(value))  # NaN is none


def _of_text(text: str) -> Any:
    """The value of a text of JSON, or of what Python shows, as far as that tells whether there is
    anything in it.
    """
    try:
        return parse_json(text)
    except ValueError:
        for shown, meant in (("'", '"'), ("None", "null"), ("False", "false"), ("True", "true")):
            text = text.replace(shown, meant)
        return parse_json(text)


def _tools(
    record: Mapping[str, Any], usual: str, columns: ColumnNames
) -> list[dict[str, Any]] | None:
    name = columns.get(usual, usual)
    value = record.get(name)
    if not _holds(value):
        return None
    try:
        return [_tool(item) for item in _items(value)]
    except RecordError as fault:
        way_out = f"; columns={{{usual}: none}} leaves them out"
        raise RecordError("not a list of tools", f"`{name}` {fault}{way_out}") from None


def _items(value: Any) -> Sequence[Any]:
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except (ValueError, RecursionError):
            raise RecordError("is no JSON") from None
    if not isinstance(value, list | tuple):
        raise RecordError(f"is {type(value).__name__}")
    return value


def _tool(value: Any) -> dict[str, Any]:
    function = value.get("function", value) if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RecordError(f"has {str(value)[:40]!r}")
    return tool(function)
