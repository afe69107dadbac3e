"""Finds the assistant's turns in the text of a chat: from the end of the generation prompt through
the end-of-turn token.

`{% generation %}` blocks of a template are used where it has them. Otherwise the chat is rendered
again with marks around the content of each assistant message, which shows where that is; and the
first messages are rendered alone, which shows where turns begin and end. If neither is conclusive,
the chat is refused.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ingot.base.errors import WrongInput
from ingot.base.markers import fingerprint
from ingot.tokenizers.chats.render import (
    BEGIN,
    END,
    FIRST_MARK,
    ChatFormat,
    any_of_pattern,
    render,
    render_marked,
)

Messages = Sequence[Mapping[str, Any]]
QUESTION, ANSWER = "\U0010fff0", "\U0010fff1"


@dataclass(frozen=True)
class RenderedChat:
    """The text of a chat and the span [begin, end) of each assistant turn. `ended`: whether that
    turn includes its end-of-turn token.
    """

    text: str
    spans: list[tuple[int, int]]
    ended: list[bool]


@dataclass(frozen=True)
class TurnFormat:
    """What a template writes around an assistant's turn: the generation prompt before it and the
    special token right after it. `bare`: there is no prompt, and an answer follows what was said
    before it at once, with white space between them at most.
    """

    prompt: str
    end: str | None
    bare: bool


def turn_format(form: ChatFormat) -> TurnFormat:
    """What the template writes around a turn, found by rendering a chat of one question and one
    answer.
    """
    return _turn_format(form.template, tuple(form.special), tuple(sorted(form.named.items())))


@functools.lru_cache(maxsize=16)
def _turn_format(
    template: str, special: tuple[str, ...], named: tuple[tuple[str, str], ...]
) -> TurnFormat:
    question: Messages = [{"role": "user", "content": QUESTION}]
    try:
        bare, asked = (
            render(template, question, dict(named), generation_prompt=asked)
            for asked in (False, True)
        )
        whole = render(
            template,
            [*question, {"role": "assistant", "content": ANSWER}],
            dict(named),
            generation_prompt=False,
        )
    except WrongInput:
        return TurnFormat("", None, bare=False)
    after = (
        re.match(rf"\s*{any_of_pattern(special).pattern}", whole.partition(ANSWER)[2])
        if special
        else None
    )
    prompt = asked.removeprefix(bare) if asked.startswith(bare) else ""
    follows = whole.startswith(bare) and whole[len(bare) :].lstrip().startswith(ANSWER)
    return TurnFormat(prompt, after[1] if after else None, bare=follows and not prompt)


def last_user_turn(form: ChatFormat, prompt: str) -> str:
    """What the user said last in the text of a chat that ends with the generation prompt; the whole
    text where the template's frame around it is not found.
    """
    before, after = _user_frame(form.template, tuple(sorted(form.named.items())))
    body = prompt.removesuffix(after)
    place = body.rfind(before) if before and len(body) < len(prompt) else -1
    return body[place + len(before) :] if place >= 0 else prompt


@functools.lru_cache(maxsize=16)
def _user_frame(template: str, named: tuple[tuple[str, str], ...]) -> tuple[str, str]:
    """What stands before every user turn, and after the last one: found where the first and a later
    question agree.
    """
    question: Messages = [{"role": "user", "content": QUESTION}]
    first = render(template, question, dict(named), generation_prompt=True)
    before, _, after = first.partition(QUESTION)
    try:
        talk = [*question, {"role": "assistant", "content": ANSWER}, *question]
        later = render(template, talk, dict(named), generation_prompt=True)
    except WrongInput:
        return before, after
    between = later.partition(ANSWER)[2].partition(QUESTION)[0]
    pairs = itertools.takewhile(
        lambda pair: pair[0] == pair[1], zip(before[::-1], between[::-1], strict=False)
    )
    same = sum(1 for _ in pairs)
    return before[len(before) - same :] or before, after


def render_with_spans(form: ChatFormat, messages: Messages, first: int = 0) -> RenderedChat:
    """Render a chat whose look-alikes are masked, and find the assistant's turns from message
    `first` on.

    Raises:
        WrongInput: the template refuses the chat, or it is not clear which part of the text belongs
        to a message.
    """
    marked = render_marked(form.template, messages, form.named)
    how = turn_format(form)
    if BEGIN in marked:
        text, found = _strip_marks(marked, (BEGIN, END))
        edges = [place for _, place in found]
        spans = [
            _block_span(text, begin, end, how)
            for begin, end in zip(edges[::2], edges[1::2], strict=True)
        ]
        spans = spans[_blocks_before(form, messages, first, len(spans)) :]
    else:
        text = marked
        spans = _SpanFinder(form, messages, text, how).spans()[_count_turns(messages[:first]) :]
    spans = [(begin, end) for begin, end in spans if begin < end]
    return RenderedChat(
        text,
        spans,
        [how.end is not None and text.endswith(how.end, begin, end) for begin, end in spans],
    )


def _count_turns(messages: Messages) -> int:
    """The number of assistant messages."""
    return sum(message["role"] == "assistant" for message in messages)


def _blocks_before(form: ChatFormat, messages: Messages, first: int, blocks: int) -> int:
    """How many of a chat's `{% generation %}` blocks belong to messages before `first`.

    Raises:
        WrongInput: there is not one for each of the assistant's turns, and the template does not
            take the first messages alone.
    """
    if not first or blocks == _count_turns(messages):
        return _count_turns(messages[:first])
    return render_marked(form.template, messages[:first], form.named).count(BEGIN)


def _block_span(text: str, begin: int, end: int, how: TurnFormat) -> tuple[int, int]:
    """The span of a `{% generation %}` block: without whitespace after an end-of-turn token inside
    it, or extended over the token that follows it.
    """
    if how.end is None:
        return begin, end
    inside = begin + len(text[begin:end].rstrip())
    if text.endswith(how.end, begin, inside):
        return begin, inside
    behind = re.compile(rf"\s*{re.escape(how.end)}").match(text, end)
    return begin, behind.end() if behind else end


def _strip_marks(text: str, marks: Iterable[str]) -> tuple[str, list[tuple[str, int]]]:
    """The text without the marks, and each mark with its position."""
    cut = any_of_pattern(tuple(marks)).split(text)
    places, length = [], 0
    for piece, mark in itertools.zip_longest(cut[::2], cut[1::2]):
        length += len(piece)
        places.append((mark, length))
    return "".join(cut[::2]), places[:-1]


class _SpanFinder:
    """Finds each assistant message of one chat in the rendered text."""

    def __init__(self, form: ChatFormat, messages: Messages, text: str, how: TurnFormat) -> None:
        self._form, self._messages, self._text, self._how = form, messages, text, how
        self._special = any_of_pattern(tuple(form.special)) if form.special else None
        self._turns = [
            index for index, message in enumerate(messages) if message["role"] == "assistant"
        ]
        self._said = self._contents()
        # A prompt with special tokens occurs in no message, since look-alikes are masked.
        self._prompt_is_special = bool(self._special and self._special.search(how.prompt))

    def spans(self) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        for index in self._turns:
            lowest = found[-1][1] if found else 0
            begin = self._begin(index, lowest)
            end = self._end(index, begin)
            if not lowest <= begin <= end <= len(self._text):
                raise self._unsure(index)
            found.append((begin, end))
        return found

    def _contents(self) -> dict[int, tuple[int | None, int]]:
        """Message -> where its content, stripped of whitespace, begins and ends; {} if marks change
        what the template writes.

        The beginning is None if the template drops it, as Qwen 3's does with thoughts.
        """
        chat, opened, closed = (
            [dict(message) for message in self._messages],
            dict[str, int](),
            dict[str, int](),
        )
        for number, index in enumerate(self._turns):
            content = chat[index].get("content")
            if isinstance(content, str) and (core := content.strip()):
                begin, end = chr(FIRST_MARK + 2 * number), chr(FIRST_MARK + 2 * number + 1)
                opened[begin] = closed[end] = index
                before, _, after = content.partition(core)
                chat[index]["content"] = f"{before}{begin}{core}{end}{after}"
        if not closed:
            return {}
        try:
            text, places = _strip_marks(
                render_marked(self._form.template, chat, self._form.named), {**opened, **closed}
            )
        except WrongInput:
            return {}
        marks = [mark for mark, _ in places]
        if text != self._text or len(set(marks)) < len(marks):
            return {}
        begins = {opened[mark]: place for mark, place in places if mark in opened}
        return {
            closed[mark]: (begins.get(closed[mark]), place)
            for mark, place in places
            if mark in closed
        }

    def _begin(self, index: int, lowest: int) -> int:
        prompt, text = self._how.prompt, self._text
        if index not in self._said:
            return self._begin_unmarked(index, lowest)
        opened, closed = self._said[index]
        said = closed if opened is None else opened
        if prompt and opened is not None:
            content = self._messages[index]["content"]
            for place in (opened - (len(content) - len(content.lstrip())), opened):
                if text.endswith(prompt, lowest, max(place, lowest)):
                    return place
        if self._prompt_is_special:
            # Text between the prompt and the content is the assistant's too: its thoughts, for
            # example.
            place = text.rfind(prompt, lowest, said)
            if place >= 0 and not (
                self._special and self._special.search(text, place + len(prompt), said)
            ):
                return place + len(prompt)
        before = self._prefix(index, prompt=True)
        if (
            before is not None
            and lowest <= before <= said
            and (prompt or not text[before:said].strip())
        ):
            return before
        if prompt or opened is None:
            raise self._unsure(index)
        return lowest + len(text[lowest:opened].rstrip(" "))

    def _begin_unmarked(self, index: int, lowest: int) -> int:
        """Where a message without content of its own begins, such as a tool call."""
        prompt = self._how.prompt
        if self._prompt_is_special and (place := self._text.find(prompt, lowest)) >= 0:
            return place + len(prompt)
        before = self._prefix(index, prompt=True)
        if before is None or not (prompt or self._how.bare):
            raise self._unsure(index)
        return before

    def _end(self, index: int, begin: int) -> int:
        """The position after the end-of-turn token or, if the template writes none, after the last
        character of the turn.
        """
        text, end = self._text, self._how.end
        said = self._said.get(index)
        place = said[1] if said else begin
        if end is not None and (after := re.compile(rf"\s*{re.escape(end)}").match(text, place)):
            return after.end()
        whole = self._prefix(index + 1, prompt=False)
        if whole is not None and whole >= place:
            closed = text.find(end, place, whole) if end is not None else -1
            return (
                closed + len(end or "") if closed >= 0 else max(place, len(text[:whole].rstrip()))
            )
        closing = (
            self._special.search(text, place)
            if self._special and self._messages[index].get("tool_calls")
            else None
        )
        if closing and closing[0] == end:
            return closing.end()
        if not said:
            raise self._unsure(index)
        return place

    def _prefix(self, count: int, *, prompt: bool) -> int | None:
        """The length of the first `count` messages rendered alone, if the whole chat begins with
        that text.
        """
        if not count:
            return None
        try:
            first = self._form.render(self._messages[:count], generation_prompt=prompt)
        except WrongInput:
            return None
        return len(first) if self._text.startswith(first) else None

    def _unsure(self, index: int) -> WrongInput:
        role = self._messages[index]["role"]
        return WrongInput(
            f"the chat template of {self._form.where} ({fingerprint(self._form.template)}) does not"
            f" show where message {index + 1} of {len(self._messages)} ({role}) stands in the chat;"
            " put {% generation %} blocks into the template, or set tokenizer.template"
        )
