"""What is trained is what a served model has to continue: templates whose generation prompt opens a
thought, that drop earlier thoughts, that end the last answer otherwise, or that write the system
prompt into the last question alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.base.errors import WrongInput
from ingot.tokenizers.chats.chat import Chat
from ingot.tokenizers.chats.encode import encode_chats, encode_trained
from ingot.tokenizers.chats.templates import with_kwargs
from ingot.tokenizers.tokenizer import Tokenizer
from tests.tokenizers.chats.test_masks import NEXT, A, S, Talk, U, bracketed, turns
from tests.tokenizers.small import bpe_files, chatty

OPENED = (
    "{% set last = namespace(asked=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set"
    " last.asked = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}{{ '<|im_start|>' +"
    " m.role + '\n' }}{% if m.role == 'assistant' %}{% set thought = m.reasoning_content or '' %}"
    "{% set said = m.content %}{% if not thought and '</think>' in said %}{% set thought ="
    " said.split('</think>')[0].split('<think>')[-1] | trim %}{% set said ="
    " said.split('</think>')[-1] | trim %}{% endif %}{% if loop.index0 > last.asked %}{{ '<think>\n'"
    " + thought + '\n</think>\n\n' }}{% endif %}{{ said }}{% for c in m.tool_calls or [] %}{{"
    " '<call>' + c.function.name + '</call>' }}{% endfor %}{% else %}{{ m.content }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{{ '<think>\n\n</think>\n\n' if enable_thinking is defined and not enable_thinking else"
    " '<think>\n' }}{% endif %}"
)
"""As Qwen 3.5's: thoughts after the last question only, and an open one in the prompt."""
DROPPED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role }}{{ m.content.split('</think>')[-1] }}{{"
    " '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant<think>\n'"
    " }}{% endif %}"
)
"""As that of DeepSeek R1's distilled models: thoughts are dropped everywhere."""
CHANNELS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role }}{% if m.role == 'assistant' %}{% if"
    " loop.last and m.thinking %}{{ ' to=self:' + m.thinking + '<|im_end|><|im_start|>assistant' }}"
    "{% endif %}{% endif %}{{ ':' + m.content }}{{ '<|end_of_text|>' if m.role == 'assistant' and"
    " loop.last else '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{"
    " '<|im_start|>assistant' }}{% endif %}"
)
"""As gpt-oss's: the last answer alone has its thought, and ends otherwise."""
LAST_QUESTION = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set before, talk = messages[0].content +"
    " ' ', messages[1:] %}{% else %}{% set before, talk = '', messages %}{% endif %}{% for m in talk"
    " %}{% if m.role == 'user' %}{{ '[ASK]' + (before if loop.last else '') + m.content + '[/ASK]' }}"
    "{% elif m.tool_calls %}{{ '[CALL]' + m.tool_calls[0].function.name + eos_token }}{% elif m.role"
    " == 'tool' %}{{ '[RESULT]' + m.content + '[/RESULT]' }}{% else %}{{ ' ' + m.content + eos_token"
    " }}{% endif %}{% endfor %}"
)
"""As Mistral's v3 and Nemo's."""
CALL = {"type": "function", "function": {"name": "f", "arguments": {}}}


def thinking(key: str, *said: tuple[str, str, str | None]) -> Talk:
    return [
        {"role": role, "content": content} | ({} if thought is None else {key: thought})
        for role, content, thought in said
    ]


THOUGHTS = thinking(
    "reasoning_content", (U, "one", None), (A, "x", "hm"), (U, "two", None), (A, "y", "so")
)
INSIDE = turns(
    (U, "one"),
    (A, "<think>\nhm\n</think>\n\nx"),
    (U, "two"),
    (A, "<think>\nso\n</think>\n\ny"),
)


@pytest.mark.parametrize("chat", [THOUGHTS, INSIDE])
def test_each_answer_has_its_thought(chat: Talk) -> None:
    assert bracketed(chatty(OPENED), chat) == NEXT.join(
        [
            "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n<think>\n"
            "⟦hm\n</think>\n\nx<|im_end|>⟧\n",
            "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\nx<|im_end|>\n"
            "<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n<think>\n"
            "⟦so\n</think>\n\ny<|im_end|>⟧\n",
        ]
    )


