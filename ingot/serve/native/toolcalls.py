"""Tool calls in the text of an answer: the formats of the model families, found while the text
arrives, and as grammars that hold an answer to them. Names and formats are those of vLLM's parsers.

Knows no HTTP; which format a model writes is told by its chat template.
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Mapping
from dataclasses import dataclass

from ingot.base.errors import WrongInput
from ingot.models.generation.request import CompletionChunk, overlap

ARGUMENTS = ("arguments", "parameters")
FOREIGN = ("<function=", "<arg_key>", "<|tool_call>", "<｜tool")
"""What templates of families write whose format is not among these."""


@dataclass(frozen=True)
class ToolFormat:
    """How a family writes calls.

    `opens` begins calls, `closes` stands behind one and is no text either. `joins` is between calls
    behind one `opens`, `last` after all of them. `key` is that of the arguments. `bare`: an answer
    that begins with a brace is a call without `opens`. `named`: the function's name may stand
    before the object of its arguments.
    """

    name: str
    opens: str
    closes: str = ""
    joins: str = ""
    last: str = ""
    key: str = "arguments"
    bare: bool = False
    named: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that are single tokens, if the tokenizer has them, and not shown as text."""
        return (self.opens, *([self.closes] if self.closes else ()), *(["[ARGS]"] * self.named))

    def call_id(self) -> str:
        """A new id of a call; Mistral's templates refuse others than nine letters and digits."""
        if self.named:
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


FORMATS = {
    "hermes": ToolFormat("hermes", "<tool_call>", "</tool_call>"),
    "llama3_json": ToolFormat(
        "llama3_json", "<|python_tag|>", joins=";", key="parameters", bare=True
    ),
    "mistral": ToolFormat("mistral", "[TOOL_CALLS]", joins=",", last="]", named=True),
}


def tool_format(template: str, asked: str | None) -> ToolFormat:
    """The format that `asked` names, else the one that the chat template writes.

    Raises:
        WrongInput: the template writes none of them.
    """
    if asked is not None:
        return FORMATS[asked]
    if not any(text in template for text in FOREIGN):
        for name, sign in (
            ("mistral", "[TOOL_CALLS]"),
            ("hermes", "<tool_call>"),
            ("llama3_json", '"parameters": '),
        ):
            if sign in template:
                return FORMATS[name]
    raise WrongInput(
        "the chat template writes tool calls in a format that is not known here; set"
        f" serve.tool_call_parser to one of {', '.join(FORMATS)}, or leave `tools` out"
    )


