"""Converts messages of the usual chat layouts to one form: `{"role": ..., "content": ...}` and any
other keys that they have.

Roles become `system`, `user`, `assistant`, `tool`; contents become text.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from ingot.base.errors import WrongInput
from ingot.base.exact_json import compact_json, parse_json
from ingot.data.documents.records import BadRecord, ParsedDocument, checked
from ingot.tokenizers.chats.chat import MARKS, THOUGHTS, is_trained

Message = dict[str, Any]
AnyDocument = TypeVar("AnyDocument")
ColumnNames = Mapping[str, str]
"""Standard name of a column -> its name in the record."""

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
    "ipython": "tool",
}
TAGS = {"messages": ("role", "content"), "sharegpt": ("from", "value")}
_MEDIA = "texts are trained on alone"
UNREAD = {
    "chat_template_kwargs": "set tokenizer.template_kwargs, which are those of all chats",
    **dict.fromkeys(("images", "image", "videos", "video", "audios", "audio"), _MEDIA),
}
"""Columns without which a chat is another one, and what is to be done about them."""
BESIDE = frozenset({"system", "tools", "functions", *UNREAD})
"""Columns beside the messages of any layout."""
LAYOUTS: dict[str, frozenset[str]] = {
    "messages": BESIDE | {"messages", "role", "content", "prompt", "completion"},
    "sharegpt": BESIDE | {"conversations", "from", "value"},
    "alpaca": BESIDE | {"instruction", "input", "output", "history"},
    "hh": BESIDE | {"text"},
}
"""The standard columns of each chat layout, including the keys of its messages."""
SPEAKER = re.compile(r"\n\n(Human|Assistant):")


class RecordError(Exception):
    """A record that cannot be converted: a short reason, which is counted, and details; and what
    else a `BadRecord` has.
    """

    def __init__(
        self, reason: str, detail: str = "", keys: tuple[str, ...] = (), *, stops: bool = False
    ) -> None:
        super().__init__(reason)
        self.reason, self.detail, self.keys, self.stops = reason, detail, keys, stops


def stored(row: int, make: Callable[[], Mapping[str, Any]]) -> ParsedDocument | BadRecord:
    """The value of `make` without nulls as compact JSON, in which all kinds but plain text are
    stored; a bad record if it raises.
    """
    try:
        made = {name: value for name, value in make().items() if value is not None}
        return checked(row, compact_json(made))
    except RecordError as fault:
        return BadRecord(row, fault.reason, fault.detail, fault.keys, stops=fault.stops)
    except (TypeError, ValueError, RecursionError) as error:
        return BadRecord(row, "not JSON", str(error)[:80])


def parse_stored(kind: Callable[..., AnyDocument], text: str, what: str) -> AnyDocument:
    """The document of which `stored` wrote `text`.

    Raises:
        WrongInput: it is no such document.
    """
    try:
        return kind(**parse_json(text))
    except (ValueError, TypeError):
        raise WrongInput(
            f"{text[:60]!r} is not {what} as `ingot ingest` stores it; run `ingot ingest --again`"
        ) from None


@functools.lru_cache(maxsize=64)
def check_columns(known: frozenset[str], renamed: tuple[str, ...], where: str) -> None:
    """Raises WrongInput if `columns` of a source renames a column that `where` does not have."""
    if unknown := sorted(set(renamed) - known):
        raise WrongInput(
            f"`columns` of a source renames {', '.join(unknown)}, which {where} does not have;"
            f" write USUAL: YOURS, where USUAL is one of {', '.join(sorted(known))}"
        )


def missing_columns(record: Mapping[str, Any], what: str, why: str) -> RecordError:
    """The error for a record without the columns of `what`."""
    keys = tuple(str(key) for key in record)
    return RecordError(f"no {what} columns", f"{why}; keys: {', '.join(keys)[:200]}", keys)


def column(record: Mapping[str, Any], usual: str, columns: ColumnNames) -> Any:
    """The value of a column by its standard name; None if the column is missing."""
    return record.get(columns.get(usual, usual))


def turns_of(value: Any) -> list[Mapping[str, Any]]:
    """A list of messages, which may also be JSON in a string, as in CSV."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise RecordError("not a list of messages", f"{value[:40]!r} is no JSON") from None
    if not isinstance(value, list | tuple):
        raise RecordError("not a list of messages", f"it is {type(value).__name__}")
    for number, turn in enumerate(value):
        if not isinstance(turn, Mapping):
            raise RecordError(
                "not a list of messages", f"message {number} is {type(turn).__name__}"
            )
    return list(value)


