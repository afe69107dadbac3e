"""Chats put together from the layout of their shape: the same ids and masks as rendered one by one,
and rendered one by one wherever a template looks into what is said.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from ingot.base.errors import WrongInput
from ingot.config.doors import BUILT_IN
from ingot.tokenizers.chats import layouts, render, watch
from ingot.tokenizers.chats.chat import Chat
from ingot.tokenizers.chats.encode import encode_chats, encode_trained
from ingot.tokenizers.chats.layouts import ChatLayout, ChatLayouts, layout_of
from ingot.tokenizers.chats.shapes import shape_of
from ingot.tokenizers.chats.templates import find_template, with_template
from ingot.tokenizers.tokenizer import Tokenizer
from tests.tokenizers.chats.test_masks import (
    BARE_BLOCKS,
    BLOCKS,
    END_ONCE,
    LAST_ONLY,
    NO_END,
    NO_PROMPT,
    REAL,
    ROLE_TOKENS,
    A,
    S,
    Talk,
    U,
    turns,
)
from tests.tokenizers.chats.test_served import CHANNELS, LAST_QUESTION, OPENED
from tests.tokenizers.chats.test_templates import all_tokens
from tests.tokenizers.small import CHATML, chatty, real_tokenizer

TEMPLATES = [CHATML, BLOCKS, BARE_BLOCKS, LAST_ONLY, NO_PROMPT, NO_END, END_ONCE, ROLE_TOKENS]
TEMPLATES += [OPENED, CHANNELS, LAST_QUESTION]
BITS = ["a", "b ", " c", "\n", "<|im_end|>", "<|im_start|>assistant\n", "\U00100011", "\U000f0000"]
BITS += ["🔥", "é", "assistant:", "im_end|>", "end|>", "<|", "<", "user\n", "</think>", "</s>"]


def made_up_chats(count: int) -> list[Talk]:
    """Chats of few shapes, so that most have a layout, whose contents try to be mistaken."""
    draw = random.Random(3)
    shapes = [(U, A), (S, U, A), (U, A, U, A), (A, U, A, A), (U, U)]
    return [
        turns(
            *(
                (role, "".join(draw.choice(BITS) for _ in range(draw.randint(0, 5))))
                for role in draw.choice(shapes)
            )
        )
        for _ in range(count)
    ]


def accepted(tokenizer: Tokenizer, chats: list[Talk]) -> list[Talk]:
    """Those in which the turns are found; the others are refused with the whole batch."""

    def is_accepted(chat: Talk) -> bool:
        try:
            encode_trained(tokenizer, [Chat(chat)], tokenizer.encode_batch)
        except WrongInput:
            return False
        return True

    return [chat for chat in chats if is_accepted(chat)]


def check_alike(tokenizer: Tokenizer, chats: list[Talk], monkeypatch: pytest.MonkeyPatch) -> None:
    chats = accepted(tokenizer, chats)
    assert len(chats) > 20
    for firsts in (None, [len(chat) // 2 for chat in chats]):
        found = encode_trained(tokenizer, list(map(Chat, chats)), tokenizer.encode_batch, firsts)
        with monkeypatch.context() as patched:
            patched.setattr(ChatLayouts, "find", lambda *_: None)
            wanted = encode_trained(
                tokenizer, list(map(Chat, chats)), tokenizer.encode_batch, firsts
            )
        for name in ("ids", "mask", "lengths", "counts"):
            one, other = getattr(found, name), getattr(wanted, name)
            assert one.dtype == other.dtype
            assert one.tolist() == other.tolist()
        assert found.messages == wanted.messages


@pytest.mark.drawn(keep=4)
@pytest.mark.parametrize("template", TEMPLATES)
def test_the_same_ids_and_masks(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_alike(chatty(template), made_up_chats(80), monkeypatch)


@pytest.mark.parametrize("template", [CHATML, BLOCKS, LAST_ONLY, END_ONCE])
def test_the_same_where_some_answers_have_no_weight(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chats = [
        [one | {"weight": (number + place) % 2} for place, one in enumerate(chat)]
        for number, chat in enumerate(made_up_chats(80))
    ]
    check_alike(chatty(template), chats, monkeypatch)


@pytest.mark.parametrize("name", BUILT_IN["template"])
def test_the_same_with_built_in_templates(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = with_template(all_tokens(), find_template(name))
    check_alike(tokenizer, made_up_chats(60), monkeypatch)


@pytest.mark.drawn("layouts of real templates")
@pytest.mark.parametrize("name", ["hf_llama3_2", "hf_qwen3"])
def test_the_same_with_real_templates_and_chats(
    test_data: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = test_data / "llamafactory_demo" / "alpaca_en_demo.json"
    real = json.loads(path.read_text(encoding="utf-8"))[:30]
    chats = [turns((U, one["instruction"]), (A, one["output"])) for one in real]
    tokenizer = real_tokenizer(test_data / "tokenizers" / name)
    check_alike(tokenizer, [*chats, *REAL, *made_up_chats(40)], monkeypatch)


def layout(template: str, *roles: str) -> ChatLayout | None:
    found = shape_of(turns(*((role, "x") for role in roles)))
    assert found is not None
    return layout_of(chatty(template).chat_format, found[0], 0)


@pytest.mark.parametrize("template", [CHATML, BLOCKS, BARE_BLOCKS])
def test_templates_that_only_join_have_layouts(template: str) -> None:
    assert layout(template, S, U, A) is not None


@pytest.mark.drawn(keep=6)
@pytest.mark.parametrize(
    "looks",
    [
        "{% if m.content in 'abc' %}!{% endif %}",
        "{% if m.content | length > 1 %}!{% endif %}",
        "{% if m.content[0] == 'b' %}!{% endif %}",
        "{{ m.content | upper }}",
        "{% if 'b' in m.role + m.content %}!{% endif %}",
        "{% if m.content.startswith(m.content) %}!{% endif %}",
        "{{ 'x'.join([m.content]) }}",
        "{{ {'b': 1}[m.content] }}",
        "{{ m.content[:-1] }}",
        "{{ ('a' + m.content)[:-1] }}",
        "{{ ('a' + m.content)[1:2] }}",
        "{{ ('a' + m.content) | tojson }}",
        "{{ [m.content] | tojson(indent=1) }}",
        "{{ m.content.split() | length }}",
        "{{ m.content.replace(m.role, 'x', 1).upper() }}",
        "{{ 'abcbu'.replace(m.content, '!') }}",
        "{% if 'abc' is eq(m.content) or m.content is lt('b') %}!{% endif %}",
        "{% for m in messages | selectattr('content', 'in', 'abc') %}!{% endfor %}",
        "{% if 1 < 2 in [m.content == 'b'] %}!{% endif %}",
        "{% set x = m.content ~ '' %}{% if x | upper == 'B' %}!{% endif %}",
        "{% set x %}{{ m.content }}{% endset %}{% if x | length == 1 %}!{% endif %}",
        "{% set x | upper %}{{ m.content }}{% endset %}{{ x }}",
        "{% filter upper %}{{ m.content }}{% endfilter %}",
        "{% macro f() %}{{ caller() | upper }}{% endmacro %}{% call f() %}{{ m.content }}{% endcall %}",
        "{% macro f(x) %}{{ x }}{% endmacro %}{% if f(m.content) < 'b' %}!{% endif %}",
        "{% set x = '%s' % (m.content,) %}{% if x == 'b' %}!{% endif %}",
    ],
)
def test_a_template_that_looks_into_contents_has_none(
    looks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = "{% if message.role == 'user' %}" + looks.replace("m.", "message.") + "{% endif %}"
    template = CHATML.replace("%}{{", "%}" + looks + "{{", 1)
    assert layout(template, U, A) is None
    tokenizer = chatty(template)
    chats = [turns((U, text), (A, "yes")) for text in ("b", "c", "bb", "abc", " b ")] * 5
    check_alike(tokenizer, chats, monkeypatch)


@pytest.mark.drawn(keep=5)
@pytest.mark.parametrize(
    "asks",
    [
        "{% if 'z' in m.content %}!{% endif %}",
        "{% if m.content == 'z' %}!{% endif %}",
        "{% if m.content in ['z', 'c'] %}!{% endif %}",
        "{% if 'zxz' is eq(m.content) or m.content == m.role or not m.content != 'z' %}!{% endif %}",
        "{% set x = m.role ~ (m.content ~ '') %}{{ x }}{% if 'z' not in m.content %}!{% endif %}",
        "{% set x %}{{ m.content }}{% endset %}{% if x == 'z' %}!{% endif %}",
        "{% macro f(x) %}{{ x }}{% endmacro %}{% if f(m.content) == 'z' %}!{% endif %}",
        "{% if messages | selectattr('content', 'equalto', 'z') | list %}!{% endif %}",
        "{{ m.content.split('z') | last }}.{{ m.content.replace('z', '?') }}.",
        "{% if 'z' not in m.content | trim %}!{% endif %}",
        "{% if m.content.startswith('z') %}!{% endif %}",
        "{% if m.content.endswith('z') or m.content.startswith('z') %}!{% endif %}",
        "{{ m.content.strip('z') }}",
        "{{ m.content.lstrip('z') }}",
        "{{ m.content.rstrip('z') }}",
        "{% if m.role == 'assistant' %}{{ '\n' + '<z>'.strip('<') + m.content }}{% endif %}",
    ],
)
def test_a_template_may_ask_what_contents_hold(asks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chats for which the answer is no have a layout, the others are rendered."""
    template = CHATML.replace("%}{{", "%}" + asks.replace("m.", "message.") + "{{", 1)
    tokenizer = chatty(template)
    said = ("z", "c", "zz", "azc", "xz", "zx", " z ", "\nz", "x y")
    chats = [turns((U, text), (U, other)) for text in said for other in said]
    check_alike(tokenizer, chats, monkeypatch)
    found = layout(template, U, U)
    assert found is not None
    assert bool(found.asked) == ("strip('<')" not in asks)


