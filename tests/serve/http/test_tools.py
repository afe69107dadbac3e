"""Tools in chats, through OpenAI's own client: what is forced fits the function's schema, streams
say the same once, and what clients send back is read.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
import torch
from pydantic import ValidationError

from ingot.models.generation.request import Request
from ingot.models.generation.sampling import Sampling
from ingot.serve.http.chat import ChatBody
from ingot.serve.native.grammar import JSONGrammars, call_grammar, functions_of
from ingot.serve.native.model import load
from ingot.serve.native.toolcalls import FORMATS, ToolCallParser
from ingot.tokenizers.load import load_tokenizer

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"$ref": "#/$defs/city"},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Oslo", "Zürich"]}},
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now", "description": "The time."}},
]
UNTYPED: Any = {
    "type": "function",
    "function": {"name": "untyped", "parameters": {"properties": {"a": {"type": "integer"}}}},
}
ASKED: list[Any] = [{"role": "user", "content": "rain?"}]
OPTIONS: dict[str, Any] = {"model": "tiny", "max_tokens": 400, "tools": TOOLS, "seed": 3}


@pytest.mark.drawn("calls and formats")
def test_forced_calls_fit_and_stream_alike(tool_client: openai.OpenAI) -> None:
    choice: Any
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        answer = tool_client.chat.completions.create(
            messages=ASKED, tool_choice=choice, parallel_tool_calls=False, **OPTIONS
        )
        (said,) = answer.choices
        assert (said.finish_reason, said.message.content) == ("tool_calls", None)
        (call,) = said.message.tool_calls or []
        assert call.type == "function"
        arguments = json.loads(call.function.arguments)
        if choice != "required" or call.function.name == "weather":
            assert call.function.name == "weather"
            jsonschema.validate(arguments, WEATHER)
        else:
            assert (call.function.name, arguments) == ("now", {})
        with tool_client.chat.completions.stream(
            messages=ASKED, tool_choice=choice, parallel_tool_calls=False, **OPTIONS
        ) as stream:
            pieces = sum(event.type == "tool_calls.function.arguments.delta" for event in stream)
            (streamed,) = stream.get_final_completion().choices
        (again,) = streamed.message.tool_calls or []
        assert (again.function.name, again.function.arguments) == (
            call.function.name,
            call.function.arguments,
        )
        assert pieces > 1 or call.function.name == "now"
        assert (again.id != "", streamed.finish_reason) == (True, "tool_calls")
    assert answer.usage is not None
    plain = tool_client.chat.completions.create(messages=ASKED, model="tiny", max_tokens=1)
    assert plain.usage is not None
    assert answer.usage.prompt_tokens > plain.usage.prompt_tokens + 50, "tools are in the prompt"
    back: list[Any] = [
        *ASKED,
        said.message,
        {"role": "tool", "tool_call_id": call.id, "content": "no rain"},
    ]
    later = tool_client.chat.completions.create(messages=back, tool_choice="none", **OPTIONS)
    assert (later.choices[0].message.tool_calls, bool(later.choices[0].message.content)) == (
        None,
        True,
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"tool_choice": {"type": "function", "function": {"name": "g"}}},
            "asks for the tool `g`, which is not in `tools`",
        ),
        ({"tool_choice": "required", "tools": []}, "not in `tools`"),
        ({"tool_choice": "some"}, "give one of auto, none, required"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "same name `weather`"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
            "the schema of response_format cannot be followed",
        ),
        (
            {"messages": [*ASKED, {"role": "tool", "tool_call_id": "b", "content": "no"}]},
            "`messages.1.tool_call_id` is 'b', and no message before it makes a call of that id",
        ),
        ({"tools": [{"type": "code_interpreter"}]}, "tools.0.type"),
        (
            {
                "messages": [
                    {"role": "user", "content": "a", "tool_calls": []},
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}],
                    },
                ]
            },
            "text of a JSON object",
        ),
        ({"messages": [{"role": "user", "content": "a", "tool_call_id": "b"}]}, "role tool"),
        (
            {
                "tool_choice": "required",
                "tools": [
                    TOOLS[0],
                    {
                        "type": "function",
                        "function": {
                            "name": "f",
                            "parameters": {"properties": {"a": {"type": "nonsense"}}},
                        },
                    },
                ],
            },
            "the schema of `parameters` of the tool `f` cannot be followed (Invalid type: nonsense);",
        ),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}
                ]
            },
            "`tools.0.function.parameters`: is of type 'array', but the arguments of a function are",
        ),
    ],
)
def test_what_cannot_be_right_is_refused(
    tool_client: openai.OpenAI, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        tool_client.chat.completions.create(**{"messages": ASKED, **OPTIONS, **changes})
    assert words in str(caught.value)


@pytest.mark.parametrize(("levels", "fits"), [(100, True), (101, False), (940, False)])
def test_what_a_template_writes_is_nested_as_deep_as_can_be_walked(levels: int, fits: bool) -> None:
    """Deeper, and the walk through it would be an error of the server's."""
    nested: Any = {}
    for _ in range(levels - 1):
        nested = {"a": nested}
    asked = {"role": "user", "content": "a"}
    call = {"function": {"name": "f", "arguments": json.dumps(nested)}}
    function = {"name": "f", "parameters": nested}
    for body in (
        {"messages": [asked, {"role": "assistant", "content": "", "tool_calls": [call]}]},
        {"messages": [asked], "tools": [{"type": "function", "function": function}]},
        {"messages": [asked], "chat_template_kwargs": nested},
    ):
        with contextlib.nullcontext() if fits else pytest.raises(ValueError, match="levels deep"):
            ChatBody.model_validate(body)


