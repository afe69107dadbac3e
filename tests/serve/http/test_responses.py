"""`/v1/responses` through OpenAI's own client: as the chat it stands for, in events as whole, and
what is not supported refused in words.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from ingot.config.sections.deployment import Serve
from ingot.models.generation.request import CompletionChunk
from ingot.serve.http.middleware import ServerMetrics
from ingot.serve.http.responsebody import ResponsesBody
from ingot.serve.http.responses import ResponseWriter
from ingot.serve.http.service import Service
from ingot.serve.native.engine import ServingEngine
from ingot.serve.native.model import load
from tests.serve.http.test_tools import WEATHER

TOOLS: Any = [{"type": "function", "name": "weather", "parameters": WEATHER}]
LONG: dict[str, Any] = {"model": "tiny", "max_output_tokens": 400, "extra_body": {"seed": 3}}
SHORT: dict[str, Any] = {"model": "tiny", "temperature": 0.0, "max_output_tokens": 6}
WHOLE: list[Any] = [{"role": "user", "content": "rain?"}]


def told(response: Any) -> list[Any]:
    """The items of a response, without what is new in each."""
    return [
        (item.type, item.status, item.content[0].text)
        if item.type == "message"
        else (item.type, item.status, item.name, item.arguments)
        for item in response.output
    ]


def test_it_answers_as_the_chat_it_stands_for(tool_client: openai.OpenAI) -> None:
    """Also where a conversation goes on with the items that a response has given."""
    first = tool_client.responses.create(
        input="rain?", instructions="be brief", metadata={"a": "b"}, **SHORT
    )
    system = {"role": "system", "content": "be brief"}
    chat = tool_client.chat.completions.create(
        messages=[system, *WHOLE], model="tiny", temperature=0, max_tokens=6
    )
    assert (first.output_text, first.store) == (chat.choices[0].message.content, False)
    assert (first.status, first.incomplete_details and first.incomplete_details.reason) == (
        "incomplete",
        "max_output_tokens",
    )
    assert first.usage is not None
    assert chat.usage is not None
    assert (first.usage.input_tokens, first.usage.output_tokens, first.usage.total_tokens) == (
        chat.usage.prompt_tokens,
        6,
        chat.usage.total_tokens,
    )
    assert (first.instructions, first.metadata, first.temperature) == ("be brief", {"a": "b"}, 0)
    more: list[Any] = [
        *WHOLE,
        *first.output,
        {"role": "user", "content": [{"type": "input_text", "text": "sun?"}]},
    ]
    later = tool_client.responses.create(input=more, **SHORT)
    says = {"role": "assistant", "content": first.output_text}
    messages: list[Any] = [*WHOLE, says, {"role": "user", "content": "sun?"}]
    chat = tool_client.chat.completions.create(
        messages=messages, model="tiny", temperature=0, max_tokens=6
    )
    assert later.output_text == chat.choices[0].message.content
    assert later.usage is not None
    assert chat.usage is not None
    assert later.usage.input_tokens == chat.usage.prompt_tokens


def test_the_events_of_a_text(tool_client: openai.OpenAI) -> None:
    whole = tool_client.responses.create(input="rain?", **SHORT)
    events = list(tool_client.responses.create(input="rain?", stream=True, **SHORT))
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * len(deltas),
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "incomplete",
    ]
    assert (len(deltas) > 1, "".join(deltas)) == (True, whole.output_text)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last: Any = events[-1]
    assert (told(last.response), last.response.usage) == (told(whole), whole.usage)
    assert len({event.response.id for event in events if hasattr(event, "response")}) == 1


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_a_call_and_its_answer(tool_client: openai.OpenAI, choice: Any) -> None:
    asked: dict[str, Any] = {"input": WHOLE, "tools": TOOLS, "tool_choice": choice, **LONG}
    asked["parallel_tool_calls"] = False
    answer = tool_client.responses.create(**asked)
    (call,) = answer.output
    assert (call.type, answer.status) == ("function_call", "completed")
    jsonschema.validate(json.loads(call.arguments), WEATHER)
    with tool_client.responses.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        assert told(stream.get_final_response()) == told(answer)
    assert kinds.count("response.function_call_arguments.delta") > 1
    assert kinds[-1] == "response.completed"
    gave = {"type": "function_call_output", "call_id": call.call_id, "output": "no rain"}
    later = tool_client.responses.create(
        input=[*WHOLE, call, gave], tools=TOOLS, tool_choice="none", **SHORT
    )
    wanted = {"name": call.name, "arguments": call.arguments}
    calls = [{"id": call.call_id, "type": "function", "function": wanted}]
    chat: list[Any] = [
        *WHOLE,
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": call.call_id, "content": "no rain"},
    ]
    same = tool_client.chat.completions.create(
        messages=chat, model="tiny", temperature=0, max_tokens=6
    )
    assert same.usage is not None
    assert later.usage is not None
    assert (later.output_text, later.usage.input_tokens) == (
        same.choices[0].message.content,
        same.usage.prompt_tokens,
    )


def test_a_piece_may_end_a_call_and_go_on_with_text_and_another(tool_folder: Path) -> None:
    """As tokens such as `}}\n` do."""
    loaded = load(tool_folder)
    engine = ServingEngine(loaded.worker(1), ServerMetrics(), max_batch=1, max_queue=1)
    service = Service("tiny", loaded, engine, Serve())
    body = ResponsesBody.model_validate({"input": "rain?", "tools": TOOLS})
    writer = ResponseWriter(service, body, body.chat(), 3)
    head = '<tool_call>{"name": "weather", "arguments": '
    pieces = [f'{head}{{"city": "Os', f'lo"}}}}</tool_call> or {head}{{"city', '": ""}}', " so"]
    events = writer.begin()
    for number, piece in enumerate(pieces, 1):
        finish: Any = "stop" if number == len(pieces) else None
        events += writer.push(CompletionChunk(piece, (), number, finish))
    items = [item.get("arguments") or item["content"][0]["text"] for item in writer._items]
    assert items == ['{"city": "Oslo"}', " or", '{"city": ""}', "so"]
    streamed: dict[str, str] = {}
    ended: list[str] = []
    for event in events:
        if event["type"].endswith(".delta"):
            assert event["item_id"] not in ended
            streamed[event["item_id"]] = streamed.get(event["item_id"], "") + event["delta"]
        elif event["type"] == "response.output_item.done":
            ended.append(event["item"]["id"])
    assert (list(streamed.values()), list(streamed)) == (items, ended)


def test_a_text_of_a_schema(tool_client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "name": "weather", "schema": WEATHER}
    answer = tool_client.responses.create(input="rain?", text={"format": form}, **LONG)
    jsonschema.validate(json.loads(answer.output_text), WEATHER)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"store": True}, "`store` is not supported by this server; nothing is stored here"),
        ({"previous_response_id": "resp_1"}, "send the conversation so far as `input` items"),
        ({"conversation": "conv_1"}, "nothing is stored here"),
        ({"background": True}, "set `stream`"),
        ({"truncation": "auto"}, "shorten it yourself"),
        ({"include": ["message.output_text.logprobs"]}, "/v1/chat/completions with `logprobs`"),
        ({"reasoning": {"effort": "low"}}, "`reasoning` is not supported"),
        ({"tools": [{"type": "web_search"}]}, "'web_search' is not run by this server"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "f"}}, "not in `tools`"),
        ({"tool_choice": {"type": "file_search"}}, "give one of auto, none, required"),
        ({"text": {"verbosity": "low"}}, "`verbosity` is not supported"),
        ({"extra_body": {"max_tokens": 3}}, "`max_output_tokens` in responses"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "nothing is stored here"),
        ({"input": [{"type": "reasoning", "id": "a"}]}, "'reasoning', which is not read"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "'input_image'"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "`arguments` is missing in an item"),
        ({"input": [{"role": "user", "content": "a", "output": "b"}]}, "does not belong to"),
        ({"input": []}, "at least 1 item"),
        ({"max_output_tokens": 9000}, "max_output_tokens 9000 is over this server's limit of 8000"),
    ],
)
def test_what_is_not_supported_is_refused(
    tool_client: openai.OpenAI, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        tool_client.responses.create(**{"input": "rain?", **SHORT, **changes})
    assert words in str(caught.value)


def test_nothing_is_stored(tool_client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="not stored by this server"):
        tool_client.responses.retrieve("resp_1")