def messages_of(value: Any, kind: str, columns: ColumnNames, *, guess: bool) -> list[Message]:
    """Convert a list of messages from a layout. `guess`: choose the layout by the keys present,
    since some data sets store one layout under the other one's column.
    """
    turns = turns_of(value)
    tags = _tags(turns, kind, columns, guess=guess)
    return [message_of(turn, *tags) for turn in turns]


def _tags(
    turns: list[Mapping[str, Any]], kind: str, columns: ColumnNames, *, guess: bool
) -> tuple[str, str]:
    """The keys of role and content."""
    role, content = (columns.get(tag, tag) for tag in TAGS[kind])
    if guess and turns and role not in turns[0]:
        for other in TAGS.values():
            if other[0] in turns[0]:
                return other
    return role, content


def message_of(turn: Mapping[str, Any], role_tag: str, content_tag: str) -> Message:
    """Convert one message; other keys than role and content are kept if they are not null. Calls of
    older layouts, a turn of ShareGPT's or `function_call` of OpenAI's, become `tool_calls`.
    """
    role, content = turn.get(role_tag), turn.get(content_tag)
    if (
        type(role) is type(content) is str
        and role in ROLES
        and role != "function_call"
        and len(turn) == 2
    ):
        return {"role": ROLES[role], "content": content}  # as nearly all messages
    if role is None:
        raise RecordError("unknown role", f"a message has no `{role_tag}`")
    if not isinstance(role, str) or role.lower() not in ROLES:
        raise RecordError("unknown role", f"`{role_tag}` is {str(role)[:40]!r}")
    others = {
        key: value
        for key, value in turn.items()
        if key not in (role_tag, content_tag, "role", "content") and value is not None
    }
    if ROLES[role.lower()] == "assistant":
        _check_marks(others)
    called = content if role.lower() == "function_call" else others.get("function_call")
    if "tool_calls" not in others and (calls := _calls_of(called)):
        others.pop("function_call", None)
        others["tool_calls"] = calls
        content = "" if content is called else content
    if content is None and others.get("tool_calls"):
        content = ""
    return {"role": ROLES[role.lower()], "content": text_of(content, content_tag), **others}


def _check_marks(message: Mapping[str, Any]) -> None:
    """Refuse what says that an answer is trained otherwise than with all its weight, or not."""
    for mark in MARKS:
        if (value := message.get(mark, 1)) not in (0, 1):
            raise RecordError(
                "weight of an answer is not 0 or 1",
                f"`{mark}` is {str(value)[:40]!r}; an answer is trained or it is not",
            )


def _calls_of(value: Any) -> list[dict[str, Any]] | None:
    """One call or several, `{"name": ..., "arguments": ...}`, which may be JSON in a string, in the
    format of `tool_calls`; None if it is anything else.
    """
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except (ValueError, RecursionError):
            return None
    calls = value if isinstance(value, list | tuple) else [value]
    if not all(isinstance(call, Mapping) and isinstance(call.get("name"), str) for call in calls):
        return None
    return [
        {
            "type": "function",
            "function": {"name": call["name"], "arguments": call.get("arguments", {})},
        }
        for call in calls
    ]


def text_of(value: Any, name: str) -> str:
    """A content that is a string, or a list of text parts."""
    if isinstance(value, list | tuple):
        return "".join(_part(part, name) for part in value)
    if not isinstance(value, str):
        raise RecordError(
            "content is not text",
            f"`{name}` is {'null' if value is None else type(value).__name__}",
        )
    return value