def test_arguments_that_are_too_deep_to_be_read_are_told_as_that() -> None:
    deep = '{"a":' * 50_000 + "1" + "}" * 50_000
    call = {"function": {"name": "f", "arguments": deep}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    with pytest.raises(ValueError, match="levels deep"):
        ChatBody.model_validate({"messages": [{"role": "user", "content": "a"}, said]})


def test_a_chat_goes_on_behind_any_arguments_that_a_model_wrote() -> None:
    """A half of a surrogate pair is no character, and an empty text no arguments."""

    def read(arguments: str) -> Any:
        call = {"index": 0.0, "function": {"name": "f", "arguments": arguments}}
        asked = [*ASKED, {"role": "assistant", "tool_calls": [call]}]
        message = ChatBody.model_validate({"messages": asked}).messages[1].template_message()
        return message["tool_calls"][0]["function"]["arguments"]

    assert read(r'{"a\ud83d": ["\ud83d\ude00", "\ude00é"]}') == {"a\ufffd": ["😀", "\ufffdé"]}
    assert read("") == read(" \n") == read("{}") == {}
    for wrong in ("null", "[]", "{"):
        with pytest.raises(ValidationError, match="text of a JSON object"):
            read(wrong)


def test_a_schema_of_half_a_character_is_refused() -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["\ud83d"]}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    with pytest.raises(ValidationError, match="half of a surrogate pair"):
        ChatBody.model_validate({"messages": ASKED, "tools": [tool]})


def test_arguments_of_the_template_and_thoughts_reach_it(
    tool_client: openai.OpenAI, tool_folder: Path
) -> None:
    """The prompt is what the tokenizer makes of them, and without them it is another one."""
    chat: list[Any] = [
        *ASKED,
        {"role": "assistant", "content": "a", "reasoning_content": "clouds"},
        *ASKED,
    ]
    tokenizer, lengths = load_tokenizer(tool_folder), set[int]()
    for kwargs, messages in (
        ({"style": {"tone": "warmly"}}, chat),
        ({"style": None, "enable_thinking": False}, chat),
        ({}, [ASKED[0], {"role": "assistant", "content": "a"}, ASKED[0]]),
    ):
        answer = tool_client.chat.completions.create(
            messages=messages,
            model="tiny",
            max_tokens=1,
            extra_body={"chat_template_kwargs": kwargs},
        )
        assert answer.usage is not None
        asked = tokenizer.encode_chat(messages, None, kwargs)
        assert answer.usage.prompt_tokens == len(asked)
        lengths.add(len(asked))
    assert len(lengths) == 3


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"messages": []}, "`messages` is set by the request"),
        ({"add_generation_prompt": False}, "`add_generation_prompt` is set by the request"),
        ({"bos_token": "x"}, "`bos_token` is set by the request or the tokenizer"),
        ({"a b": 1}, "is no name that a template could ask for"),
        ({"a": "x" * 5000}, "up to 4,096 characters"),
        ({str(f"a{number}"): 1 for number in range(33)}, "up to 32 arguments"),
        ([1], "up to 32 arguments"),
    ],
)
def test_arguments_that_are_not_the_templates_own_are_refused(
    tool_client: openai.OpenAI, kwargs: Any, words: str
) -> None:
    with pytest.raises(openai.BadRequestError, match="chat_template_kwargs") as caught:
        tool_client.chat.completions.create(
            messages=ASKED, model="tiny", extra_body={"chat_template_kwargs": kwargs}
        )
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("form", "named", "written"),
    [
        ("hermes", False, '<tool_call>\n{"name": "weather", "arguments": %s}\n</tool_call>'),
        ("llama3_json", False, '{"name": "weather", "parameters": %s}'),
        ("mistral", False, '[TOOL_CALLS][{"name": "weather", "arguments": %s}]'),
        ("mistral", True, "[TOOL_CALLS]weather[ARGS]%s"),
    ],
)
@pytest.mark.parametrize("text", [False, True])
def test_grammars_hold_each_format(
    tool_folder: Path, form: str, named: bool, written: str, text: bool
) -> None:
    """Also where the model may answer with text and a function is strict; a `\x00` stands for a
    special token.
    """
    tokenizer = load_tokenizer(tool_folder)
    end = tokenizer.special.eos
    assert end is not None
    strict = [{"function": {**tool["function"], "strict": True}} for tool in TOOLS]
    grammar = call_grammar(
        FORMATS[form],
        functions_of(strict, strict=text),
        {"[TOOL_CALLS]": 0} if named else {},
        text=text,
        several=True,
        named=named,
    )
    start = JSONGrammars(tokenizer, tokenizer.vocab_size, [end]).calls(grammar, {})

    def fits(answer: str) -> bool:
        constraint = start.copy()
        ids = [0] * answer.startswith("\x00") + tokenizer.encode(answer.removeprefix("\x00"))
        for token in [*ids, end]:
            logits = torch.zeros(tokenizer.vocab_size)
            constraint.apply(logits)
            if logits[token] != 0:
                return False
            constraint.push(token)
        return True

    written = written.replace("[TOOL_CALLS]", "\x00") if named else written
    assert fits(written % '{"city": "Oslo", "days": 2}')
    assert not fits(written % '{"city": "Oslo", "days": 9}')
    assert not fits((written % "{}").replace("weather", "other"))
    assert fits("Some text.") == text


