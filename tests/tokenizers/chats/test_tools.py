"""Chats with tool calls, and templates that fold the system prompt into a question, laid out without
rendering: the same ids and masks as rendered one by one.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.base.errors import WrongInput
from ingot.tokenizers.chats.chat import Chat, tool
from ingot.tokenizers.chats.encode import encode_chats, encode_trained
from ingot.tokenizers.chats.layouts import ChatLayouts, layout_of
from ingot.tokenizers.chats.shapes import shape_of
from ingot.tokenizers.tokenizer import Tokenizer
from tests.tokenizers.chats.test_layouts import check_alike
from tests.tokenizers.chats.test_masks import A, S, Talk, U, bracketed, turns
from tests.tokenizers.small import CHATML, chatty

IN_TURN = (
    "{% if messages[0].role == 'system' %}{% set before, talk = messages[0].content ~ '\n\n',"
    " messages[1:] %}{% else %}{% set before, talk = '', messages %}{% endif %}{% set turn ="
    " namespace(count=0) %}{% for m in talk if m.role != 'tool' and not m.tool_calls %}{% if"
    " (m.role == 'user') != (turn.count % 2 == 0) %}{{ raise_exception('speak in turn') }}{% endif"
    " %}{% set turn.count = turn.count + 1 %}{% endfor %}{{ bos_token }}{% for m in talk %}{% if"
    " m.role == 'user' %}[ASK] {{ (before if loop.first else '') + m.content }} [/ASK]{% elif"
    " m.tool_calls %}[CALL] [{% for call in m.tool_calls %}{% set text = call.function | tojson"
    " %}{% if call.id | length != 9 %}{{ raise_exception('nine characters') }}{% endif %}{{"
    " text[:-1] + ', \"id\": \"' + call.id + '\"}' }}{% if not loop.last %}, {% endif %}{% endfor"
    " %}]{{ eos_token }}{% elif m.role == 'tool' %}[RESULT] {{ {'content': m.content} | tojson"
    " }}[/RESULT]{% else %} {{ m.content | trim }}{{ eos_token }}{% endif %}{% endfor %}"
)
LAST_QUESTION = IN_TURN.replace("before if loop.first", "before if loop.last")
FOLDED = IN_TURN.replace(
    "[ASK] {{ (before if loop.first else '') + m.content }} [/ASK]",
    "{% set text = 'SYS: ' ~ before ~ '.\n' + m.content if loop.first else m.content %}"
    "{{ '[ASK] ' + text.strip() + ' [/ASK]' }}",
)
CALLS = (
    "{% macro said(text) %}{{ text | trim }}{% endmacro %}{% if tools %}{{ '<|im_start|>tools\n' }}"
    "{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>'"
    " + m.role + '\n' }}{{ said(m.content) }}{% for call in m.get('tool_calls', []) %}"
    '<call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments if'
    " call.function.arguments is string else call.function.arguments | tojson }}}</call>{% endfor"
    " %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%"
    " endif %}"
)
NO_END = CALLS.replace("<|im_end|>\n{% endfor %}{% if add", "\n{% endfor %}{% if add").replace(
    "\n' }}{{ said(", "\n' + ('<think></think>' if m.role == 'assistant' else '') }}{{ said("
)
JSON_RESULTS = CALLS.replace(
    "{{ said(m.content) }}", "{{ m.content | tojson if m.role == 'tool' else said(m.content) }}"
)
TEMPLATES = {
    "in turn": IN_TURN,
    "last question": LAST_QUESTION,
    "folded": FOLDED,
    "calls": CALLS,
    "no end": NO_END,
    "json results": JSON_RESULTS,
}
TOKENIZERS = {name: chatty(template) for name, template in TEMPLATES.items()}


def call(name: str, arguments: Any, identity: str = "abcdefgh1") -> dict[str, Any]:
    about = {"name": name, "arguments": arguments}
    return {"id": identity, "type": "function", "function": about}


def calling(content: str, *calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": A, "content": content, "tool_calls": list(calls)}


def told(content: str, identity: str = "abcdefgh1") -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": identity}


TOOLS: Talk = [
    *turns((S, "melt"), (U, "ask")),
    calling("", call("f", {"a": [1, "é"]}), call("g", '{"b": null}')),
    told('{"c": 2}'),
    *turns((A, "so"), (U, "and?"), (A, "thus")),
]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("begin", [0, 1])
def test_they_are_not_rendered_one_by_one(name: str, begin: int) -> None:
    for chat in (turns((S, "a"), (U, "b"), (A, "c"), (U, "d"), (A, "e")), TOOLS):
        found = shape_of(chat[begin:])
        assert found is not None
        layout = layout_of(TOKENIZERS[name].chat_format, found[0], 0)
        # Only as long as it is the last one, a question has the system prompt.
        assert (layout is None) == (name == "last question" and not begin)


def test_what_is_trained_of_a_call_without_a_prompt() -> None:
    """The call with its end; what the tool tells is not."""
    assert bracketed(TOKENIZERS["in turn"], TOOLS) == (
        "<|begin_of_text|>[ASK] melt\n\nask [/ASK]⟦[CALL]"
        ' [{"name": "f", "arguments": {"a": [1, "é"]}, "id": "abcdefgh1"}, {"name": "g",'
        ' "arguments": {"b": null}, "id": "abcdefgh1"}]<|end_of_text|>⟧[RESULT] {"content":'
        ' "{\\"c\\": 2}"}[/RESULT]⟦ so<|end_of_text|>⟧[ASK] and? [/ASK]⟦ thus<|end_of_text|>⟧'
    )


def test_a_header_before_a_call_is_not_trained() -> None:
    """Without a prompt it is what the template writes between the last thing said and an answer."""
    text = bracketed(chatty(CALLS.partition("{% if add")[0]), TOOLS)
    assert text == bracketed(TOKENIZERS["calls"], TOOLS)
    assert '<|im_start|>assistant\n⟦<call>{"name": "f", "arguments": {"a": [1, "é"]}}' in text


BITS = ["a", "b ", " c", "\n", "\t", '"', "\\", "é", "🔥", "[/ASK]", " [/ASK] ", "<|", "im_end|>"]
BITS += ["<think>", ">>\n", "</call>", "<|im_end|>", "assistant\n", "{}", "\U00100011"]
TEXT = st.lists(st.sampled_from(BITS), max_size=4).map("".join)
ARGUMENTS = st.dictionaries(
    st.sampled_from("ab"), TEXT | st.none() | st.integers() | st.lists(TEXT, max_size=1), max_size=2
)
CALL = st.builds(
    call,
    st.sampled_from(["f", "gé", "<|im_end|>"]),
    ARGUMENTS | ARGUMENTS.map(json.dumps),
    st.sampled_from(["abcdefgh1", "abcdefgh2", "short"]),
)
CALLING = st.builds(calling, st.just("") | TEXT, CALL) | st.builds(calling, TEXT, CALL, CALL)


FUNCTIONS = [
    [tool({"name": "f", "description": "[/ASK] <|im_end|>\n"})],
    [tool({"name": "f", "parameters": {"properties": {"<|im_end|>": {"type": "é"}}}})] * 2,
]


@st.composite
def talks(draw: st.DrawFn) -> Chat:
    """A chat in which each of few shapes is likely."""
    chat = turns((S, draw(TEXT))) if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 2))):
        chat.append({"role": U, "content": draw(TEXT)})
        if draw(st.booleans()):
            chat += [draw(CALLING), told(draw(TEXT))]
        chat.append({"role": A, "content": draw(TEXT)})
    return Chat(chat, draw(st.sampled_from([None, *FUNCTIONS])))


@given(st.lists(talks(), min_size=1, max_size=4), st.sampled_from(list(TEMPLATES)))
def test_any_chats(chats: list[Chat], name: str) -> None:
    tokenizer, kept = TOKENIZERS[name], list[Chat]()
    for chat in chats:
        try:
            # A shape has a layout from its second chat on.
            encode_trained(tokenizer, [chat, chat], tokenizer.encode_batch)
        except WrongInput:
            continue
        kept.append(chat)
    for firsts in (None, [len(chat) // 2 for chat in kept]):
        found = encode_trained(tokenizer, kept, tokenizer.encode_batch, firsts)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(ChatLayouts, "find", lambda *_: None)
            wanted = encode_trained(tokenizer, kept, tokenizer.encode_batch, firsts)
        for name in ("ids", "mask", "lengths", "counts"):
            assert getattr(found, name).tolist() == getattr(wanted, name).tolist()


@pytest.mark.parametrize("functions", FUNCTIONS)
def test_tools_are_trained_on_as_they_are_served(functions: list[dict[str, Any]]) -> None:
    """Each answer follows the prompt that a server makes; what a tool is named makes no special
    token. From the second chat on they are laid out, those without tools, too.
    """
    tokenizer, talk = TOKENIZERS["calls"], TOOLS[:5]
    chats = [Chat(talk, functions), Chat(talk)] * 3
    found = encode_trained(tokenizer, chats, tokenizer.encode_batch)
    assert found.rendered < len(chats) or "<|im_end|>" in str(functions)
    ends = np.cumsum(found.lengths)
    for chat, ids in zip(chats, np.split(found.ids, ends[:-1]), strict=True):
        for count in (2, 4):
            prompt = tokenizer.encode_chat(talk[:count], chat.tools)
            assert ids[: len(prompt)].tolist() == prompt
        specials = [token for token in ids if token == tokenizer.special_ids["<|im_end|>"]]
        assert len(specials) == len(talk) + (chat.tools is not None)


def test_a_template_that_writes_no_tools_refuses_them() -> None:
    """A server refuses them as well."""
    tokenizer = TOKENIZERS["in turn"]
    with pytest.raises(WrongInput, match="knows no tools"):
        encode_chats(tokenizer, [Chat(TOOLS, FUNCTIONS[0])], tokenizer.encode_batch)


TEXT_ALONE = CALLS.replace(
    "{{ call.function.arguments if call.function.arguments is string else call.function.arguments"
    " | tojson }}",
    "{{ '' + call.function.arguments }}",
)
WRITTEN = CALLS.replace("call.function.arguments if call.function.arguments is string else ", "")


@pytest.mark.parametrize("template", [CALLS, TEXT_ALONE, WRITTEN])
def test_arguments_are_written_once(template: str) -> None:
    """OpenAI's format has them as JSON, which most templates would write as JSON again."""
    given: list[Any] = [{"a": [1, "é"]}, '{"a": [1,"é"]}']
    tokenizer = chatty(template)
    texts = {
        bracketed(tokenizer, [*turns((U, "x")), calling("", call("f", arguments))])
        for arguments in given
    }
    served = tokenizer.encode_chat([*turns((U, "x")), calling("", call("f", given[0]))])
    (text,) = texts
    for one in (text, tokenizer.decode(served)):
        assert '"arguments": {"a": [1, "é"]}}' in one