def test_answers_after_one_question_are_one_text() -> None:
    """Of several calls each is trained where the last answer is, as it was when it was served."""
    chat = [
        *turns((U, "one")),
        {"role": A, "content": "", "reasoning_content": "hm", "tool_calls": [CALL]},
        *turns(("tool", "r"), (A, "x")),
    ]
    assert bracketed(chatty(OPENED), chat) == (
        "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n<think>\n"
        "⟦hm\n</think>\n\n<call>f</call><|im_end|>⟧\n<|im_start|>tool\nr<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n⟦\n</think>\n\nx<|im_end|>⟧\n"
    )
    assert bracketed(chatty(OPENED), [*chat, *turns((U, "thanks"))]) == bracketed(
        chatty(OPENED), chat
    )


def test_the_last_answer_ends_otherwise() -> None:
    chat = thinking("thinking", (U, "one", None), (A, "x", "hm"), (U, "two", None), (A, "y", None))
    assert bracketed(chatty(CHANNELS), chat) == NEXT.join(
        [
            "<|im_start|>user:one<|im_end|><|im_start|>assistant⟦ to=self:hm<|im_end|><|im_start|>assistant:x<|end_of_text|>⟧",
            "<|im_start|>user:one<|im_end|><|im_start|>assistant:x<|im_end|>"
            "<|im_start|>user:two<|im_end|><|im_start|>assistant⟦:y<|end_of_text|>⟧",
        ]
    )


def test_a_system_prompt_is_read_before_each_answer() -> None:
    """The template writes it into the last question, and into none once that is answered."""
    chat = [
        *turns((S, "melt"), (U, "one")),
        {"role": A, "content": "", "tool_calls": [CALL]},
        *turns(("tool", "r"), (A, "x"), (U, "two"), (A, "y")),
    ]
    asked = "<|begin_of_text|>[ASK]one[/ASK][CALL]f<|end_of_text|>[RESULT]r[/RESULT]"
    assert bracketed(chatty(LAST_QUESTION), chat) == NEXT.join(
        [
            "<|begin_of_text|>[ASK]melt one[/ASK]⟦[CALL]f<|end_of_text|>⟧",
            f"{asked} x<|end_of_text|>[ASK]melt two[/ASK]⟦ y<|end_of_text|>⟧",
            f"{asked}⟦ x<|end_of_text|>⟧[ASK]two[/ASK] y<|end_of_text|>",
        ]
    )


@pytest.mark.parametrize("chat", [THOUGHTS, INSIDE])
def test_a_template_that_drops_what_its_prompt_opens_is_refused(chat: Talk) -> None:
    with pytest.raises(
        WrongInput,
        match=r"does not write message 2 of 4 \(assistant\) behind its generation prompt"
        r" '<\|im_start\|>assistant<think>\\n', so a served model would not be asked",
    ):
        bracketed(chatty(DROPPED), chat)


def test_calls_that_a_template_does_not_write_are_refused() -> None:
    """Their end alone would teach the model to say nothing."""
    chat = [*turns((U, "one")), {"role": A, "content": "", "tool_calls": [CALL]}]
    with pytest.raises(WrongInput, match="does not write message 2 of 2"):
        bracketed(chatty(), chat)
    assert bracketed(chatty(), turns((U, "one"), (A, ""))).endswith("⟦<|im_end|>⟧\n")
    in_parts = "{% for part in m.content if part.text %}{{ part.text }}{% endfor %} "
    tokenizer = chatty(CHANNELS.replace("{{ ':' + m.content }}", ": " + in_parts))
    with pytest.raises(WrongInput, match="does not write message 2 of 2"):
        bracketed(tokenizer, turns((U, "one"), (A, "x")))


def test_sides_of_preferences_are_one_text() -> None:
    """The answer after the prompt is trained in the whole chat, or the chat is refused."""
    tokenizer = chatty(OPENED)
    ids, mask, lengths = encode_chats(tokenizer, [Chat(THOUGHTS)], tokenizer.encode_batch, [2])
    assert tokenizer.decode(ids[mask == 1], skip_special=False) == "so\n</think>\n\ny<|im_end|>"
    assert len(lengths) == 1
    with pytest.raises(WrongInput, match="cannot be trained in one text"):
        encode_chats(tokenizer, [Chat(THOUGHTS)], tokenizer.encode_batch, [0])


