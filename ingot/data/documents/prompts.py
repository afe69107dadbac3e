"""A prompt and what answers it, in columns of their own: each is a string or messages, which may be
JSON in a string, as in CSV.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ingot.data.documents.messages import (
    ROLES,
    TAGS,
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
from ingot.tokenizers.chats.chat import MARKS, THOUGHTS

BESIDE_CONTENTS = frozenset(
    {*THOUGHTS, *MARKS, "name", "tool_call_id", "refusal", "annotations", "audio"}
)
"""What messages have beside role and content."""
CALLS = ("tool_calls", "function_call")
"""What they may have in place of a content."""
_OBJECTS = re.compile(r"\s*(\[\s*)?\{")
"""How JSON of one or several messages begins."""
_LIST = re.compile(r"\s*\[\s*\{")
_OPENED = r"\s*[\[(]?\s*(array\()?\s*\[?\s*"
_SHOWN = {":": _OPENED + r"(OrderedDict\()?\{\s*", ",": _OPENED + r"OrderedDict\(\[\(\s*"}
"""How Python and NumPy begin to show them, by the sign between a key and its value."""


def prompt_column(record: Mapping[str, Any], kind: str, columns: ColumnNames) -> str | None:
    """The standard name of the column that has the messages before the answers."""
    names = {"alpaca": ("instruction",), "sharegpt": ("conversations",)}
    return next(
        (
            name
            for name in names.get(kind, ("prompt", "messages"))
            if column(record, name, columns) is not None
        ),
        None,
    )


def prompt_in(
    record: Mapping[str, Any], kind: str, columns: ColumnNames, what: str, *, guess: bool
) -> list[Message] | None:
    """The messages before the answers of a `what`; None if no column has them."""
    if kind == "alpaca":
        return alpaca_prompt(record, columns, what)
    if (name := prompt_column(record, kind, columns)) is None:
        return None
    value = column(record, name, columns)
    own = _in_json(value, columns)
    # A list in a column for messages is one of messages, or wrong.
    if isinstance(own, str) and (name == "prompt" or not _LIST.match(own)):
        return [user(value)]
    return messages_of(own, kind, columns, guess=guess)


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
    if not isinstance(value, str):
        return value
    found = _parsed(value) if _OBJECTS.match(value) else None
    if _are_messages(found, columns):
        return found
    if found is None:
        _refuse_lines(value, columns)
    _refuse_python(value, columns)
    return value


def _parsed(text: str) -> Any:
    """The value of JSON; None where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _refuse_lines(text: str, columns: ColumnNames) -> None:
    """Refuse messages as lines of JSON, or as JSON in a string of JSON, which would be trained on
    as they stand.
    """
    if text.startswith('"'):
        inner, written = _parsed(text), "JSON in a string of JSON"
        are_messages = isinstance(inner, str) and not isinstance(_in_json(inner, columns), str)
    else:
        written = "lines of JSON"
        are_messages = bool(_OBJECTS.match(text)) and _are_messages(_lines(text), columns)
    if are_messages:
        raise RecordError(
            f"messages as {written}", f"{text[:40]!r} is no JSON list; write them as one, once"
        )


def _lines(text: str) -> list[Any] | None:
    """The values of lines of JSON; None where one of them is no JSON."""
    found = list[Any]()
    for line in filter(str.strip, text.split("\n")):
        found.append(_parsed(line))
        if found[-1] is None:
            return None
    return found


def _refuse_python(text: str, columns: ColumnNames) -> None:
    """Refuse messages as Python or NumPy show them, which would be trained on as they stand."""
    shown = text.rstrip(" \t\r\n]),")
    if not shown.endswith(("}", "dtype=object")) and not text.startswith(")])", len(shown)):
        return
    for tags, sign in itertools.product(TAGS.values(), _SHOWN):
        role, content = (columns.get(tag, tag) for tag in tags)
        of_both = {role, content, *CALLS}
        if (
            re.match(_SHOWN[sign] + _any_of(of_both | BESIDE_CONTENTS) + sign, text)
            and re.search(_any_of({role}) + rf"{sign} *'({'|'.join(ROLES)})'", text, re.IGNORECASE)
            and re.search(_any_of(of_both - {role}) + sign, text)
        ):
            raise RecordError(
                "messages as Python shows them",
                f"{text[:40]!r} is no JSON; save the data set as JSON lines or Parquet instead of"
                " CSV",
            )


def _any_of(keys: Iterable[str]) -> str:
    """A pattern of a key as Python shows it."""
    return f"'({'|'.join(map(re.escape, sorted(keys)))})'"


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
        contents = {content, *CALLS}
        if all(role in turn for turn in turns) and any(
            contents & set(turn) and str(turn[role]).lower() in ROLES for turn in turns
        ):
            given = {key for turn in turns for key, field in turn.items() if field is not None}
            return isinstance(found, list) or given <= {role, *contents, *BESIDE_CONTENTS}
    return False


def conversations(
    talks: Sequence[list[Message]], prompt: list[Message], way_out: str
) -> list[list[Message]] | None:
    """Whole conversations in the place of answers, which begin with a question or a system message;
    None if they are answers. Whichever has a system message, the prompt or they, it begins them.

    Raises:
        RecordError: none of them repeats the prompt, or another system message stands there, so
            that one question would come behind another.
    """
    if not all(talk and talk[0]["role"] in ("system", "user") for talk in talks):
        return None
    own, asked = split_system(prompt)
    parts = [split_system(talk) for talk in talks]
    if not any(_repeats(rest, asked) for _, rest in parts) or any(
        own and system and not _alike(own, system) for system, _ in parts
    ):
        raise RecordError(
            "a whole conversation in the place of an answer, to another prompt",
            f"it begins with {talks[0][0]['content'][:40]!r}, the prompt with"
            f" {prompt[0]['content'][:40] if prompt else ''!r}; {way_out} goes by the conversation"
            " alone",
        )
    return [[*(system or own), *rest] for system, rest in parts]


def split_system(messages: list[Message]) -> tuple[list[Message], list[Message]]:
    """The system message at the beginning, if there is one, and all else."""
    count = int(bool(messages) and messages[0]["role"] == "system")
    return messages[:count], messages[count:]


def _repeats(talk: list[Message], asked: list[Message]) -> bool:
    """Whether a conversation begins with what was asked, or has the one question anywhere: some
    data sets repeat the first question beside it, and some the last.
    """
    return _alike(talk[: len(asked)], asked) or (
        len(asked) == 1 and any(_alike([turn], asked) for turn in talk)
    )


def _alike(some: list[Message], others: list[Message]) -> bool:
    """Whether messages say the same, but for white space around it and keys beside it."""
    one, other = (
        [(turn["role"], turn["content"].strip(), turn.get("tool_calls")) for turn in turns]
        for turns in (some, others)
    )
    return one == other
