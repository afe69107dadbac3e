"""What a template writes around the contents of a chat, found once for all chats of one shape: the
same roles in the same order.

This is proved: the template runs on contents that report whatever looks into them. Where it
joins, trims and prints them only, its text is the same for any others. All other templates and
shapes are left to `chat_spans`, message by message. Encodes nothing.
"""

from __future__ import annotations

import bisect
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ingot.base.errors import WrongInput
from ingot.tokenizers.chat_render import (
    BEGIN,
    END,
    FIRST_MARK,
    MARKS,
    ChatFormat,
    any_of_pattern,
    environment_of,
    rendered,
)
from ingot.tokenizers.chat_spans import RenderedChat, render_with_spans, turn_format

MOST_MESSAGES = 1000
SLOT = re.compile("([\U00100010-\U0010ffef])")
Shape = tuple[tuple[str, bool], ...]
"""For each message its role and whether it has a content."""
Part = str | int
"""Text of the template, or the number of a content: 2i as it is, 2i + 1 without outer whitespace,
where i is the number of the message.
"""


@dataclass(frozen=True)
class LayoutPiece:
    """A special token, or the parts of a text; `trained`: whether its first character is; for each
    place where that changes the parts before it.
    """

    token: int | None
    parts: tuple[Part, ...]
    trained: bool
    switches: tuple[tuple[Part, ...], ...]


@dataclass(frozen=True)
class ChatLayout:
    """The pieces of every chat of one shape. `unindented`: contents that must not begin with
    whitespace, or the place of the turn is found in another way.
    """

    pieces: tuple[LayoutPiece, ...]
    unindented: tuple[int, ...]


def shape_of(messages: Sequence[Mapping[str, Any]]) -> Shape | None:
    """The shape of a chat; None if one has more than role and content, or if white space alone is
    said, or if the assistant says nothing.
    """
    shape = []
    for message in messages:
        content, role = message.get("content"), message["role"]
        if len(message) != 2 or type(content) is not str or type(role) is not str:
            return None
        if (not content or content.isspace()) and (content or role == "assistant"):
            return None
        shape.append((role, bool(content)))
    return tuple(shape) if len(shape) <= MOST_MESSAGES else None


def layout_of(form: ChatFormat, shape: Shape, first: int) -> ChatLayout | None:
    """The layout of chats of this shape, trained from message `first` on; None if nothing proves
    that there is one.
    """
    named = tuple(sorted(form.named.items()))
    if not _joins_only(form.template) or any(
        MARKS.search(role) or (form.special and any_of_pattern(tuple(form.special)).search(role))
        for role, _ in shape
    ):
        return None
    probe = [
        {"role": role, "content": f"probe{number}" if said else ""}
        for number, (role, said) in enumerate(shape)
    ]
    try:
        skeleton = _skeleton(form.template, dict(named), shape)
        if skeleton is None:
            return None
        found = render_with_spans(form, probe, first)
    except WrongInput:
        return None
    return _Outline(form, skeleton, probe, found, first).layout()


def _watched(name: str) -> Callable[..., Any]:
    def look(self: _Unseen, *_: Any, **__: Any) -> Any:
        self._seen.append(name)
        raise TypeError(f"{name} looks into a content")

    return look


UNWATCHED = {
    *dir(object),
    "__getnewargs__",
} - {
    "__eq__",
    "__ne__",
    "__lt__",
    "__le__",
    "__gt__",
    "__ge__",
    "__hash__",
    "__format__",
    "__repr__",
}
_Watched: Any = type(
    "_Watched", (str,), {name: _watched(name) for name in dir(str) if name not in UNWATCHED}
)


