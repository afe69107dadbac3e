"""What a template writes around the contents of a chat, found once for all chats of one shape: the
same roles in the same order.

Only where `watch` proves that the template does not look into contents. All other templates
and shapes are left to `spans`, message by message. Encodes nothing.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ingot.base.errors import WrongInput
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
from ingot.tokenizers.chats.spans import RenderedChat, render_with_spans
from ingot.tokenizers.chats.turns import MARK, Turn, TurnSearch
from ingot.tokenizers.chats.unseen import Question, Slot, Watch
from ingot.tokenizers.chats.watch import joins_only, skeleton_of

MOST_LAYOUTS = 1000
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
    """The pieces of every chat of one shape, and the slots in them. `unindented`: contents that
    must not begin with whitespace, and `parted`: pairs of texts of which neither may begin with the
    other, or the place of the turn is found in another way. `times`: what the template was told of
    the time, by pattern. `asked`: questions about contents whose answer must be no.
    """

    pieces: tuple[LayoutPiece, ...]
    slots: tuple[Slot, ...]
    unindented: tuple[int, ...]
    parted: tuple[tuple[Part, Part], ...]
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


def layout_of(form: ChatFormat, shape: Shape, first: int) -> ChatLayout | None:
    """The layout of chats of this shape, trained from message `first` on; None if nothing proves
    that there is one.
    """
    if not joins_only(form.template) or any(
        MARKS.search(text) or (form.special and any_of_pattern(tuple(form.special)).search(text))
        for text in strings_in(shape)
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
        self._found: RenderedChat = render_with_spans(form, self._probe, first)
        self._edges = [edge for span in self._found.spans for edge in span]

    def _skeleton(self, count: int, *, prompt: bool) -> str:
        """The text of the first messages, with marks in place of values."""
        text = skeleton_of(
            self._form.template,
            self._form.named,
            self._unseen[:count],
            self._watch,
            generation_prompt=prompt,
        )
        if text is None:
            raise LookupError(f"the template looks into a content ({self._watch.seen})")
        return text

    def layout(self) -> ChatLayout | None:
        said = "".join(self._said(part) for part in self._parts)
        if said != self._found.text or not self._is_cut_alike():
            return None
        conditions = self._conditions()
        pieces = self._pieces()
        if conditions is None or pieces is None:
            return None
        watch = self._watch
        slots, asked = tuple(watch.slots), tuple(dict.fromkeys(watch.asked))
        return ChatLayout(tuple(pieces), slots, *conditions, dict(watch.times), asked)

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

    def _conditions(self) -> tuple[tuple[int, ...], tuple[tuple[Part, Part], ...]] | None:
        """`unindented` and `parted` of the layout; None unless they are enough for each turn to be
        found beside the same text of the template, whatever is said.
        """
        turns = [
            (index, list(self._marks_of(index)))
            for index, (role, *_) in enumerate(self._shape)
            if role == "assistant"
        ]
        if self._blocks:
            return ((), ()) if self._blocks == len(turns) or not self._first else None
        if any(len(marks) > 1 for _, marks in turns):
            return None
        found = TurnSearch(
            self._form,
            self._plain,
            lambda mark, side: bool(getattr(self._watch.slot(mark), side)),
            self._first_messages,
        ).find(
            [
                Turn(index, marks[0] if marks else None, bool(self._probe[index].get("tool_calls")))
                for index, marks in turns
            ]
        )
        if found is None:
            return None
        spans = [
            (self._place(begin), self._place(end))
            for (index, _), (begin, end) in zip(turns, found.spans, strict=True)
            if index >= self._first and begin < end
        ]
        if spans != self._found.spans:
            return None
        parted = tuple((_part_of(one), _part_of(other)) for one, other in found.parted)
        return found.unindented, parted

    def _marks_of(self, message: int) -> Iterator[str]:
        """The marks in the text that stand for a content; as JSON it is no turn of its own."""
        for number in {part for part in self._parts if not isinstance(part, str)}:
            slot = self._watch.slots[number]
            if slot.value == message:
                if slot.settings is not None:
                    raise LookupError("the assistant's content is written as JSON")
                yield chr(FIRST_MARK + number)

    def _first_messages(self, count: int, prompt: bool) -> str | None:
        try:
            return without_blocks(self._skeleton(count, prompt=prompt))
        except WrongInput:
            return None

    def _place(self, place: int) -> int:
        """The place in the probe's text of one in the text with marks."""
        return sum(
            len(self._said(_part_of(text))) for text in MARK.split(self._plain[:place]) if text
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


def _part_of(text: str) -> Part:
    """The slot of a mark, or the text itself."""
    return ord(text) - FIRST_MARK if MARK.fullmatch(text) else text


@functools.lru_cache(maxsize=16)
def _halves(special: tuple[str, ...]) -> tuple[set[str], set[str], int]:
    """How special tokens begin and how they end, whole tokens left out, and the length of the
    longest such part.
    """
    heads = {token[:cut] for token in special for cut in range(1, len(token))}
    tails = {token[cut:] for token in special for cut in range(1, len(token))}
    return heads, tails, max(map(len, special)) - 1
