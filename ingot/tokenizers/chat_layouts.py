"""What a template writes around the contents of a chat, found once for all chats of one shape: the
same roles in the same order.

Only where `chat_watch` proves that the template does not look into contents. All other templates
and shapes are left to `chat_spans`, message by message. Encodes nothing.
"""

from __future__ import annotations

import bisect
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ingot.base.errors import WrongInput
from ingot.tokenizers.chat_render import (
    BEGIN,
    END,
    FIRST_MARK,
    MARKS,
    ChatFormat,
    any_of_pattern,
    time_now,
)
from ingot.tokenizers.chat_spans import RenderedChat, render_with_spans, turn_format
from ingot.tokenizers.chat_watch import Question, Shape, Skeleton, joins_only, skeleton_of

MOST_MESSAGES = 1000
MOST_LAYOUTS = 1000
SLOT = re.compile("([\U00100010-\U0010ffef])")
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
    whitespace, or the place of the turn is found in another way. `times`: what the template was
    told of the time, by pattern. `asked`: questions about contents whose answer must be no.
    """

    pieces: tuple[LayoutPiece, ...]
    unindented: tuple[int, ...]
    times: Mapping[str, str]
    asked: tuple[Question, ...]


class ChatLayouts:
    """The layouts of one chat format, kept from batch to batch."""

    def __init__(self, form: ChatFormat) -> None:
        self._form = form
        self._found: dict[tuple[Shape, int], ChatLayout | None] = {}
        self._met: set[tuple[Shape, int]] = set()

    def find(self, shape: Shape, first: int) -> ChatLayout | None:
        """The layout of chats of this shape, trained from message `first` on. None if there is
        none, or if this is the first such chat: a shape that comes once is not worth a layout.
        """
        key = shape, first
        if key not in self._met:
            if len(self._met) >= MOST_LAYOUTS:
                self._met.clear()
                self._found.clear()
            self._met.add(key)
            return None
        layout = self._found.get(key)
        if key not in self._found or (
            layout and any(time_now(pattern) != told for pattern, told in layout.times.items())
        ):
            layout = self._found[key] = layout_of(self._form, shape, first)
        return layout


def shape_of(messages: Sequence[Mapping[str, Any]]) -> tuple[Shape, list[str]] | None:
    """The shape of a chat and its contents. None if a message has more than role and content, if
    white space alone is said, if the assistant says nothing, or if there is no message.
    """
    if not 0 < len(messages) <= MOST_MESSAGES or set(map(len, messages)) != {2}:
        return None
    try:
        roles = [message["role"] for message in messages]
        contents = [message["content"] for message in messages]
    except KeyError:
        return None
    if set(map(type, roles)) != {str} or set(map(type, contents)) != {str}:
        return None
    if any(map(str.isspace, contents)) or (
        "" in contents and ("assistant", "") in zip(roles, contents, strict=True)
    ):
        return None
    return tuple(zip(roles, map(bool, contents), strict=True)), contents


def layout_of(form: ChatFormat, shape: Shape, first: int) -> ChatLayout | None:
    """The layout of chats of this shape, trained from message `first` on; None if nothing proves
    that there is one.
    """
    if not joins_only(form.template) or any(
        MARKS.search(role) or (form.special and any_of_pattern(tuple(form.special)).search(role))
        for role, _ in shape
    ):
        return None
    probe = [
        {"role": role, "content": f"probe{number}" if said else ""}
        for number, (role, said) in enumerate(shape)
    ]
    try:
        skeleton = skeleton_of(form.template, form.named, shape)
        if skeleton is None:
            return None
        found = render_with_spans(form, probe, first)
    except WrongInput:
        return None
    return _Outline(form, skeleton, probe, found, first).layout()


class _Outline:
    """Cuts the text around contents into pieces, with the turns found on a probe of the same
    shape.
    """

    def __init__(
        self,
        form: ChatFormat,
        skeleton: Skeleton,
        probe: list[dict[str, str]],
        found: RenderedChat,
        first: int,
    ) -> None:
        self._form, self._probe, self._found, self._first = form, probe, found, first
        self._blocks, self._skeleton = skeleton.text.count(BEGIN), skeleton
        plain = skeleton.text.replace(BEGIN, "").replace(END, "")
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
        if pieces is None:
            return None
        return ChatLayout(tuple(pieces), unindented, self._skeleton.times, self._skeleton.asked)

    def _said(self, part: Part) -> str:
        return part if isinstance(part, str) else self._probe[part // 2]["content"]

    def _is_cut_alike(self) -> bool:
        """Whether no content can make a special token together with the text beside it."""
        special = tuple(self._form.special)
        if not special:
            return True
        heads, tails, longest = _halves(special)
        for number, part in enumerate(self._parts):
            if not isinstance(part, str):
                continue
            between = 0 < number < len(self._parts) - 1
            if between and any(part in token and part != token for token in special):
                return False
            for cut in range(1, min(longest, len(part)) + 1):
                if part[-cut:] in heads or part[:cut] in tails:
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
        special = any_of_pattern(tuple(self._form.special))
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
            # Between the prompt and the content the template may write for the assistant.
            _, prompt, own = before.rpartition(how.prompt)
            begin -= len(own)
            if closing is None or not prompt or begin - len(prompt) < last:
                return None
            if own and (special.search(own) or not special.search(prompt)):
                return None
            last = end + closing.end()
            if turn >= self._first and (begin, last) not in self._found.spans:
                return None
            if own or int(self._parts[places[0]]) % 2:
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


@functools.lru_cache(maxsize=16)
def _halves(special: tuple[str, ...]) -> tuple[set[str], set[str], int]:
    """How special tokens begin and how they end, whole tokens left out, and the length of the
    longest such part.
    """
    heads = {token[:cut] for token in special for cut in range(1, len(token))}
    tails = {token[cut:] for token in special for cut in range(1, len(token))}
    return heads, tails, max(map(len, special)) - 1