class _Unseen(_Watched):  # type: ignore[misc]
    """A content that can be joined with text, trimmed, printed, and is not empty. Whatever else is
    asked of it is noted in `_seen` and fails, as a sandbox may swallow the failure.
    """

    _seen: list[str]

    @classmethod
    def of(cls, text: str, seen: list[str]) -> _Unseen:
        made = cls(text)
        made._seen = seen
        return made

    def __add__(self, other: str) -> _Unseen:
        return _Unseen.of(_plain(self) + _plain(other), self._seen)

    def __radd__(self, other: str) -> _Unseen:
        return _Unseen.of(_plain(other) + _plain(self), self._seen)

    def __str__(self) -> str:
        return self

    def __bool__(self) -> bool:
        return True

    def strip(self, chars: str | None = None) -> _Unseen:
        text = _plain(self)
        if chars is not None or len(text) != 1:
            self._seen.append("strip")
            raise TypeError("a joined content cannot be trimmed unseen")
        return _Unseen.of(chr(ord(text) | 1), self._seen)


def _plain(text: str) -> str:
    """The characters, as a str and nothing more."""
    return str.__str__(text)


class _WatchedEnvironment(ImmutableSandboxedEnvironment):
    """Notes in `seen` each function that a template calls and that might look into a content
    without asking it.
    """

    seen: list[str]

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        if getattr(function, "__self__", None).__class__ is not _Unseen and function not in (
            self.globals["namespace"],
            self.globals["strftime_now"],
            self.globals["range"],
        ):
            self.seen.append(str(function))
        return super().call(context, function, *args, **kwargs)


def _skeleton(template: str, named: Mapping[str, str], shape: Shape) -> str | None:
    """The text of a chat with a mark in place of each content; None if the template looks into
    one.
    """
    compiled, seen = _watched_template(template)
    seen.clear()
    chat = [
        {"role": role, "content": _Unseen.of(chr(FIRST_MARK + 2 * number), seen) if said else ""}
        for number, (role, said) in enumerate(shape)
    ]
    text = rendered(lambda: compiled, chat, named)
    return None if seen else text


@functools.lru_cache(maxsize=16)
def _watched_template(template: str) -> tuple[jinja2.Template, list[str]]:
    """The template, and the list in which it notes how it has looked into contents."""
    seen: list[str] = []
    environment: Any = environment_of(_WatchedEnvironment)
    environment.seen = seen
    tables: tuple[tuple[dict[str, Any], set[str]], ...] = (
        (environment.filters, {"trim", "length", "first", "last"}),
        (environment.tests, {"defined", "undefined", "none", "string", "mapping"}),
    )
    for table, kept in tables:
        for name in set(table) - kept:
            table[name] = functools.partial(_noted, seen, name)
    return environment.from_string(template), seen


def _noted(seen: list[str], name: str, *_: Any, **__: Any) -> None:
    seen.append(name)
    raise TypeError(f"{name} may look into a content")


@functools.lru_cache(maxsize=16)
def _joins_only(template: str) -> bool:
    """Whether no construct of a template makes a plain text of a content and lets it look into that
    later: what a macro or a block returns, `~`, `%`, and the search for one text in another.
    """
    tree = environment_of().parse(template)
    hidden = (nodes.Concat, nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.AssignBlock)
    known = (nodes.Const, nodes.List, nodes.Tuple)
    return (
        next(tree.find_all(hidden), None) is None
        and all(isinstance(node.right, nodes.Const) for node in tree.find_all(nodes.Mod))
        and all(
            isinstance(node.expr, nodes.Const)
            or all(
                operand.op not in ("in", "notin") or isinstance(operand.expr, known[1:])
                for operand in node.ops
            )
            for node in tree.find_all(nodes.Compare)
        )
    )


