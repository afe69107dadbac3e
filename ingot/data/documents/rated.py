"""Rated answers: one answer to a prompt, and whether it is good. Converted to one form, compact
JSON: `{"prompt": [messages], "answer": [messages], "label": 0 or 1}`, and `tools` as for chats.

The prompt is in the columns of a chat layout or in `prompt`, the answer in `completion` (of
Alpaca's layout in `output`), as strings or messages, and the verdict in `label`. Without an answer
of its own, a conversation is rated by its last message; one in the place of an answer, by what
follows its last question.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ingot.base.errors import WrongInput
from ingot.data.documents.extra_columns import refuse_unread, tools_of
from ingot.data.documents.messages import (
    LAYOUTS,
    ColumnNames,
    Message,
    RecordError,
    check_asks,
    check_columns,
    check_learned,
    column,
    has_content,
    missing_columns,
    parse_stored,
    stored,
    with_system,
)
from ingot.data.documents.prompts import (
    answer_in,
    conversations,
    prompt_column,
    prompt_in,
    split_system,
)
from ingot.data.documents.records import BadRecord, ParsedDocument
from ingot.tokenizers.chats.chat import Chat

COLUMNS: dict[str, frozenset[str]] = {
    "messages": LAYOUTS["messages"] | {"prompt", "completion", "label"},
    "sharegpt": LAYOUTS["sharegpt"] | {"completion", "label"},
    "alpaca": LAYOUTS["alpaca"] | {"label"},
}
ALL = frozenset().union(*COLUMNS.values())
VERDICTS = {"1": 1, "true": 1, "0": 0, "false": 0}


class Rated(NamedTuple):
    """The messages before the answer, those of the answer, 1 if it is good, 0 if it is bad, and the
    tools that it may call.
    """

    prompt: list[Message]
    answer: list[Message]
    label: int
    tools: list[dict[str, Any]] | None = None

    @property
    def chat(self) -> Chat:
        """The complete chat."""
        return Chat(self.prompt + self.answer, self.tools)


def to_rated(
    row: int, record: Mapping[str, Any], layout: str, columns: ColumnNames
) -> ParsedDocument | BadRecord:
    """The rated answer of one record as canonical JSON, or the reason why there is none.

    Args:
        layout: `messages`, `sharegpt`, `alpaca`, or `auto`, which chooses by the columns of the
            record.
        columns: standard name -> name in the record.

    Raises:
        WrongInput: rated answers have no such layout, or `columns` renames a column that it does
            not have.
    """
    if layout not in ("auto", *COLUMNS):
        raise WrongInput(
            f"layout {layout} is not for rated answers; give prompt, completion and label, and set"
            f" layout to auto, {', '.join(COLUMNS)}"
        )
    known = ALL if layout == "auto" else COLUMNS[layout]
    check_columns(known, tuple(columns), f"layout {layout} of rated answers")
    return stored(
        row,
        lambda: {
            **_checked(_rated(record, layout, columns))._asdict(),
            "tools": tools_of(record, columns),
        },
    )


def from_rated(rated: str) -> Rated:
    """Parse what `to_rated` wrote.

    Raises:
        WrongInput: it is no such rated answer.
    """
    return parse_stored(Rated, rated, "a rated answer")


def _rated(record: Mapping[str, Any], layout: str, columns: ColumnNames) -> Rated:
    refuse_unread(record, columns)
    label = _label(record, columns)
    kind = _layout(record, columns) if layout == "auto" else layout
    name, guess = "output" if kind == "alpaca" else "completion", layout == "auto"
    prompt = prompt_in(record, kind, columns, "rated answer", guess=guess)
    if prompt is None:
        raise missing_columns(record, "rated answer", "there is no prompt")
    if column(record, name, columns) is None:
        # A whole conversation, of which the last message is rated.
        before, answer = prompt[:-1], prompt[-1:]
    else:
        before, answer = prompt, answer_in(record, name, kind, columns, guess=guess)
        way_out = (
            f"columns={{messages: {columns.get(name, name)}, {name}: none,"
            f" {prompt_column(record, kind, columns)}: none}}"
        )
        if talks := conversations([answer], prompt, way_out):
            before, answer = _parted(talks[0], prompt)
    return Rated(with_system(before, record, columns), answer, label)


def _parted(talk: list[Message], prompt: list[Message]) -> tuple[list[Message], list[Message]]:
    """Split a whole conversation that repeats the prompt behind this and its last question: earlier
    answers are part of the prompt.
    """
    asked = len(split_system(talk)[0]) + len(split_system(prompt)[1])
    users = (place for place, message in enumerate(talk[:-1]) if message["role"] == "user")
    begin = max(asked, *(place + 1 for place in users), 0)
    return talk[:begin], talk[begin:]


def _layout(record: Mapping[str, Any], columns: ColumnNames) -> str:
    """The layout of the column that holds the prompt."""
    for name, kind in (("conversations", "sharegpt"), ("instruction", "alpaca")):
        if column(record, name, columns) is not None:
            return kind
    return "messages"


def _label(record: Mapping[str, Any], columns: ColumnNames) -> int:
    value, name = column(record, "label", columns), columns.get("label", "label")
    if value is None:
        paired = "; preferences with `chosen` and `rejected` are for dpo, ipo, simpo and orpo"
        told = paired if "chosen" in record else ""
        raise missing_columns(record, "rated answer", f"`{name}` is missing or null{told}")
    number = VERDICTS.get(str(value).strip().lower())
    if number is None or not isinstance(value, bool | int | str):
        raise RecordError("label is not true or false", f"`{name}` is {str(value)[:40]!r}")
    return number


def _checked(found: Rated) -> Rated:
    if not found.answer or not has_content(found.answer[-1]):
        raise RecordError("empty answer")
    for place in (0, -1):
        if (role := found.answer[place]["role"]) != "assistant":
            raise RecordError("no answer of the assistant", f"it is a {role} turn")
    check_learned(found.answer, "answer")
    check_asks(found.prompt)
    return found
