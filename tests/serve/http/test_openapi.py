"""What the server says of its bodies is what it does with them."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from pydantic import ValidationError

from ingot.config.sections.deployment import Serve
from ingot.serve.http.bodies import CompletionBody, RequestBody
from ingot.serve.http.chat import ChatBody
from ingot.serve.http.embeddings import EmbeddingBody
from ingot.serve.http.middleware import ServerMetrics
from ingot.serve.http.responsebody import ResponsesBody
from ingot.serve.http.service import Service
from ingot.serve.native.engine import ServingEngine
from ingot.serve.native.model import LoadedModel
from ingot.serve.server import create_app

CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
# As OpenAI's client dumps an answer, to send it back.
SAID_BACK = {
    "role": "assistant",
    "content": None,
    "refusal": None,
    "annotations": [],
    "audio": None,
    "function_call": None,
    "tool_calls": [CALL],
}
ASKED = {"role": "user", "content": "the"}


@pytest.mark.filterwarnings("error:Duplicate Operation ID")
def test_openapi_has_each_operation_once_and_what_is_read_and_answered(
    loaded: LoadedModel,
) -> None:
    metrics = ServerMetrics()
    engine = ServingEngine(loaded.worker(1), metrics, max_batch=1, max_queue=1)
    service = Service("tiny", loaded, engine, Serve())
    told = create_app(service, metrics, key=None, environ={}).openapi()
    operations = [each for path in told["paths"].values() for each in path.values()]
    names = [each["operationId"] for each in operations]
    assert len(names) == len(set(names))
    assert not any("422" in each["responses"] for each in operations)
    assert all("4XX" in each["responses"] for each in operations)
    text, ids = {"type": "string"}, {"type": "array", "items": {"type": "integer"}}
    fields = told["components"]["schemas"]["CompletionBody"]["properties"]
    null = {"type": "null"}
    assert fields["stop"]["anyOf"] == [text, {"type": "array", "items": text}, null]
    mixed = {"type": "array", "items": {"anyOf": [text, ids]}}
    assert fields["prompt"]["anyOf"] == [text, ids, mixed]


@pytest.mark.parametrize(
    ("kind", "fields", "taken"),
    [
        (ChatBody, {"messages": [ASKED, SAID_BACK]}, True),
        (ChatBody, {"messages": [{**ASKED, "annotations": [{}]}]}, False),
        (ChatBody, {"messages": None}, False),
        (ChatBody, {"metadata": {"a": "b"}, "user": "u", "store": False, "stop": None}, True),
        (ChatBody, {"store": True}, False),
        (ChatBody, {"modalities": ["text", "audio"]}, False),
        (ChatBody, {"max_tokens": 0}, False),
        (ChatBody, {"max_tokens": 2.0, "new_field": None}, True),
        (ChatBody, {"new_field": 1}, False),
        (
            CompletionBody,
            {"prompt": "the", "suffix": "", "best_of": 1, "stream_options": None},
            True,
        ),
        (CompletionBody, {"prompt": "the", "best_of": 2}, False),
        (EmbeddingBody, {"input": "the", "user": "u", "dimensions": None}, True),
        (ResponsesBody, {"input": "the", "truncation": "disabled", "prompt": None}, True),
        (ResponsesBody, {"input": "the", "prompt": {"id": "p"}}, False),
        (ResponsesBody, {"input": "the", "text": {"format": None, "verbosity": "medium"}}, True),
    ],
)
def test_a_body_is_taken_where_its_schema_says_so(
    kind: type[RequestBody], fields: dict[str, Any], taken: bool
) -> None:
    body = {"messages": [ASKED], **fields} if kind is ChatBody else fields
    try:
        kind.model_validate(body)
    except ValidationError:
        assert not taken
    else:
        assert taken
    valid = jsonschema.Draft202012Validator(kind.model_json_schema()).is_valid(body)
    assert valid == taken
