"""Bodies that are small and cost much: refused after little work, with a short answer. Work is
counted, not timed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.types import Message

from ingot.config.sections.deployment import Serve
from ingot.serve.http import errors
from ingot.serve.http.middleware import BodySizeLimit, ServerMetrics
from ingot.serve.http.service import Service
from ingot.serve.native.engine import ServingEngine
from ingot.serve.native.model import LoadedModel
from ingot.serve.server import create_app

MANY = 100_000
LONG = "x" * 100_000
SHORT_ANSWER = 1500


@pytest.fixture(scope="module")
def app(loaded: LoadedModel) -> Iterator[FastAPI]:
    metrics = ServerMetrics()
    engine = ServingEngine(loaded.worker(2), metrics, max_batch=2, max_queue=2)
    engine.start()
    service = Service("tiny", loaded, engine, Serve(max_body_bytes=10_000_000))
    yield create_app(service, metrics, key=None, environ={})
    engine.stop()


def post(app: FastAPI, path: str, body: Any, **headers: str) -> httpx.Response:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            return await client.post(path, json=body, headers=headers)

    return asyncio.run(send())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/predict", {"instances": [1] * MANY}),
        ("/predict", {"instances": [{"no": 1}] * MANY}),
        ("/predict", {"instances": ["a"], **{f"field{number}": 1 for number in range(MANY)}}),
        ("/predict", {"instances": ["a"], LONG: 1}),
        ("/v1/chat/completions", {"messages": [1] * MANY}),
        ("/v1/chat/completions", {"messages": [{"role": "user"}] * MANY}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [1] * MANY}]}),
        ("/v1/chat/completions", {"messages": [{"role": LONG, "content": "a"}]}),
        ("/v1/completions", {"prompt": [{}] * MANY}),
        ("/v1/completions", {"prompt": "a", "stop": LONG}),
    ],
)
def test_the_first_faults_are_told_and_no_more_are_looked_for(
    app: FastAPI, monkeypatch: pytest.MonkeyPatch, path: str, body: Any
) -> None:
    found: list[int] = []
    whole = errors.validation_error
    monkeypatch.setattr(
        errors, "validation_error", lambda faults: found.append(len(faults)) or whole(faults)
    )
    answer = post(app, path, body)
    assert answer.status_code == 400
    assert len(answer.content) < SHORT_ANSWER
    assert sum(found) <= 4, "each of them has cost time"


@pytest.mark.parametrize(
    ("path", "body"),
    [("/predict", {"instances": ["a"] * MANY}), ("/v1/completions", {"prompt": ["a"] * 5})],
)
def test_more_prompts_than_ever_fit_are_refused_before_they_are_encoded(
    app: FastAPI, monkeypatch: pytest.MonkeyPatch, path: str, body: Any
) -> None:
    encoded: list[str] = []
    monkeypatch.setattr(LoadedModel, "encode", lambda self, text: encoded.append(text) or [1])
    answer = post(app, path, body)
    assert (answer.status_code, encoded) == (400, [])
    assert "this server takes at most 4" in answer.json()["error"]["message"]


def test_long_names_are_not_echoed(app: FastAPI) -> None:
    answer = post(app, "/v1/completions", {"prompt": "a", "model": LONG})
    assert answer.status_code == 404
    assert len(answer.content) < SHORT_ANSWER
    assert len(post(app, f"/{LONG[:10_000]}", {}).content) < SHORT_ANSWER


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"role": "wizard", "content": "a"}, "'wizard' is not a role; it is one of system,"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "part 0 is of type 'image_url'; this model reads text",
        ),
    ],
)
def test_roles_and_parts_that_no_model_reads(
    app: FastAPI, message: dict[str, Any], says: str
) -> None:
    answer = post(app, "/v1/chat/completions", {"messages": [message]})
    assert answer.status_code == 400
    told = answer.json()["error"]["message"]
    assert says in told
    assert ";" not in told.replace(says, ""), "one fault, told once"


def through(limit: BodySizeLimit, headers: dict[str, str], first: Message) -> list[Message]:
    """What is answered to a client that sends `first` and then nothing."""
    sent: list[Message] = []
    coming = [first]

    async def receive() -> Message:
        if not coming:
            await asyncio.Event().wait()
        return coming.pop()

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }
    asyncio.run(limit(scope, receive, send))
    return sent


async def unreached(*_: object) -> None:
    pytest.fail("the request went through")


def test_a_body_that_never_ends_is_refused_in_time() -> None:
    limit = BodySizeLimit(unreached, 1000, timeout_s=0.05)
    half: Message = {"type": "http.request", "body": b"{", "more_body": True}
    answer = through(limit, {"content-length": "100"}, half)
    assert answer[0]["status"] == 408
    assert (b"connection", b"close") in answer[0]["headers"]


def test_two_lengths_of_one_body_are_refused() -> None:
    limit = BodySizeLimit(unreached, 1000)
    body: Message = {"type": "http.request", "body": b"{}", "more_body": False}
    both = {"content-length": "2", "transfer-encoding": "chunked"}
    assert through(limit, both, body)[0]["status"] == 400


def test_of_many_faults_the_first_are_told(app: FastAPI) -> None:
    answer = post(
        app, "/predict", {"instances": ["a"], **{f"f{n}{LONG[:200]}": 1 for n in range(50)}}
    )
    assert answer.status_code == 400
    assert len(answer.content) < SHORT_ANSWER
    assert answer.json()["error"]["message"].endswith("and 46 more faults")
