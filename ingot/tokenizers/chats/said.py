"""What was said, read out of the text of a chat without what the template writes around it: the
last user turn, and the content of the answer. Training and evaluation tell rewards what this says.
"""

from __future__ import annotations

import functools
import itertools
import re
from dataclasses import dataclass

from ingot.base.errors import WrongInput
from ingot.tokenizers.chats.chat import THOUGHTS, Messages
from ingot.tokenizers.chats.render import ChatFormat, any_of_pattern, render
from ingot.tokenizers.chats.spans import ANSWER, QUESTION, turn_format

SYSTEM, THOUGHT, RESULT = "\U0010fff2", "\U0010fff3", "\U0010fff4"
Named = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class AnswerFrame:
    """What a template may write around the content of an answer: before it an empty thought, a
    thought, or the name of a channel; white space on either side.
    """

    before: tuple[re.Pattern[str], ...]
    special: tuple[str, ...]

    def content(self, text: str) -> str:
        """What is said in an answer, from the end of the generation prompt on, special tokens
        included; the content alone, as data have it, gives the same.
        """
        for pattern in self.before:  # an empty thought may stand before one in the content
            text = pattern.sub("", text, count=1)
        return (any_of_pattern(self.special).sub("", text) if self.special else text).strip()


def answer_frame(form: ChatFormat) -> AnswerFrame | None:
    """The frame of a template; None if it writes contents as they are."""
    named, special = tuple(sorted(form.named.items())), tuple(form.special)
    before, after = _around_answer(form.template, named)
    thought = _around_thought(form.template, named)
    is_widened = after != after.lstrip() and turn_format(form).end is not None
    if not (before or thought or is_widened):
        return None
    patterns = [re.compile(rf"\A\s*{re.escape(before.strip())}")] if before.strip() else []
    if thought is not None:
        opens, closes = (re.escape(one.strip()) for one in thought)
        patterns.append(re.compile(rf"\A\s*{opens}.*?{closes}", re.DOTALL))
    return AnswerFrame(tuple(patterns), special)


@functools.lru_cache(maxsize=16)
def _around_answer(template: str, named: Named) -> tuple[str, str]:
    """What stands between the generation prompt and an answer, and behind that."""
    question: Messages = [{"role": "user", "content": QUESTION}]
    try:
        prompt = render(template, question, dict(named), generation_prompt=True)
        answered = [*question, {"role": "assistant", "content": ANSWER}]
        whole = render(template, answered, dict(named), generation_prompt=False)
    except WrongInput:
        return "", ""
    before, found, after = whole.partition(ANSWER)
    return (before[len(prompt) :], after) if found and before.startswith(prompt) else ("", after)


@functools.lru_cache(maxsize=16)
def _around_thought(template: str, named: Named) -> tuple[str, str] | None:
    """What stands between the generation prompt and a thought, and between that and its answer;
    None if the template writes no thoughts.
    """
    question: Messages = [{"role": "user", "content": QUESTION}]
    for key in THOUGHTS:
        thought = {"role": "assistant", "content": ANSWER, key: THOUGHT}
        try:
            prompt = render(template, question, dict(named), generation_prompt=True)
            whole = render(template, [*question, thought], dict(named), generation_prompt=False)
        except WrongInput:
            continue
        before, _, rest = whole.partition(THOUGHT)
        between, found, _ = rest.partition(ANSWER)
        if found and between.strip() and before.startswith(prompt):
            return before[len(prompt) :], between
    return None


def last_user_turn(form: ChatFormat, prompt: str) -> str:
    """What the user said last in the text of a chat that ends with the generation prompt; the whole
    text where the template's frame around it is not found. A system prompt that the template puts
    into that turn is left out where something marks it, and else is a part of the turn.
    """
    named = tuple(sorted(form.named.items()))
    before, closes, after = _around_user(form.template, named)
    if not closes.strip() and any(one in after for one in form.special):
        closes = after
    place = _user_turn(prompt, before, _before_result(form.template, named, before))
    if place < 0:
        return prompt
    turn = prompt[place:]
    if closes.strip() and closes in turn:  # calls and what tools answered may follow
        turn = turn.partition(closes)[0]
    elif after and turn.endswith(after):
        turn = turn.removesuffix(after)
    else:
        return prompt
    opens, closes = _around_system(form.template, named, before)
    return (
        turn.partition(closes)[2] if opens and closes in turn and turn.startswith(opens) else turn
    )


def _user_turn(text: str, before: str, result: str) -> int:
    """Where the last user turn begins behind the marker `before`, negative if nowhere; a turn that
    begins with `result` is a tool's.
    """
    place = text.rfind(before) if before else -1
    while result and place >= 0 and text.startswith(result, place + len(before)):
        place = text.rfind(before, 0, place)
    return place + len(before) if place >= 0 else -1


@functools.lru_cache(maxsize=16)
def _around_user(template: str, named: Named) -> tuple[str, str, str]:
    """What stands before every user turn, found where the first and a later question agree; what
    closes one, and what follows the last one, the generation prompt included.
    """
    question: Messages = [{"role": "user", "content": QUESTION}]
    first = render(template, question, dict(named), generation_prompt=True)
    before, _, after = first.partition(QUESTION)
    alone = render(template, question, dict(named), generation_prompt=False)
    closes = after[: _same_beginning(alone.partition(QUESTION)[2], after)]
    try:
        talk = [*question, {"role": "assistant", "content": ANSWER}, *question]
        later = render(template, talk, dict(named), generation_prompt=True)
    except WrongInput:
        return before, closes, after
    between = later.partition(ANSWER)[2].partition(QUESTION)[0]
    same = _same_beginning(before[::-1], between[::-1])
    return before[len(before) - same :] or before, closes, after


def _same_beginning(one: str, other: str) -> int:
    """How many characters two texts share from their beginning on."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


@functools.lru_cache(maxsize=16)
def _before_result(template: str, named: Named, before_user: str) -> str:
    """What begins a tool's answer that the template writes as a user turn; empty where it does not,
    or nothing tells it from what the user says.
    """
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    chat: Messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": RESULT},
    ]
    try:
        text = render(template, chat, dict(named), generation_prompt=False)
    except WrongInput:
        return ""
    between, found, _ = text.partition(QUESTION)[2].partition(RESULT)
    opens = between.rpartition(before_user)[2] if found and before_user in between else ""
    return opens if opens.strip() else ""


@functools.lru_cache(maxsize=16)
def _around_system(template: str, named: Named, before_user: str) -> tuple[str, str]:
    """What marks a system prompt that stands inside of the user's turn, before and behind it; empty
    where it stands elsewhere, or nothing tells it from what the user says.
    """
    chat: Messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    try:
        text = render(template, chat, dict(named), generation_prompt=True)
    except WrongInput:
        return "", ""
    head, found, rest = text.partition(SYSTEM)
    between = rest.partition(QUESTION)[0]
    place = head.rfind(before_user)
    opens = head[place + len(before_user) :] if place >= 0 else ""
    is_inside = found and before_user not in between
    return (opens, between) if is_inside and opens.strip() and between.strip() else ("", "")