@dataclass
class ToolCallDelta:
    """What one piece of text adds to a call. `id` and `name` come once, with its beginning."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class _CallObject:
    """The JSON object of one call, read character by character, since its arguments are given out
    while they arrive.

    Args:
        name: of the function whose arguments the whole object is; None where it has fields.
    """

    def __init__(self, name: str | None = None) -> None:
        self.name, self.has_arguments = name, name is not None
        self.done = self.broken = False
        self._whole = name is not None
        self._depth, self._quoted, self._escaped = 0, False, False
        self._key: str | None = None
        self._part: list[str] = []  # of the key or the value that is being read
        self._fresh: list[str] = []

    def push(self, text: str) -> int:
        """Read text up to the end of the object; returns how many characters that were."""
        for place, character in enumerate(text):
            self._take(character)
            if self.done or self.broken:
                return place + 1
        return len(text)

    def fresh(self) -> str:
        """The text of the arguments since the last call of this."""
        text = "".join(self._fresh)
        self._fresh.clear()
        return text

    def _take(self, character: str) -> None:
        if self._quoted:
            self._quoted = self._escaped or character != '"'
            self._escaped = character == "\\" and not self._escaped
            self._keep(character)
            return
        inside = self._depth > 1 or self._whole
        self._quoted = character == '"'
        self._depth += (character in "{[") - (character in "}]")
        if self._whole:
            self._keep(character)
            self.done = self._depth == 0
        elif self._depth == 0:
            self._end_field()
            self.done = True
        elif inside or self._quoted or self._depth > 1:
            self._keep(character)
        elif character == ":":
            self._key = self._string("".join(self._part))
            self._part.clear()
        elif character == ",":
            self._end_field()
        elif not character.isspace() and character != "{":
            self._keep(character)

    def _keep(self, character: str) -> None:
        self._part.append(character)
        if self._whole or (self._key in ARGUMENTS and self._part[0] == "{"):
            self.has_arguments = True
            self._fresh.append(character)

    def _end_field(self) -> None:
        key, value = self._key, "".join(self._part)
        self._key = None
        self._part.clear()
        if key == "name":
            self.name = self._string(value)
        elif key in ARGUMENTS and not value.startswith("{"):
            self.has_arguments = True
            text = "{}" if value == "null" else value
            self._fresh.append((self._string(text) or "") if text.startswith('"') else text)

    def _string(self, text: str) -> str | None:
        try:
            value = json.loads(text)
        except ValueError:
            value = None
        self.broken = self.broken or not isinstance(value, str)
        return value if isinstance(value, str) else None


class ToolCallParser:
    """Separates the calls of one answer from its text, while it arrives in pieces of any size.
    What looks like a call and is none is text.

    Args:
        most: calls that are given out; further ones are dropped.
        forced: the answer is held to calls alone, so that no part of it is text: neither what a
            limit leaves of a call, nor what stands between two.
    """

    def __init__(self, form: ToolFormat, *, most: int | None = None, forced: bool = False) -> None:
        self._form, self._most, self._forced = form, most, forced
        self._state = self._in_text
        self._buffer = self._spaces = ""
        self._raw = ""  # since a call began: its text, should it be none
        self._said = False
        self._object = _CallObject()
        self._begun: int | None = None  # the number of the present call, once it is given out
        self._closing = False  # whether the marker behind a call is still to come
        self._content: list[str] = []
        self._deltas: dict[int, ToolCallDelta] = {}
        self.calls = 0

    def push(self, text: str) -> tuple[str, list[ToolCallDelta]]:
        """Read a piece; returns text and calls that are now certain."""
        self._buffer += text
        while self._buffer and self._state():
            pass
        return self._given()

    def finish(self) -> tuple[str, list[ToolCallDelta]]:
        """What was held back, once no more text follows."""
        if self._state in (self._in_head, self._in_name, self._in_object):
            self._give_back()
        self._say(self._buffer)
        self._buffer = ""
        if not self.calls:
            self._content.append(self._spaces)
        return self._given()

    def _given(self) -> tuple[str, list[ToolCallDelta]]:
        content, deltas = "".join(self._content), list(self._deltas.values())
        content = "" if self._forced else content
        self._content, self._deltas = [], {}
        return content, deltas

    def _say(self, text: str) -> None:
        """Text of the answer; spaces before a call are none."""
        whole = self._spaces + text
        body = whole.rstrip()
        self._spaces = whole[len(body) :]
        if body:
            self._said = True
            self._content.append(body)

    def _in_text(self) -> bool:
        form, buffer = self._form, self._buffer
        if form.bare and not self._said and buffer.lstrip()[:1] == "{":
            self._spaces += buffer[: len(buffer) - len(buffer.lstrip())]
            self._begin("", buffer.lstrip())
            return True
        markers = [marker for marker in (form.opens, form.closes) if marker and marker in buffer]
        if not markers:
            held = max(overlap(buffer, marker) for marker in (form.opens, form.closes))
            self._say(buffer[: len(buffer) - held])
            self._buffer = buffer[len(buffer) - held :]
            return False
        first = min(markers, key=buffer.index)
        before, _, after = buffer.partition(first)
        self._say(before)
        if first == form.opens:
            self._begin(first, after)
            return True
        if not self._closing:
            self._say(first)
        self._buffer, self._closing = after, False
        return True

    def _begin(self, marker: str, rest: str) -> None:
        self._raw, self._buffer, self._state = marker, rest, self._in_head
        self._begun, self._closing = None, False

    def _in_head(self) -> bool:
        """Before the object: spaces, a bracket, a name."""
        first = self._buffer[0]
        if first == "{":
            self._object, self._state = _CallObject(), self._in_object
        elif first.isspace() or (first == "[" and self._form.last == "]"):
            self._raw, self._buffer = self._raw + first, self._buffer[1:]
        elif self._form.named and (first.isalnum() or first == "_"):
            self._state = self._in_name
        else:
            self._give_back()
        return True

    def _in_name(self) -> bool:
        name, brace, _ = self._buffer.partition("{")
        if brace:
            self._object = _CallObject(name.removesuffix("[ARGS]").strip())
            self._raw, self._buffer = self._raw + name, self._buffer[len(name) :]
            self._state = self._in_object
        return bool(brace)

    def _in_object(self) -> bool:
        count = self._object.push(self._buffer)
        self._raw, self._buffer = self._raw + self._buffer[:count], self._buffer[count:]
        made = self._object
        complete = made.name is not None and (
            made.has_arguments or (made.done and not self._form.bare)
        )
        if complete and not made.broken:
            self._give_call(made)
        elif made.done or made.broken:
            self._give_back()
            return True
        if made.done:
            self._state, self._spaces = self._after_call, ""
        return True

    def _give_call(self, made: _CallObject) -> None:
        first, self._closing = self._begun is None, True
        if first and self._most is not None and self.calls >= self._most:
            return
        if self._begun is None:
            self._begun, self.calls, self._spaces = self.calls, self.calls + 1, ""
        delta = self._deltas.setdefault(self._begun, ToolCallDelta(self._begun))
        if first:
            delta.id, delta.name = self._form.call_id(), made.name
        delta.arguments += made.fresh()
        if made.done and not made.has_arguments:
            delta.arguments = "{}"

    def _after_call(self) -> bool:
        rest = self._buffer.lstrip()
        if rest and rest[0] in self._form.joins:
            self._begin(rest[0], rest[1:])
        elif rest and rest[0] in self._form.last:
            self._buffer = rest[1:]
        else:
            self._buffer = rest
            if rest:
                self._state = self._in_text
        return bool(rest)

    def _give_back(self) -> None:
        """The present call is none, unless it was given out: then only its end is missing."""
        self._state = self._in_text
        if self._begun is None:
            self._said = True
            self._say(self._raw)
        self._raw = ""


class InsideCalls:
    """Tells of an answer, while it is written, whether its text stands in a call.

    Args:
        markers: the text of each marker that is a special token, by its id.
    """

    def __init__(self, form: ToolFormat, markers: Mapping[int, str]) -> None:
        self._form, self._markers = form, markers
        self._inside, self._begun = False, False
        self._end = ""  # of the text so far: what a marker may begin in

    def __call__(self, token: int, text: str) -> bool:
        """Whether a call is open behind a token and the `text` that it made final, or was before
        them.
        """
        form, before = self._form, self._inside
        self._end += self._markers.get(token, "") + text
        if form.bare and not self._begun and (said := self._end.lstrip()):
            self._begun, self._inside = True, said[0] == "{"
        places = {True: self._end.rfind(form.opens)}
        places[False] = self._end.rfind(form.closes) if form.closes else -1
        if max(places.values()) >= 0:
            self._inside = places[True] > places[False]
        self._end = self._end[-max(len(form.opens), len(form.closes)) :]
        return before or self._inside


class MarkedText:
    """The text of one answer with the markers that decoding leaves out as special tokens.

    Args:
        markers: the text of each by its id.
    """

    def __init__(self, markers: Mapping[int, str]) -> None:
        self._markers, self._start = markers, 0

    def push(self, part: CompletionChunk) -> str:
        """The text of the next part."""
        pieces, place = [], 0
        for token in part.tokens:
            if (marker := self._markers.get(token.id)) is not None:
                at = min(max(token.offset - self._start, place), len(part.text))
                pieces += [part.text[place:at], marker]
                place = at
        self._start += len(part.text)
        return "".join([*pieces, part.text[place:]])
