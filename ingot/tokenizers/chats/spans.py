"""Finds what of a chat is trained: of each answer what a served model has to write, from the end of
the generation prompt through the end-of-turn token. An answer that is marked as not to be trained
is there to be read alone.

`{% generation %}` blocks of a template are used where it has them. Otherwise the chat is rendered
as it was when each answer was asked for, and with that answer. Templates may write an answer
otherwise once others follow it: without its thought, or without the system prompt before it. Such
an answer is trained in a text of its own, the chat cut after it; the empty thought alone that a
template adds to the last answer may be missing. One that does not continue its generation prompt
even there is refused.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ingot.base.errors import WrongInput
from ingot.base.markers import fingerprint
from ingot.tokenizers.chats.chat import Messages, is_trained
from ingot.tokenizers.chats.render import BEGIN, END, ChatFormat, any_of_pattern, render

QUESTION, ANSWER = "\U0010fff0", "\U0010fff1"


@dataclass(frozen=True)
class RenderedChat:
    """A text of a chat, and the span [begin, end) of each answer that is trained in it. `messages`:
    how many of the chat's the template writes so; 0 if it writes no such text as a whole.
    """

    text: str
    spans: list[tuple[int, int]]
    messages: int


@dataclass(frozen=True)
class ServedAnswer:
    """An answer as a served model gives it, from `begin` on in a text that ends with its
    end-of-turn token; the second of `texts` is without the empty thought that a template may add.
    `whole` is the first with whatever the template writes behind it, all of `messages` messages.
    """

    begin: int
    texts: tuple[str, ...]
    whole: str
    messages: int = 0

    def span_in(self, text: str) -> tuple[int, int] | None:
        """Where it stands in the text of a chat that goes on; None if it stands there otherwise."""
        found = next((one for one in self.texts if text.startswith(one)), None)
        return None if found is None else (self.begin, len(found))


@dataclass(frozen=True)
class TurnFormat:
    """What a template writes around an assistant's turn: the generation prompt before it, or a
    `header` where there is no prompt; the special token right after it; and in the last turn an
    `opening` between prompt and answer, such as an empty thought, and the `rest` behind the end.
    `writes`: whether it writes contents that are texts, and not in parts.
    """

    prompt: str
    end: str | None
    header: str = ""
    opening: str = ""
    rest: str = ""
    writes: bool = True


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
        return TurnFormat("", None)
    before, _, behind = whole.partition(ANSWER)
    after = re.match(rf"\s*{any_of_pattern(special).pattern}", behind) if special else None
    return TurnFormat(
        asked.removeprefix(bare) if asked.startswith(bare) else "",
        after[1] if after else None,
        before.removeprefix(bare).rstrip(" ") if asked == bare and before.startswith(bare) else "",
        before.removeprefix(asked) if asked != bare and before.startswith(asked) else "",
        behind[after.end() :] if after else "",
        writes=ANSWER in whole,
    )


def trained_texts(form: ChatFormat, messages: Messages, first: int) -> list[RenderedChat]:
    """The texts in which the answers of a chat from message `first` on are trained, each answer in
    one of them: the whole chat, which look-alikes must be masked in, and before it the chat cut
    after answers that it has otherwise than they were given.

    Raises:
        WrongInput: the template refuses the chat, or does not write an answer behind its generation
            prompt.
    """
    marked = form.render_marked(messages)
    if BEGIN in marked:
        how = turn_format(form)
        text, found = _strip_marks(marked, (BEGIN, END))
        edges = [place for _, place in found]
        spans = [
            _block_span(text, begin, end, how)
            for begin, end in zip(edges[::2], edges[1::2], strict=True)
        ]
        untrained = _untrained_blocks(form, messages, first, len(spans))
        spans = [span for number, span in enumerate(spans) if number not in untrained]
        return [_rendered(text, spans, len(messages))]
    answers = [
        _served(form, messages, index, marked)
        for index in range(first, len(messages))
        if messages[index]["role"] == "assistant" and is_trained(messages[index])
    ]
    texts = list[RenderedChat]()
    left, text, count = answers, marked, len(messages)
    while left or not texts:
        spans = [span for answer in left if (span := answer.span_in(text))]
        if spans or not answers:
            texts.append(_rendered(text, spans, count))
        left = [answer for answer in left if not answer.span_in(text)]
        if left:
            text, count = left[-1].whole, left[-1].messages
    return texts[::-1]


def _rendered(text: str, spans: Sequence[tuple[int, int]], messages: int) -> RenderedChat:
    return RenderedChat(text, [(begin, end) for begin, end in spans if begin < end], messages)


def _served(form: ChatFormat, messages: Messages, index: int, marked: str) -> ServedAnswer:
    """The answer that message `index` is; `marked`: the text of all messages.

    Raises:
        WrongInput: the template refuses the messages up to it, or writes it otherwise than its
            generation prompt begins it.
    """
    how, chat = turn_format(form), messages[: index + 1]
    whole = marked if len(chat) == len(messages) else form.render(chat)
    try:
        prompt: str | None = form.render(chat[:-1], generation_prompt=True)
    except WrongInput:
        prompt = None
    says = bool(str(chat[-1].get("content") or "").strip() or chat[-1].get("tool_calls"))
    found = served_answer(how, whole, prompt, is_first=not index, says=says)
    if found is not None:
        return replace(found, messages=len(chat))
    if prompt is not None and (found := _answer_behind(form, chat, whole, prompt)):
        return found
    raise WrongInput(
        f"the chat template of {form.where} ({fingerprint(form.template)}) does not write message"
        f" {index + 1} of {len(messages)} (assistant) behind its generation prompt"
        f" {(how.prompt or str(prompt))[-60:]!r}, so a served model would not be asked for what is"
        " trained; give answers the thoughts that it opens (`reasoning_content`), say in"
        " tokenizer.template_kwargs whether it does (such as enable_thinking: false), or set"
        " tokenizer.template to a template that writes answers as it asks for them"
    )


def served_answer(
    how: TurnFormat, whole: str, prompt: str | None, *, is_first: bool, says: bool
) -> ServedAnswer | None:
    """The answer that ends a text, from the text that asks for it (None: the template refuses it);
    None if it does not continue that. `is_first`: nothing is said before it. `says`: it has a
    content or calls tools, so that its end alone would teach the model to say nothing.
    """
    end = len(whole.removesuffix(how.rest).rstrip())
    begin = -1
    if prompt is not None and whole.startswith(prompt + how.header):
        begin = len(prompt) + len(how.header)
    elif is_first and how.prompt and how.prompt in whole:
        begin = whole.index(how.prompt) + len(how.prompt)
    text = whole[: max(begin, end)]
    is_empty = not (how.writes and text[begin:].removesuffix(how.end or "").strip())
    if begin < 0 or (says and is_empty):
        return None
    texts = {text, text[:begin] + text[begin:].removeprefix(how.opening)}
    return ServedAnswer(begin, tuple(sorted(texts, key=len, reverse=True)), whole)


def _answer_behind(
    form: ChatFormat, chat: Messages, whole: str, prompt: str
) -> ServedAnswer | None:
    """The answer where the template writes what was said before it otherwise once it is given, such
    as a system prompt that is put into the last question only while that is the last message. What
    follows the last thing said must be the same.
    """
    content = chat[-2].get("content") if len(chat) > 1 else None
    if not isinstance(content, str) or not (core := content.rstrip()):
        return None
    asked = [*chat[:-2], {**chat[-2], "content": core + QUESTION + content[len(core) :]}]
    try:
        before = form.render(asked, generation_prompt=True).split(QUESTION)
        after = form.render([*asked, chat[-1]]).split(QUESTION)
    except WrongInput:
        return None
    if len(before) != 2 or len(after) != 2 or ["".join(before), "".join(after)] != [prompt, whole]:
        return None
    return served_answer(turn_format(form), before[0] + after[1], prompt, is_first=False, says=True)


def _count_turns(messages: Messages) -> int:
    """The number of assistant messages."""
    return sum(message["role"] == "assistant" for message in messages)


def _untrained_blocks(form: ChatFormat, messages: Messages, first: int, blocks: int) -> set[int]:
    """The numbers of a chat's `{% generation %}` blocks that belong to messages before `first`, or
    to answers that are marked as not to be trained.

    Raises:
        WrongInput: as `_blocks_before`.
    """
    found = set(range(_blocks_before(form, messages, first, blocks)))
    for index, message in enumerate(messages):
        if index >= first and message["role"] == "assistant" and not is_trained(message):
            begin, end = (_blocks_before(form, messages, at, blocks) for at in (index, index + 1))
            found.update(range(begin, end))
    return found


def _blocks_before(form: ChatFormat, messages: Messages, first: int, blocks: int) -> int:
    """How many of a chat's `{% generation %}` blocks belong to messages before `first`.

    Raises:
        WrongInput: there is not one for each of the assistant's turns, and the template does not
            take the first messages alone.
    """
    if not first or blocks == _count_turns(messages):
        return _count_turns(messages[:first])
    return form.render_marked(messages[:first]).count(BEGIN)


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
