"""Where `spans` finds the assistant's turns in the chats of one shape, told from what the
template writes around their values.

The same search, on a text with a mark in place of each value. What it cannot tell for all values
is told as a condition on them, or there is no answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ingot.tokenizers.chats.render import ChatFormat, any_of_pattern
from ingot.tokenizers.chats.spans import turn_format

MARK = re.compile("([\U00100010-\U0010ffef])")


@dataclass(frozen=True)
class FoundTurns:
    """The span of each turn in the text with marks.

    `unindented`: the messages whose content must not begin with whitespace. `parted`: pairs of
    texts, as marks or as they are, of which neither may begin with the other.
    """

    spans: list[tuple[int, int]]
    unindented: tuple[int, ...]
    parted: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Turn:
    """An assistant message: its number, the mark of its content if it has one, and whether it calls
    tools.
    """

    index: int
    mark: str | None
    calls: bool


class _Unsure(Exception):
    """The turns are not at the same place in all chats of the shape."""


class TurnSearch:
    """The search in one text.

    Args:
        text: of a whole chat, without marks of `{% generation %}` blocks.
        is_trimmed: whether a mark stands for a value without whitespace on its `left` or `right`.
        first_messages: the text of the first messages alone; None if the template refuses them.

    Raises:
        LookupError: `first_messages` does.
    """

    def __init__(
        self,
        form: ChatFormat,
        text: str,
        is_trimmed: Callable[[str, str], bool],
        first_messages: Callable[[int, bool], str | None],
    ) -> None:
        self._how, self._text = turn_format(form), text
        self._is_trimmed, self._first_messages = is_trimmed, first_messages
        self._special = any_of_pattern(tuple(form.special)) if form.special else None
        self._prompt_is_special = bool(self._special and self._special.search(self._how.prompt))
        self._unindented: list[int] = []
        self._parted: list[tuple[str, str]] = []

    def find(self, turns: Sequence[Turn]) -> FoundTurns | None:
        """The turns; None if they are not at the same place in all chats."""
        spans: list[tuple[int, int]] = []
        try:
            for turn in turns:
                lowest = spans[-1][1] if spans else 0
                place = self._place(turn.mark)
                begin = (
                    self._begin_unmarked(turn.index, lowest)
                    if place is None
                    else self._begin(turn.index, place, lowest)
                )
                end = self._end(turn, begin, place)
                if not lowest <= begin <= end:
                    return None
                spans.append((begin, end))
        except _Unsure:
            return None
        return FoundTurns(spans, tuple(self._unindented), tuple(self._parted))

    def _place(self, mark: str | None) -> int | None:
        """The place of a content; None if there is none, or the template drops it."""
        count = 0 if mark is None else self._text.count(mark)
        if count > 1:
            raise _Unsure
        return self._text.index(str(mark)) if count else None

    def _begin(self, index: int, place: int, lowest: int) -> int:
        prompt, text = self._how.prompt, self._text
        before = MARK.split(text[lowest:place])[-1]
        _, found, own = before.rpartition(prompt) if prompt else ("", "", before)
        is_split = bool(own and self._special and self._special.search(own))
        if found and (not own or (self._prompt_is_special and not is_split)):
            # Between the prompt and the content the template may write for the assistant.
            if own or self._is_trimmed(text[place], "left"):
                self._unindented.append(index)
            return place - len(own)
        if (self._prompt_is_special and not found) or len(before) < len(prompt):
            raise _Unsure
        if prompt:
            self._unindented.append(index)
        begin = self._prefix(index, prompt=True)
        if begin is not None and lowest <= begin <= place:
            if prompt or not text[begin:place].strip():
                return begin
            raise _Unsure
        kept = before.rstrip(" ")
        if prompt or begin is not None or not (kept or len(before) == place - lowest):
            raise _Unsure
        self._unindented.append(index)
        return place - len(before) + len(kept)

    def _begin_unmarked(self, index: int, lowest: int) -> int:
        """Where a message without content begins, such as a tool call: after the next prompt."""
        prompt = self._how.prompt
        if not self._special or not self._prompt_is_special:
            begin = self._prefix(index, prompt=True) if prompt or self._how.bare else None
            if begin is None:
                raise _Unsure
            return begin
        place = self._text.find(prompt, lowest)
        found = list(self._special.finditer(prompt))
        # No value has a special token, so one may complete a prompt from outside of these alone.
        heads = tuple(prompt[:cut] for cut in range(found[0].end(), len(prompt)))
        tails = tuple(prompt[cut:] for cut in range(1, found[-1].start() + 1))
        known = MARK.split(self._text)[::2]
        if (
            place < 0
            or any(part.endswith(heads) for part in known[:-1])
            or any(part.startswith(tails) for part in known[1:])
        ):
            raise _Unsure
        return place + len(prompt)

    def _end(self, turn: Turn, begin: int, content: int | None) -> int:
        end, text = self._how.end, self._text
        place = begin if content is None else content + 1
        if end and (after := re.compile(rf"\s*{re.escape(end)}").match(text, place)):
            return after.end()
        whole = self._prefix(turn.index + 1, prompt=False)
        if end:
            closing = text.find(end, place, whole)
            if whole is None and self._special and turn.calls:
                first = self._special.search(text, place)
                closing = first.start() if first and first[0] == end else -1
            if closing < 0 or (whole is None and not turn.calls):
                raise _Unsure
            return closing + len(end)
        last = MARK.split(text[place:whole])[-1] if whole is not None and whole >= place else ""
        if kept := last.rstrip():
            return int(whole or 0) - len(last) + len(kept)
        if content is None or not self._is_trimmed(text[content], "right"):
            raise _Unsure
        return place

    def _prefix(self, count: int, *, prompt: bool) -> int | None:
        """The length of the first `count` messages alone, if each chat begins with these; None if
        none does.
        """
        if not count:
            return None
        first = self._first_messages(count, prompt)
        if first is None:
            return None
        pairs = enumerate(zip(first, self._text, strict=False))
        shorter = min(len(first), len(self._text))
        same = next((at for at, (one, other) in pairs if one != other), shorter)
        if same == len(first):
            return same
        if same < len(self._text):
            one, other = (_part(text[same:]) for text in (first, self._text))
            if MARK.match(one) or MARK.match(other):
                self._parted.append((one, other))
        return None


def _part(text: str) -> str:
    """What a text begins with: a mark, or all until the next one."""
    return text[0] if MARK.match(text) else MARK.split(text)[0]
