"""What a template writes around the contents of a chat, found once for all chats of one shape: the
same roles in the same order.

Only where `watch` proves that the template does not look into contents. All other templates
and shapes are left to `spans`, message by message. Encodes nothing.
"""

from __future__ import annotations

import bisect
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ingot.base.errors import WrongInput
from ingot.base.exact_json import parse_json
from ingot.tokenizers.chats.chat import is_trained
from ingot.tokenizers.chats.render import (
    BEGIN,
    END,
    FIRST_MARK,
    MARKS,
    ChatFormat,
    any_of_pattern,
    strings_in,
    time_now,
)
from ingot.tokenizers.chats.shapes import Shape, probe_of, unseen_chat
from ingot.tokenizers.chats.spans import served_answer, trained_texts, turn_format
from ingot.tokenizers.chats.unseen import Question, Slot, Watch
from ingot.tokenizers.chats.watch import joins_only, skeleton_of

MARK = re.compile("([\U00100010-\U0010ffef])")
MOST_LAYOUTS = 1000
LayoutKey = tuple[Shape, int, str]
"""A shape, the number of the first message that is trained, and the tools as JSON."""
Part = str | int
"""Text of the template, or the number of a slot."""


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
    """The pieces of every chat of one shape, and the slots in them. `times`: what the template was
    told of the time, by pattern. `asked`: questions about contents whose answer must be no.
    """

    pieces: tuple[LayoutPiece, ...]
    slots: tuple[Slot, ...]
    times: Mapping[str, str]
    asked: tuple[Question, ...]


class ChatLayouts:
    """The layouts of one chat format, kept from batch to batch."""

    def __init__(self, form: ChatFormat) -> None:
        self._form = form
        self._found: dict[LayoutKey, ChatLayout | None] = {}
        self._met: set[LayoutKey] = set()

    def find(self, shape: Shape, first: int, tools: str = "") -> ChatLayout | None:
        """The layout of chats of this shape, trained from message `first` on, with these tools as
        JSON. None if there is none, or if this is the first such chat: a shape that comes once is
        not worth a layout.

        Raises:
            WrongInput: the template writes no tools.
        """
        key = shape, first, tools
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
            form = self._form.with_tools(parse_json(tools) if tools else None)
            layout = self._found[key] = layout_of(form, shape, first)
        return layout


def layout_of(form: ChatFormat, shape: Shape, first: int) -> ChatLayout | None:
    """The layout of chats of this shape, trained from message `first` on; None if nothing proves
    that there is one.
    """
    if not joins_only(form.template) or any(
        MARKS.search(text) or (form.special and any_of_pattern(tuple(form.special)).search(text))
        for text in strings_in([shape, form.tools])
    ):
        return None
    try:
        return _Outline(form, shape, first).layout()
    except (WrongInput, LookupError):
        return None


class _Outline:
    """Cuts the text around the values of a chat into pieces, with the turns found on a probe of the
    same shape.

    Raises:
        LookupError: the template looks into a value.
        WrongInput: it refuses chats of this shape.
    """

    def __init__(self, form: ChatFormat, shape: Shape, first: int) -> None:
        self._form, self._shape, self._first = form, shape, first
        self._watch = Watch()
        self._unseen = unseen_chat(shape, self._watch)
        whole = self._skeleton(len(shape), prompt=False)
        self._blocks, self._plain = whole.count(BEGIN), without_blocks(whole)
        self._parts: list[Part] = [
            ord(text) - FIRST_MARK if number % 2 else text
            for number, text in enumerate(MARK.split(self._plain))
        ]
        self._probe, self._values = probe_of(shape)
        texts = trained_texts(form, self._probe, first)
        if len(texts) != 1:
            raise LookupError("not all answers are trained in one text")
        self._found = texts[0]
        self._edges = [edge for span in self._found.spans for edge in span]

    def _skeleton(self, count: int, *, prompt: bool) -> str:
        """The text of the first messages, with marks in place of values."""
        text = skeleton_of(
            self._form.template,
            self._form.named,
            self._unseen[:count],
            self._watch,
            generation_prompt=prompt,
            tools=self._form.tools,
        )
        if text is None:
            raise LookupError(f"the template looks into a content ({self._watch.seen})")
        return text

    def layout(self) -> ChatLayout | None:
        said = "".join(self._said(part) for part in self._parts)
        if said != self._found.text or not self._is_cut_alike() or not self._is_trained_alike():
            return None
        pieces = self._pieces()
        if pieces is None:
            return None
        watch = self._watch
        slots, asked = tuple(watch.slots), tuple(dict.fromkeys(watch.asked))
        return ChatLayout(tuple(pieces), slots, dict(watch.times), asked)

    def _said(self, part: Part) -> str:
        return part if isinstance(part, str) else self._watch.slots[part].text(self._values)

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

    def _is_trained_alike(self) -> bool:
        """Whether the same parts are trained in each chat of the shape: told from what the template
        writes when each answer is asked for, and when it is given.
        """
        answers = {
            index: said or bool(dict(others).get("tool_calls"))
            for index, (role, said, others) in enumerate(self._shape)
            if role == "assistant"
        }
        if self._blocks:
            every = not self._first and all(is_trained(self._probe[index]) for index in answers)
            return self._blocks == len(answers) or every
        how, spans = turn_format(self._form), list[tuple[int, int]]()
        for index, says in answers.items():
            if index < self._first or not is_trained(self._probe[index]):
                continue
            whole = without_blocks(self._skeleton(index + 1, prompt=False))
            asked = self._asked(index)
            found = served_answer(how, whole, asked, is_first=not index, says=says)
            span = found.span_in(self._plain) if found else None
            if span is None:
                return False
            last = self._plain[span[1] - 1]
            if MARK.fullmatch(last) and (how.rest or not self._watch.slot(last).right):
                return False
            spans.append((self._place(span[0]), self._place(span[1])))
        return [(begin, end) for begin, end in spans if begin < end] == self._found.spans

    def _asked(self, count: int) -> str | None:
        try:
            return without_blocks(self._skeleton(count, prompt=True))
        except WrongInput:
            return None

    def _place(self, place: int) -> int:
        """The place in the probe's text of one in the text with marks."""
        return sum(
            len(self._said(ord(text) - FIRST_MARK if MARK.fullmatch(text) else text))
            for text in MARK.split(self._plain[:place])
        )

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


def without_blocks(text: str) -> str:
    """A text without the marks of `{% generation %}` blocks."""
    return text.replace(BEGIN, "").replace(END, "")


@functools.lru_cache(maxsize=16)
def _halves(special: tuple[str, ...]) -> tuple[set[str], set[str], int]:
    """How special tokens begin and how they end, whole tokens left out, and the length of the
    longest such part.
    """
    heads = {token[:cut] for token in special for cut in range(1, len(token))}
    tails = {token[cut:] for token in special for cut in range(1, len(token))}
    return heads, tails, max(map(len, special)) - 1