def answers_of(tokenizer: Tokenizer, chat: Talk) -> list[tuple[list[int], list[int]]]:
    """Of each answer that is trained the ids before it and its own, in the order of the texts."""
    found = encode_trained(tokenizer, [Chat(chat)], tokenizer.encode_batch)
    answers, cuts = [], np.cumsum(found.lengths)[:-1]
    for ids, mask in zip(np.split(found.ids, cuts), np.split(found.mask, cuts), strict=True):
        edges = np.flatnonzero(np.diff(mask, prepend=0, append=0)).tolist()
        for begin, end in zip(edges[::2], edges[1::2], strict=True):
            answers.append((ids[:begin].tolist(), ids[begin:end].tolist()))
    return answers


@pytest.mark.parametrize(
    ("template", "chat"),
    [
        (OPENED, THOUGHTS),
        (OPENED, INSIDE),
        (
            CHANNELS,
            thinking("thinking", (U, "a", None), (A, "x", "hm"), (U, "b", None), (A, "y", "k")),
        ),
        (LAST_QUESTION, turns((S, "melt"), (U, "one"), (A, "x"), (U, "two"), (A, "y"))),
    ],
)
def test_what_a_server_is_asked_and_transformers_writes(
    template: str, chat: Talk, tmp_path: Path
) -> None:
    """Before each answer stand the ids that this chat is asked with, which transformers gives too;
    they and the answer are its text of the chat with the answer, but for what was said before it.
    """
    from transformers import AutoTokenizer

    tokenizer = Tokenizer(bpe_files(template))
    tokenizer.save(tmp_path)
    theirs: Any = AutoTokenizer.from_pretrained(tmp_path)
    asked = [number for number, message in enumerate(chat) if message["role"] == A]
    answers = answers_of(tokenizer, chat)
    assert len(answers) == len(asked)
    for number in asked:
        before = tokenizer.encode_chat(chat[:number])
        assert before == theirs.apply_chat_template(
            chat[:number], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        [answer] = [answer for prompt, answer in answers if prompt == before]
        said = tokenizer.decode(answer, skip_special=False)
        assert (
            theirs.apply_chat_template(chat[: number + 1], tokenize=False).rstrip().endswith(said)
        )
        assert chat[number].get("reasoning_content", "") in said
        assert chat[number].get("thinking", "") in said


KWARGS: dict[str, Any] = {
    "enable_thinking": False,
    "style": {"tone": [1, None, 'a"\\n\U0001f525 %}']},
}
STYLED = "\n{{ style | tojson if style is defined else 'none' }}" + OPENED


def test_a_template_keeps_the_arguments_that_it_is_trained_with(tmp_path: Path) -> None:
    """transformers writes with them what it writes when it is told them, and others where it is."""
    from transformers import AutoTokenizer

    plain = Tokenizer(bpe_files(STYLED))
    kept = with_kwargs(plain, KWARGS)
    assert with_kwargs(kept, KWARGS) is kept
    assert kept.identity() != plain.identity()
    plain.save(tmp_path / "plain")
    kept.save(tmp_path / "kept")
    one, other = (AutoTokenizer.from_pretrained(tmp_path / name) for name in ("plain", "kept"))
    for prompt in (False, True):
        asked = {"tokenize": False, "add_generation_prompt": prompt}
        for given in ({}, {"enable_thinking": True}, {"style": "x"}):
            written = other.apply_chat_template(THOUGHTS, **asked, **given)
            assert written == one.apply_chat_template(THOUGHTS, **asked, **{**KWARGS, **given})
    chat = turns((U, "one"), (A, "x"))
    assert bracketed(kept, chat).endswith("assistant\n<think>\n\n</think>\n\n⟦x<|im_end|>⟧\n")
    assert bracketed(plain, chat).endswith("assistant\n<think>\n⟦\n</think>\n\nx<|im_end|>⟧\n")


def test_arguments_that_a_template_never_asks_for_are_refused() -> None:
    with pytest.raises(
        WrongInput, match="never asks for enable_thoughts; it asks for enable_think"
    ):
        with_kwargs(chatty(OPENED), {"enable_thoughts": False})
    with pytest.raises(WrongInput, match="`messages` is set by the request"):
        with_kwargs(chatty(OPENED), {"messages": []})
    with pytest.raises(WrongInput, match="has no chat template"):
        with_kwargs(Tokenizer(bpe_files()), {"enable_thinking": False})