def _part(part: Any, name: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type", "text") == "text":
        for key in ("text", "value"):
            if isinstance(part.get(key), str):
                return str(part[key])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise RecordError("content is not text", f"`{name}` has a part of type {str(kind)[:40]}")


def system_of(record: Mapping[str, Any], columns: ColumnNames) -> list[Message]:
    """A system prompt in a column of its own."""
    value = column(record, "system", columns)
    return (
        [{"role": "system", "content": text_of(value, columns.get("system", "system"))}]
        if value not in (None, "")
        else []
    )


def with_system(
    messages: list[Message], record: Mapping[str, Any], columns: ColumnNames
) -> list[Message]:
    """The messages behind the system prompt of a column of its own, unless they have one
    themselves, which counts more, as in other trainers.
    """
    if messages and messages[0]["role"] == "system":
        return messages
    return [*system_of(record, columns), *messages]


def alpaca_prompt(record: Mapping[str, Any], columns: ColumnNames, what: str) -> list[Message]:
    """The messages before the answer in Alpaca's columns: system prompt, earlier exchanges,
    instruction and input.
    """

    def field(usual: str) -> str:
        value = column(record, usual, columns)
        return text_of("" if value is None else value, columns.get(usual, usual))

    if column(record, "instruction", columns) is None:
        raise missing_columns(
            record, what, f"`{columns.get('instruction', 'instruction')}` is missing or null"
        )
    question = "\n".join(text for text in (field("instruction"), field("input")) if text)
    history = column(record, "history", columns)
    return [
        *system_of(record, columns),
        *_exchanges([] if history in (None, "") else history),
        user(question),
    ]


def _exchanges(history: Any) -> Iterable[Message]:
    if isinstance(history, str):
        try:
            history = json.loads(history)
        except (ValueError, RecursionError):
            raise RecordError(
                "history is not a list of pairs", f"{history[:40]!r} is no JSON"
            ) from None
    if not isinstance(history, list | tuple):
        raise RecordError("history is not a list of pairs", f"it is {type(history).__name__}")
    for pair in history:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise RecordError("history is not a list of pairs")
        yield from (user(text_of(pair[0], "history")), assistant(text_of(pair[1], "history")))


def hh_messages(value: Any, name: str) -> list[Message]:
    """Split a text in which every turn begins with an empty line and `Human:` or `Assistant:` (Bai
    et al. 2022).
    """
    head, *turns = SPEAKER.split(text_of(value, name))
    if head.strip() or not turns:
        raise RecordError(
            "no turns in the text", f"`{name}` does not begin with an empty line and `Human:`"
        )
    return [
        user(said.strip()) if who == "Human" else assistant(said.strip())
        for who, said in zip(turns[::2], turns[1::2], strict=True)
    ]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def written(message: Mapping[str, Any]) -> list[str]:
    """What whoever speaks writes in a message: its content, its thoughts, and each call as compact
    JSON.
    """
    if len(message) == 2:
        return [message["content"]]
    thoughts = (message.get(name) for name in THOUGHTS)
    given = message.get("tool_calls")
    calls = [
        compact_json(call["function"])
        for call in (given if isinstance(given, list) else ())
        if isinstance(call, Mapping) and "function" in call
    ]
    return [message["content"], *(text for text in thoughts if isinstance(text, str)), *calls]


def check_learned(answer: Iterable[Message], name: str) -> None:
    """Refuse an answer to be compared or rated that says that nothing is learned from it."""
    if not all(is_trained(message) for message in answer if message["role"] == "assistant"):
        raise RecordError(
            "an answer that is judged is marked as not trained",
            f"`{name}` has weight 0; leave the mark out, or the record",
        )


def check_asks(prompt: Iterable[Message]) -> None:
    """Refuse a prompt in which nothing is asked and no tool answers."""
    if not any(message["role"] in ("user", "tool") and has_content(message) for message in prompt):
        raise RecordError("no prompt")


def has_content(message: Message) -> bool:
    """Whether a message has text or tool calls."""
    return bool(message["content"].strip() or message.get("tool_calls"))
