"""A chat as templates read it: messages, and the tools that the model may call in them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ingot.base.exact_json import parse_json

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]
"""Functions in OpenAI's format: `{"type": "function", "function": {"name": ..., ...}}`."""
MARKS = ("weight", "loss_weight", "train", "training")
"""The keys by which a message of the assistant says whether it is trained, 0 or 1: OpenAI's,
LLaMA-Factory's and axolotl's.
"""
THOUGHTS = ("reasoning_content", "thinking")
"""The keys of what is thought before a content."""


@dataclass(frozen=True)
class Chat:
    """Messages with `role`, `content` and whatever else a template reads; `tools`: None if the
    model is told of none.
    """

    messages: Messages
    tools: Tools | None = None

    def __len__(self) -> int:
        return len(self.messages)

    def until(self, count: int) -> Chat:
        """The chat with its first messages alone."""
        return Chat(self.messages[:count], self.tools)


def is_trained(message: Mapping[str, Any]) -> bool:
    """Whether an assistant's message is trained, as all are but those that say otherwise."""
    return all(message.get(mark, 1) != 0 for mark in MARKS)


def tool(function: Mapping[str, Any]) -> dict[str, Any]:
    """A function as a tool: what a server is told of it and no more, always in one order, since
    most templates write it as JSON.
    """
    said = {key: function.get(key) for key in ("name", "description", "parameters")}
    kept = {key: value for key, value in said.items() if value is not None}
    return {"type": "function", "function": kept}


def with_arguments(messages: Messages, *, as_text: bool) -> Messages:
    """The messages with the arguments of all calls as objects, or `as_text`, as JSON in one form:
    OpenAI's format has a text, which most templates would write as JSON once more.
    """
    return [
        {**message, "tool_calls": [_call(call, as_text) for call in calls]}
        if isinstance(calls := message.get("tool_calls"), list | tuple)
        else message
        for message in messages
    ]


def _call(call: Any, as_text: bool) -> Any:
    if not isinstance(call, Mapping):
        return call
    if isinstance(function := call.get("function"), Mapping):
        return {**call, "function": _call(function, as_text)}
    given = call.get("arguments")
    if isinstance(given, str):
        try:
            given = parse_json(given)
        except (ValueError, RecursionError):
            return call
    if not isinstance(given, Mapping):
        return call
    return {**call, "arguments": json.dumps(given, ensure_ascii=False) if as_text else given}