class _Outline:
    """Cuts the text around contents into pieces, with the turns found on a probe of the same
    shape.
    """

    def __init__(
        self,
        form: ChatFormat,
        skeleton: str,
        probe: list[dict[str, str]],
        found: RenderedChat,
        first: int,
    ) -> None:
        self._form, self._probe, self._found, self._first = form, probe, found, first
        self._blocks = skeleton.count(BEGIN)
        plain = skeleton.replace(BEGIN, "").replace(END, "")
        self._parts: list[Part] = [
            ord(text) - FIRST_MARK if number % 2 else text
            for number, text in enumerate(SLOT.split(plain))
        ]
        self._edges = [edge for span in found.spans for edge in span]

    def layout(self) -> ChatLayout | None:
        said = [self._said(part) for part in self._parts]
        if "".join(said) != self._found.text or not self._is_cut_alike():
            return None
        unindented = self._places_of_turns()
        if unindented is None:
            return None
        pieces = self._pieces()
        return None if pieces is None else ChatLayout(tuple(pieces), unindented)

    def _said(self, part: Part) -> str:
        return part if isinstance(part, str) else self._probe[part // 2]["content"]

    def _is_cut_alike(self) -> bool:
        """Whether no content can make a special token together with the text beside it."""
        special = self._form.special
        for number, part in enumerate(self._parts):
            if not isinstance(part, str) or not special:
                continue
            texts = any_of_pattern(tuple(special)).split(part)[::2]
            between = len(texts) == 1 and 0 < number < len(self._parts) - 1
            for token in special:
                cuts = range(1, len(token))
                if (
                    (between and part in token)
                    or any(part.endswith(token[:cut]) for cut in cuts)
                    or any(part.startswith(token[cut:]) for cut in cuts)
                ):
                    return False
        return True

    def _places_of_turns(self) -> tuple[int, ...] | None:
        """The assistant's contents that must not begin with whitespace; None unless each turn is
        found by the template's text right beside its content, whatever is said.
        """
        turns = [
            number for number, message in enumerate(self._probe) if message["role"] == "assistant"
        ]
        if self._blocks:
            return () if self._blocks == len(turns) or not self._first else None
        how, unindented, last = turn_format(self._form), [], 0
        if not how.prompt or how.end is None:
            return None
        ended = re.compile(rf"\s*{re.escape(how.end)}")
        for turn in turns:
            places = [
                at
                for at, part in enumerate(self._parts)
                if not isinstance(part, str) and part // 2 == turn
            ]
            if len(places) != 1:
                return None
            before, after = str(self._parts[places[0] - 1]), str(self._parts[places[0] + 1])
            begin = sum(len(self._said(part)) for part in self._parts[: places[0]])
            end = begin + len(self._probe[turn]["content"])
            closing = ended.match(after)
            if closing is None or not before.endswith(how.prompt) or begin - len(how.prompt) < last:
                return None
            last = end + closing.end()
            if turn >= self._first and (begin, last) not in self._found.spans:
                return None
            if int(self._parts[places[0]]) % 2:
                unindented.append(turn)
        return tuple(unindented)

    def _pieces(self) -> list[LayoutPiece] | None:
        pieces, place, parts, begin = list[LayoutPiece](), 0, list[Part](), 0
        pattern = any_of_pattern(tuple(self._form.special)) if self._form.special else None
        for part in [*self._parts, None]:
            cut = pattern.split(part) if pattern and isinstance(part, str) else [part]
            for number, text in enumerate(cut):
                if (number % 2 or text is None) and parts:
                    piece = self._text(parts, begin, place)
                    if piece is None:
                        return None
                    pieces.append(piece)
                    parts = []
                if text is None or text == "":
                    continue
                if number % 2:
                    token = self._form.special[str(text)]
                    pieces.append(LayoutPiece(token, (), self._is_trained(place), ()))
                else:
                    begin = begin if parts else place
                    parts.append(text)
                place += len(self._said(text))
        return pieces

    def _text(self, parts: Sequence[Part], begin: int, end: int) -> LayoutPiece | None:
        switches = []
        for edge in self._edges:
            if begin < edge < end:
                prefix, left = list[Part](), edge - begin
                for part in parts:
                    length = len(self._said(part))
                    if left < length and not isinstance(part, str):
                        if left:
                            return None
                        break
                    prefix.append(part[:left] if isinstance(part, str) else part)
                    left -= min(left, length)
                    if not left:
                        break
                switches.append(tuple(prefix))
        return LayoutPiece(None, tuple(parts), self._is_trained(begin), tuple(switches))

    def _is_trained(self, place: int) -> bool:
        return bisect.bisect_right(self._edges, place) % 2 == 1
