"""Preferences: two answers to one prompt, of which one is better. Converted to one form, compact
JSON: `{"prompt": [messages], "chosen": [messages], "rejected": [messages]}`, and `tools` as for
chats.

They come in the layouts of chats. The prompt is in the layout's own columns, or in `prompt`, as
messages or a string; the answers are in `chosen` and `rejected`, as strings or messages. If these
are whole conversations, the prompt is their common beginning, whatever a column repeats of it;
where that has another prompt, they are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from ingot.data.documents.extra_columns import refuse_unread, tools_of
from ingot.data.documents.messages import (
    BESIDE,
    LAYOUTS,
    SPEAKER,
    ColumnNames,
    Message,
    RecordError,
    check_asks,
    check_columns,
    check_learned,
    column,
    has_content,
    hh_messages,
    missing_columns,
    parse_stored,
    stored,
    with_system,
)
from ingot.data.documents.prompts import answer_in, conversations, prompt_column, prompt_in
from ingot.data.documents.records import BadRecord, ParsedDocument
from ingot.tokenizers.chats.chat import Chat

Side = Literal["chosen", "rejected"]
SIDES: tuple[Side, Side] = ("chosen", "rejected")
ANSWERS = frozenset(SIDES)
COLUMNS: dict[str, frozenset[str]] = {
    "messages": LAYOUTS["messages"] | ANSWERS | {"prompt"},
    "sharegpt": LAYOUTS["sharegpt"] | ANSWERS,
    "alpaca": (LAYOUTS["alpaca"] - {"output"}) | ANSWERS,
    "hh": ANSWERS | BESIDE,
}
ALL = frozenset().union(*COLUMNS.values())


class Preference(NamedTuple):
    """The messages before the answers, those of each answer, and the tools that they may call."""

    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]
    tools: list[dict[str, Any]] | None = None

    @property
    def sides(self) -> tuple[Chat, Chat]:
        """Two complete chats: the prompt with the chosen answer, and with the rejected one."""
        chosen, rejected = self.prompt + self.chosen, self.prompt + self.rejected
        return Chat(chosen, self.tools), Chat(rejected, self.tools)


def to_preference(
    row: int, record: Mapping[str, Any], layout: str, columns: ColumnNames
) -> ParsedDocument | BadRecord:
    """The preference of one record as canonical JSON, or the reason why there is none. Null counts
    as absent, and strings may be JSON, as for chats.

    Args:
        layout: `messages`, `sharegpt`, `alpaca`, `hh`, or `auto`, which chooses by the columns of
            the record.
        columns: standard name -> name in the record.

    Raises:
        WrongInput: `columns` renames a column that the layout does not have.
    """
    check_columns(
        ALL if layout == "auto" else COLUMNS[layout],
        tuple(columns),
        f"layout {layout} of preferences",
    )
    return stored(
        row,
        lambda: {
            **_checked(_preference(record, layout, columns))._asdict(),
            "tools": tools_of(record, columns),
        },
    )


def from_preference(preference: str) -> Preference:
    """Parse what `to_preference` wrote.

    Raises:
        WrongInput: it is no such preference.
    """
    return parse_stored(Preference, preference, "a preference")


def _checked(found: Preference) -> Preference:
    for name, side in zip(SIDES, (found.chosen, found.rejected), strict=True):
        if not side or not any(has_content(message) for message in side):
            raise RecordError(f"empty {name}")
        if side[0]["role"] != "assistant":
            raise RecordError(
                "the sides differ before the answer",
                f"`{name}` goes on with a {side[0]['role']} turn",
            )
        if side[-1]["role"] != "assistant":
            raise RecordError(f"ends with a {side[-1]['role']} turn", f"`{name}`")
        if not has_content(side[-1]):
            raise RecordError(f"empty {name}", "its last message")
        check_learned(side, name)
    if found.chosen == found.rejected:
        raise RecordError("chosen and rejected are equal")
    check_asks(found.prompt)
    return found


def _preference(record: Mapping[str, Any], layout: str, columns: ColumnNames) -> Preference:
    for name in SIDES:
        if column(record, name, columns) is None:
            raise missing_columns(
                record, "preference", f"`{columns.get(name, name)}` is missing or null"
            )
    refuse_unread(record, columns)
    kind = _layout(record, columns) if layout == "auto" else layout
    if kind == "hh":
        found = _parted(
            *(hh_messages(column(record, name, columns), columns.get(name, name)) for name in SIDES)
        )
    else:
        found = _prompted(record, kind, columns, guess=layout == "auto")
    return found._replace(prompt=with_system(found.prompt, record, columns))


def _prompted(
    record: Mapping[str, Any], kind: str, columns: ColumnNames, *, guess: bool
) -> Preference:
    chosen, rejected = (answer_in(record, name, kind, columns, guess=guess) for name in SIDES)
    prompt = prompt_in(record, kind, columns, "preference", guess=guess)
    if prompt is None:
        return _parted(chosen, rejected)
    # Some data sets repeat the prompt, or but a question, in both conversations.
    way_out = f"columns={{{prompt_column(record, kind, columns)}: none}}"
    talks = conversations((chosen, rejected), prompt, way_out)
    return _parted(*talks) if talks else Preference(prompt, chosen, rejected)


def _layout(record: Mapping[str, Any], columns: ColumnNames) -> str:
    """The layout of the column that holds the prompt; if there is none, that of the answers."""
    for name, kind in (
        ("prompt", "messages"),
        ("messages", "messages"),
        ("conversations", "sharegpt"),
        ("instruction", "alpaca"),
    ):
        if column(record, name, columns) is not None:
            return kind
    sides = [column(record, name, columns) for name in SIDES]
    return (
        "hh" if all(isinstance(side, str) and SPEAKER.match(side) for side in sides) else "messages"
    )


def _parted(chosen: Sequence[Message], rejected: Sequence[Message]) -> Preference:
    """Split two whole conversations where they first differ. If that is behind an answer of both,
    as where a tool gives each another result, this answer begins what is compared.
    """
    if chosen == rejected:
        raise RecordError("chosen and rejected are equal")
    pairs = list(zip(chosen, rejected, strict=False))
    same = next((place for place, (one, two) in enumerate(pairs) if one != two), len(pairs))
    answers = [
        place
        for place, turns in enumerate(pairs[: same + 1])
        if place and all(turn["role"] == "assistant" for turn in turns)
    ]
    begin = max(answers, default=same)
    return Preference(list(chosen[:begin]), list(chosen[begin:]), list(rejected[begin:]))