@pytest.mark.parametrize(
    "writes",
    [
        "{{ m.content | tojson }}",
        "{{ {'a': [m.content, m.role], 'é': 1} | tojson }}",
        "{{ ({'a': m.content} | tojson)[1:-1] }}",
        "{{ (' ' + m.content) | trim }}.{{ (m.content + ' x ').rstrip() }}",
        "{{ (m.content + '\n' + m.content).strip() + '.' + m.content.lstrip().rstrip() }}.",
        "{{ m.content.text }}{% if m.content is string and m.content is iterable %}!{% endif %}",
    ],
)
def test_a_template_may_join_trim_and_write_json(
    writes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = CHATML.replace("%}{{", "%}" + writes.replace("m.", "message.") + "{{", 1)
    said = ("z", ' "a"', "\n\t b \\", "é🔥 ", " x y ")
    chats = [turns((U, text), (U, other)) for text in said for other in said]
    check_alike(chatty(template), chats, monkeypatch)
    assert layout(template, U, U) is not None


def test_what_qwen_writes_before_an_answer_is_trained_with_it(
    test_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its template asks for thoughts, and writes empty ones between the prompt and the answer."""
    tokenizer = real_tokenizer(test_data / "tokenizers" / "hf_qwen3")
    shape = tuple((role, True, ()) for role in (U, A, U, A))
    found = layout_of(tokenizer.chat_format, shape, 0)
    assert found is not None
    assert {question for question, _, _ in found.asked} == {"startswith", "__contains__", "lstrip"}
    said = ("yes", "<think>\nhm\n</think>\n\nyes", "\n\nyes", "</think>", "<tool_response>a")
    chats = [turns((U, one), (A, other), (U, other), (A, one)) for one in said for other in said]
    check_alike(tokenizer, chats, monkeypatch)


def test_a_special_token_that_a_content_completes_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What splits a rendered chat cannot know who wrote half of a token."""
    template = CHATML.replace("{% for", "{% if messages %}<|im_{% endif %}{% for", 1)
    template = template.replace("'<|im_start|>' + message['role']", "message['role'] + '<|im_'", 1)
    template = template.replace("'\n' + message['content'] | trim", "message['content']", 1)
    chats = [turns((U, text), (U, "b")) for text in ("end|>", "start|>a", "x")] * 10
    check_alike(chatty(template), chats, monkeypatch)


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": U, "content": "a", "name": " "}],
        [{"role": U, "content": "a", "weight": {1: 2}}],
        [{"content": "a", "role": U, "name": "b"}],
        [{"role": U, "name": "b"}],
        [{"role": U, "content": [{"type": "text", "text": "a"}]}],
        turns((U, "a"), (A, "")),
        turns((U, " \n"), (A, "b")),
    ],
)
def test_chats_without_a_shape(messages: Talk) -> None:
    assert shape_of(messages) is None


def test_a_layout_is_found_again_when_the_template_tells_another_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Layouts outlive a batch, and a template may write the day."""
    tokenizer = chatty("{{ strftime_now('%d %b') }} " + CHATML)
    chats = [turns((U, "a"), (A, "b"))] * 3

    def texts() -> list[str]:
        ids, _, lengths = encode_chats(tokenizer, list(map(Chat, chats)), tokenizer.encode_batch)
        ends = lengths.cumsum().tolist()
        return [
            tokenizer.decode(ids[end - length : end])
            for end, length in zip(ends, lengths.tolist(), strict=True)
        ]

    for day in ("24 Nov", "25 Nov"):
        for module in (layouts, render):
            monkeypatch.setattr(module, "time_now", lambda _, day=day: day)
        render._compiled.cache_clear()
        watch._watched_template.cache_clear()
        assert all(text.startswith(day) for text in texts())