def test_arguments_are_an_object_also_where_a_schema_leaves_its_type_out(
    tool_client: openai.OpenAI,
) -> None:
    options = {**OPTIONS, "tools": [UNTYPED], "n": 12, "max_tokens": 60, "temperature": 1.5}
    answer = tool_client.chat.completions.create(
        messages=ASKED, tool_choice="required", parallel_tool_calls=False, **options
    )
    calls = [call for said in answer.choices for call in said.message.tool_calls or []]
    assert len(calls) > 6
    assert {call.function.arguments[0] for call in calls if call.type == "function"} == {"{"}


def test_a_forced_call_that_is_cut_is_no_text(tool_client: openai.OpenAI) -> None:
    for limit in (1, 5, 9):
        options = {**OPTIONS, "max_tokens": limit, "tool_choice": "required"}
        (said,) = tool_client.chat.completions.create(messages=ASKED, **options).choices
        assert (said.message.content or "", said.finish_reason) == ("", "length")
        stream = tool_client.chat.completions.create(messages=ASKED, stream=True, **options)
        assert not "".join(chunk.choices[0].delta.content or "" for chunk in stream)


def test_no_stop_string_counts_in_a_forced_call(tool_client: openai.OpenAI) -> None:
    options = {**OPTIONS, "tools": TOOLS[:1], "parallel_tool_calls": False}
    (said,) = tool_client.chat.completions.create(
        messages=ASKED, tool_choice="required", stop=["city", "{", "<"], **options
    ).choices
    (call,) = said.message.tool_calls or []
    assert call.type == "function"
    jsonschema.validate(json.loads(call.function.arguments), WEATHER)


@pytest.mark.drawn("calls and formats")
def test_an_answer_of_a_format_may_call_instead(tool_client: openai.OpenAI) -> None:
    """Random weights choose either."""
    word: Any = {"type": "object", "properties": {"w": {"enum": ["a", "b"]}}, "required": ["w"]}
    word["additionalProperties"] = False
    form: Any = {"type": "json_schema", "json_schema": {"name": "w", "schema": word}}
    strict = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}]
    options = {**OPTIONS, "tools": strict, "n": 16, "temperature": 1.5, "seed": 5}
    options["stop"] = ["days"]  # which occurs in calls alone, where it counts for nothing
    answer = tool_client.chat.completions.create(messages=ASKED, response_format=form, **options)
    kinds = set()
    for said in answer.choices:
        if said.finish_reason == "length":  # blanks between values may go on for ever
            continue
        for call in said.message.tool_calls or []:
            assert call.type == "function"
            jsonschema.validate(json.loads(call.function.arguments), WEATHER)
        if said.finish_reason == "stop":
            jsonschema.validate(json.loads(said.message.content or ""), word)
        else:
            assert not said.message.content
        kinds.add(said.finish_reason)
    assert kinds == {"stop", "tool_calls"}
    forced = tool_client.chat.completions.create(
        messages=ASKED, response_format=form, tool_choice="required", **options
    )
    assert {said.finish_reason for said in forced.choices} <= {"tool_calls", "length"}


@pytest.mark.parametrize("form", ["hermes", "llama3_json", "mistral"])
@pytest.mark.drawn
def test_what_any_model_is_forced_to_write_is_read(tool_folder: Path, form: str) -> None:
    """Random weights at a high temperature, several calls."""
    torch.set_num_threads(1)
    loaded = load(tool_folder)
    grammars = JSONGrammars(loaded.tokenizer, loaded.model.config.vocab_size, loaded.eos)
    schemas = functions_of(TOOLS, strict=False)
    grammar = call_grammar(FORMATS[form], schemas, {}, text=False, several=True, named=False)
    constraint = grammars.calls(grammar, schemas)
    prompt = loaded.tokenizer.encode_prompt("the")
    answers = loaded.generator(4).run(
        Request(prompt, 400, Sampling(1.5, seed=seed), constraint=constraint.copy())
        for seed in range(8)
    )
    ended = [answer for answer in answers if answer.finish == "stop"]
    assert len(ended) > 4
    for answer in ended:
        parser = ToolCallParser(FORMATS[form])
        text, calls = parser.push(answer.text)
        assert (text.strip(), parser.calls > 0) == ("", True)
        for call in calls:
            schema = WEATHER if call.name == "weather" else {"maxProperties": 0}
            jsonschema.validate(json.loads(call.arguments), schema)
