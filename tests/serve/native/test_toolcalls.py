"""Calls of tools in the text of answers: the families' formats, in pieces of any size."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ingot.base.errors import WrongInput
from ingot.models.generation.request import CompletionChunk, GeneratedToken, TextStream
from ingot.serve.native.toolcalls import (
    FORMATS,
    InsideCalls,
    MarkedText,
    ToolCallParser,
    tool_format,
)
from ingot.tokenizers.load import load_tokenizer

OSLO = '{"city": "Os}lo \\"{[ \\u00e9", "days": [1, {"a": null}]}'
Read = tuple[str, list[tuple[str, str]]]


def read(form: str, pieces: list[str], most: int | None = None) -> Read:
    """The text and the calls, put together as a client does."""
    parser = ToolCallParser(FORMATS[form], most=most)
    text, calls = "", list[tuple[str, str]]()
    ids = set()
    for said, deltas in [*(parser.push(piece) for piece in pieces), parser.finish()]:
        text += said
        for delta in deltas:
            if delta.name is not None:
                assert delta.index == len(calls)
                ids.add(delta.id)
                calls.append((delta.name, ""))
            name, before = calls[delta.index]
            calls[delta.index] = (name, before + delta.arguments)
    assert len(ids) == len(calls) == parser.calls
    return text, calls


CASES: list[tuple[str, str, Read]] = [
    (
        "hermes",
        f'<tool_call>\n{{"name": "f", "arguments": {OSLO}}}\n</tool_call>',
        ("", [("f", OSLO)]),
    ),
    (
        "hermes",
        'I look.\n\n<tool_call>\n{"arguments": {"a": 1}, "name": "f"}\n</tool_call>\n'
        '<tool_call>{"name": "g", "arguments": {}}</tool_call>\n',
        ("I look.", [("f", '{"a": 1}'), ("g", "{}")]),
    ),
    ("hermes", "a <tool> < b\n", ("a <tool> < b\n", [])),
    ("hermes", "<tool_call>\nnothing of it", ("<tool_call>\nnothing of it", [])),
    ("hermes", '<tool_call>{"nam": 1}</tool_call>', None),  # type: ignore[list-item]
    ("hermes", "It ends with </tool_call>, not so", None),  # type: ignore[list-item]
    (
        "hermes",
        '<tool_call>{"name": "f"}</tool_call> and <tool_call>no</tool_call>',
        (" and <tool_call>no</tool_call>", [("f", "{}")]),
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a', ("", [("f", '{"a')])),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', ("", [("f", "{}")])),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{}"}', ("", [("f", "{}")])),
    (
        "llama3_json",
        f'{{"type": "function", "name": "f", "parameters": {OSLO}}}; '
        '{"name": "g", "parameters": {"a": 2}}',
        ("", [("f", OSLO), ("g", '{"a": 2}')]),
    ),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {}}', ("", [("f", "{}")])),
    ("llama3_json", '{"name": "Bob", "age": 3}', ('{"name": "Bob", "age": 3}', [])),
    ("llama3_json", 'Use {"name": "f", "parameters": {}}', None),  # type: ignore[list-item]
    (
        "mistral",
        f'[TOOL_CALLS] [{{"name": "f", "arguments": {OSLO}}}, {{"name": "g", "arguments": {{}}}}]',
        ("", [("f", OSLO), ("g", "{}")]),
    ),
    (
        "mistral",
        f'Well.[TOOL_CALLS]f[ARGS]{OSLO}[TOOL_CALLS]g{{"a": 1}}',
        ("Well.", [("f", OSLO), ("g", '{"a": 1}')]),
    ),
]


@pytest.mark.parametrize(("form", "text", "wanted"), CASES)
def test_calls_are_found_in_pieces_of_any_size(form: str, text: str, wanted: Read) -> None:
    wanted = wanted or (text, [])
    assert read(form, [text]) == wanted
    assert read(form, list(text)) == wanted
    for place in range(1, len(text), 3):
        assert read(form, [text[:place], text[place:]]) == wanted


def test_arguments_arrive_before_they_are_complete() -> None:
    parser = ToolCallParser(FORMATS["hermes"])
    parser.push('<tool_call>{"name": "f", "argu')
    _, (begun,) = parser.push('ments": {"a": "x')
    assert (begun.name, begun.arguments) == ("f", '{"a": "x')
    _, (more,) = parser.push("yz")
    assert (more.id, more.name, more.arguments) == (None, None, "yz")


def test_one_call_where_no_more_are_wanted() -> None:
    text = '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"a": 1}}'
    assert read("llama3_json", [text], most=1) == ("", [("f", "{}")])


@pytest.mark.parametrize("form", ["hermes", "llama3_json", "mistral"])
def test_what_is_left_of_a_forced_call_is_no_text(form: str) -> None:
    written = next(text for name, text, _ in CASES if name == form)
    for end in range(len(written)):
        parser = ToolCallParser(FORMATS[form], forced=True)
        said = [parser.push(letter)[0] for letter in written[:end]]
        assert not "".join([*said, parser.finish()[0]])


STOP = "zz"


@pytest.mark.parametrize(
    ("form", "text", "wanted"),
    [
        ("hermes", 'I zz <tool_call>{"a": "b"}</tool_call>', "I "),
        ("hermes", 'I <tool_call>{"a": "zz"}</tool_call> and zz.', -3),
        ("hermes", 'I <tool_call>{"a": "zz"}</tool_call><tool_call>{"zz": 1}</tool_call>', None),
        ("hermes", "z<tool_call>zz", None),
        ("llama3_json", ' {"name": "zz", "parameters": {"zz": 1}}; {"name": "zz"}', None),
        ("llama3_json", 'So: {"name": "zz"}', 'So: {"name": "'),
        ("llama3_json", "a<|python_tag|>zz", None),
        ("mistral", "a[TOOL_CALLS]f[ARGS]zz", None),
        ("mistral", "azz[TOOL_CALLS]", "a"),
    ],
)
@pytest.mark.parametrize("special", [False, True])
def test_no_stop_string_counts_in_a_call(
    form: str, text: str, wanted: str | int | None, special: bool
) -> None:
    """A token is a letter, or a marker whose text is left out of answers."""
    marker = FORMATS[form].opens
    ids = {0: marker} if special and form != "hermes" else {}
    tokens: list[int] = []
    for place, part in enumerate(text.split(marker) if ids else [text]):
        tokens += [0] * (place > 0) + [ord(letter) for letter in part]

    def decode(some: Sequence[int]) -> str:
        return "".join(chr(token) for token in some if token)

    stream = TextStream(decode, [], [STOP], InsideCalls(FORMATS[form], ids))
    said = ""
    for token in tokens:
        said += stream.push(token)
        if stream.stopped:
            break
    said += "" if stream.stopped else stream.finish()
    whole = text.replace(marker, "") if ids else text
    expected = whole if wanted is None else whole[:wanted] if isinstance(wanted, int) else wanted
    assert said == expected
    assert stream.length == len(said)


def test_ids_are_as_the_templates_want_them() -> None:
    assert len(FORMATS["mistral"].call_id()) == 9
    assert FORMATS["mistral"].call_id().isalnum()
    assert FORMATS["hermes"].call_id().startswith("call_")


def test_markers_that_decoding_leaves_out_stand_where_their_tokens_were() -> None:
    marked = MarkedText({7: "[TOOL_CALLS]"})
    parts = [
        CompletionChunk("We", (GeneratedToken(1, 0),), 1),
        CompletionChunk(
            "ll.f{", tuple(GeneratedToken(t, o) for t, o in ((2, 2), (7, 5), (3, 5))), 4
        ),
        CompletionChunk("}", (GeneratedToken(4, 7),), 5, "stop"),
    ]
    assert "".join(map(marked.push, parts)) == "Well.[TOOL_CALLS]f{}"


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ('{{ "<tool_call>" }} {"name": ..., "arguments": ...}', "hermes"),
        ("[AVAILABLE_TOOLS] ... [TOOL_CALLS]", "mistral"),
        ('{"name": function name, "parameters": ...} "parameters": ', "llama3_json"),
        ("<tool_call><function=f><parameter=a>", None),
        ("nothing", None),
    ],
)
def test_the_template_shows_the_format(template: str, name: str | None) -> None:
    if name is not None:
        assert tool_format(template, None).name == name
    else:
        with pytest.raises(WrongInput, match=r"set\s+serve\.tool_call_parser"):
            tool_format(template, None)
    assert tool_format(template, "mistral").name == "mistral"


@pytest.mark.parametrize(("name", "form"), [("hf_qwen3", "hermes"), ("hf_llama3_2", "llama3_json")])
def test_what_real_templates_write_is_read_back(name: str, form: str, test_data: Path) -> None:
    """A chat with a call, through the template and the parser."""
    tokenizer = load_tokenizer(test_data / "tokenizers" / name)
    found = tool_format(tokenizer.template or "", None)
    assert found.name == form
    tool: Any = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    call = {"name": "weather", "arguments": {"city": "<|im_end|> Zürich"}}
    asked = [{"role": "user", "content": "Rain?"}]
    answer = {"role": "assistant", "content": "", "tool_calls": [{"function": call}]}
    before = tokenizer.decode(tokenizer.encode_chat(asked, [tool]), skip_special=False)
    whole = tokenizer.decode(
        tokenizer.encode_chat([*asked, answer, {"role": "tool", "content": "no"}], [tool]),
        skip_special=False,
    )
    assert whole.startswith(before)
    written = whole.removeprefix(before)
    parser = ToolCallParser(found)
    _, (delta,) = parser.push(written)
    assert (delta.name, json.loads(delta.arguments)) == ("weather", call["arguments"])
