"""The shape of a chat: its roles, and which keys and values its messages have, without what is
said. Chats of one shape differ in their values alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ingot.tokenizers.chats.unseen import Slot, Value, Watch

MOST_MESSAGES = 1000
LITERAL, MEASURED, MAPPED = {"type"}, {"id", "tool_call_id"}, {"arguments"}
"""Keys whose text belongs to the shape, as templates compare it; whose length does, as templates
check it; and whose mapping is one value, as templates write it as JSON.
"""
Form = tuple[Any, ...]
"""What a value beside content is: `("text",)`, `("text", length)` and `("mapping",)` stand for a
value of the chat, all others for themselves.
"""
Shape = tuple[tuple[str, bool, tuple[tuple[str, Form], ...]], ...]
"""For each message its role, whether it has a content, and the forms of its other keys."""


class _Shapeless(Exception):
    """A chat has values that no template should be expected to treat like others."""


def shape_of(messages: Sequence[Mapping[str, Any]]) -> tuple[Shape, list[Value]] | None:
    """The shape of a chat and its values: the contents of all messages, then the others in their
    order. None if white space alone is said, if the assistant says nothing and calls nothing, if
    there is no message, or if a message is of another kind than `ingest` stores.
    """
    if not 0 < len(messages) <= MOST_MESSAGES:
        return None
    others: list[tuple[tuple[str, Form], ...]] = [()] * len(messages)
    more: list[Value] = []
    try:
        roles = [message["role"] for message in messages]
        contents: list[Value] = [message["content"] for message in messages]
        if set(map(len, messages)) != {2}:
            others = [_others(message, more) for message in messages]
    except (KeyError, _Shapeless):
        return None
    if set(map(type, roles)) != {str} or set(map(type, contents)) != {str}:
        return None
    if any(map(str.isspace, contents)) or (  # type: ignore[arg-type]
        "" in contents
        and any(
            role == "assistant" and not content and not dict(keys).get("tool_calls")
            for role, content, keys in zip(roles, contents, others, strict=True)
        )
    ):
        return None
    return tuple(zip(roles, map(bool, contents), others, strict=True)), contents + more


def _others(message: Mapping[str, Any], values: list[Value]) -> tuple[tuple[str, Form], ...]:
    if list(message)[:2] != ["role", "content"]:
        raise _Shapeless
    return tuple((key, _form(key, message[key], values)) for key in list(message)[2:])


def _form(key: str, value: Any, values: list[Value]) -> Form:
    kind = type(value)
    if kind is str and value and key not in LITERAL:
        if value.isspace():
            raise _Shapeless
        values.append(value)
        return ("text", len(value)) if key in MEASURED else ("text",)
    if kind is dict:
        if key in MAPPED and value:
            values.append(value)
            return ("mapping",)
        if any(type(name) is not str for name in value):
            raise _Shapeless
        return "keys", tuple((name, _form(name, value[name], values)) for name in value)
    if kind is list:
        return "items", tuple(_form(key, item, values) for item in value)
    if kind in (str, int, float, bool, type(None)):
        return "literal", kind.__name__, value
    raise _Shapeless


def unseen_chat(shape: Shape, watch: Watch) -> list[dict[str, Any]]:
    """A chat of this shape whose values report to `watch`."""

    def make(number: int, form: Form) -> Any:
        if form[0] == "mapping":
            return watch.mapping(number)
        mark = watch.mark(Slot(number))
        return watch.text(mark, form[1] if len(form) > 1 else None)

    return _chat_of(shape, make)


def probe_of(shape: Shape) -> tuple[list[dict[str, Any]], list[Value]]:
    """A chat of this shape with made-up values, and these."""
    values: dict[int, Value] = {}

    def make(number: int, form: Form) -> Value:
        # None begins with another one, as most values do not.
        text = f"{number}probe"
        if len(form) > 1:
            text = text[: form[1]].ljust(form[1], "e")
        values[number] = {text: text} if form[0] == "mapping" else text
        return values[number]

    chat = _chat_of(shape, make)
    return chat, [values.get(number, "") for number in range(max(values, default=-1) + 1)]


def _chat_of(shape: Shape, make: Callable[[int, Form], Any]) -> list[dict[str, Any]]:
    numbers = iter(range(len(shape), 10**9))
    return [
        {
            "role": role,
            "content": make(number, ("text",)) if said else "",
            **{key: _made(form, make, numbers) for key, form in others},
        }
        for number, (role, said, others) in enumerate(shape)
    ]


def _made(form: Form, make: Callable[[int, Form], Any], numbers: Iterator[int]) -> Any:
    match form[0]:
        case "keys":
            return {key: _made(inner, make, numbers) for key, inner in form[1]}
        case "items":
            return [_made(inner, make, numbers) for inner in form[1]]
        case "literal":
            return form[2]
    return make(next(numbers), form)