def test_a_length_that_a_template_checks_is_that_of_each_chat() -> None:
    tokenizer = TOKENIZERS["in turn"]
    chats = [
        [
            *turns((U, "ask")),
            calling("", call("f", {"a": 1}, identity)),
            told("x"),
            *turns((A, "b")),
        ]
        for identity in ("abcdefgh1", "abcdefgh2", "abcdefgh3", "short")
    ]
    encode_chats(tokenizer, list(map(Chat, chats[:3])), tokenizer.encode_batch)
    with pytest.raises(WrongInput, match="nine characters"):
        encode_chats(tokenizer, list(map(Chat, chats)), tokenizer.encode_batch)


@pytest.mark.parametrize(
    "template", [CALLS, CALLS.replace("said(m.content)", "[m.content, 1] | tojson")]
)
def test_json_may_make_a_special_token_of_what_is_none(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = dict(chatty(template).files)
    state = json.loads(str(files["tokenizer.json"]))
    token = {**state["added_tokens"][-1], "id": 302, "content": ", 1]"}
    files["tokenizer.json"] = json.dumps({**state, "added_tokens": [*state["added_tokens"], token]})
    tokenizer = Tokenizer(files)
    arguments = [{"a": text} for text in "bcd"] + [{"a": [text, 1]} for text in "bcd"]
    chats = [[*turns((U, "x")), calling("", call("f", given))] for given in arguments]
    check_alike(tokenizer, chats * 10, monkeypatch)


def test_whether_a_template_writes_calls() -> None:
    for template in (IN_TURN, CALLS, JSON_RESULTS):
        assert chatty(template).chat_format.writes_calls
    told = "{% if tools %}{% for m in messages %}{{ m.tool_calls }}{% endfor %}{% endif %}"
    assert chatty(told).chat_format.writes_calls
    for template in (
        CHATML,
        CALLS.replace("{{ call.function.name }}", "").replace("arguments", "x"),
    ):
        assert not chatty(template).chat_format.writes_calls
