"""The API key, the limit on bodies, the bounded queue: what a stranger or a flood gets."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from ingot.config.sections.deployment import Serve
from ingot.serve.http.middleware import ServerMetrics
from ingot.serve.http.service import Service
from ingot.serve.native.engine import ServingEngine
from ingot.serve.native.model import LoadedModel
from ingot.serve.server import create_app
from tests.serve.conftest import AIP
from tests.serve.running import Running

LONG: dict[str, Any] = {"prompt": "the", "max_tokens": 8000, "temperature": 0, "stream": True}


@contextlib.contextmanager
def occupied(server: Running, count: int) -> Iterator[None]:
    """`count` endless requests that run or wait, until the block ends."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            client = stack.enter_context(server.client())
            # The answer begins at once, though nothing of it may come while the request waits.
            assert (
                stack.enter_context(client.stream("POST", "/v1/completions", json=LONG)).status_code
                == 200
            )
        server.wait_for("ingot_waiting", max(0, count - 1))
        yield
    server.wait_for("ingot_running", 0)


def test_the_key_is_asked_on_every_route_but_health(strict: Running) -> None:
    assert strict.key is not None
    with httpx.Client(base_url=strict.url) as stranger:
        for path in ("/health", AIP["AIP_HEALTH_ROUTE"]):
            assert stranger.get(path).json() == {"status": "ok", "model": "tiny"}
        for method, path in (
            ("GET", "/v1/models"),
            ("GET", "/metrics"),
            ("POST", "/v1/completions"),
            ("POST", "/v1/chat/completions"),
            ("POST", AIP["AIP_PREDICT_ROUTE"]),
            ("POST", "/health"),
            ("GET", "/openapi.json"),
            ("GET", "/nope"),
        ):
            response = stranger.request(method, path, json={} if method == "POST" else None)
            assert (response.status_code, response.json()["error"]["code"]) == (
                401,
                "invalid_api_key",
            ), path
            assert response.headers["WWW-Authenticate"] == "Bearer"
        for given in ("wrong", strict.key[:-1], strict.key + "x", "."):
            headers = {b"Authorization": b"Bearer " + given.encode()}
            assert stranger.get("/v1/models", headers=headers).status_code == 401
        assert (
            stranger.get("/v1/models", headers={b"Authorization": strict.key.encode()}).status_code
            == 401
        )
        assert (
            stranger.get(
                "/v1/models", headers={b"authorization": b"bearer " + strict.key.encode()}
            ).status_code
            == 200
        )


def test_a_wrong_key_reaches_the_client_as_its_own_error(strict: Running) -> None:
    with (
        openai.OpenAI(base_url=f"{strict.url}/v1", api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError, match="is wrong"),
    ):
        client.models.list()


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(
    ("size", "status"), [(3000, 200), (3001, 413), (30_000, 413), (3_000_000, 413)]
)
def test_bodies_over_the_limit(strict: Running, chunked: bool, size: int, status: int) -> None:
    frame = b'{"prompt": "the", "max_tokens": 1, "user": ""}'
    body = frame[:-2] + b"x" * (size - len(frame)) + frame[-2:]
    content = (
        iter([body[start : start + 1000] for start in range(0, size, 1000)]) if chunked else body
    )
    with strict.client() as client:
        try:
            response = client.post(
                "/v1/completions", content=content, headers={"Content-Type": "application/json"}
            )
        except httpx.TransportError:
            assert size > 16 * 3000, "only who sends far too much may find the connection closed"
            return
    assert response.status_code == status, response.text
    if status == 413:
        assert "limit of 3,000 bytes" in response.json()["error"]["message"]


def test_a_full_queue_answers_429_and_when_to_come_back(strict: Running) -> None:
    short = {**LONG, "max_tokens": 2, "stream": False}
    with strict.client() as client:
        with occupied(strict, 3):
            response = client.post("/v1/completions", json=short)
            assert response.status_code == 429
            assert response.json()["error"] == {
                "message": (
                    "3 requests are running or waiting, 3 fit; try again in"
                    f" {response.headers['Retry-After']} s"
                ),
                "type": "rate_limit_error",
                "param": None,
                "code": "queue_full",
            }
            assert 1 <= int(response.headers["Retry-After"]) <= 60
            assert client.get("/health").status_code == 200
        assert client.post("/v1/completions", json=short).status_code == 200


def test_who_waits_gets_an_answer_once_there_is_room(strict: Running) -> None:
    answers: list[httpx.Response] = []

    def ask() -> None:
        with strict.client() as client:
            answers.append(
                client.post("/v1/completions", json={**LONG, "max_tokens": 2, "stream": False})
            )

    waiting = threading.Thread(target=ask)
    with occupied(strict, 1):
        waiting.start()
        strict.wait_for("ingot_waiting", 1)
        assert not answers
    waiting.join(30)
    assert [answer.status_code for answer in answers] == [200]


def test_who_hangs_up_while_waiting_leaves_the_queue(strict: Running) -> None:
    with occupied(strict, 1):
        with strict.asked("/v1/completions", {**LONG, "stream": False}):
            strict.wait_for("ingot_waiting", 1)
        strict.wait_for("ingot_waiting", 0)
        assert strict.metric("ingot_running") == 1


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/completions", {"prompt": "the"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "the"}]}),
        ("/predict", {"instances": ["the"]}),
    ],
)
def test_a_limit_below_the_default_is_what_is_meant_where_nobody_says_how_many(
    loaded: LoadedModel, route: str, body: dict[str, Any]
) -> None:
    metrics = ServerMetrics()
    engine = ServingEngine(loaded.worker(1), metrics, max_batch=1, max_queue=1)
    engine.start()

    async def ask() -> httpx.Response:
        app = create_app(
            Service("tiny", loaded, engine, Serve(max_tokens=8)), metrics, key=None, environ={}
        )
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://test", timeout=60
        ) as client:
            return await client.post(route, json=body)

    try:
        response = asyncio.run(ask())
    finally:
        engine.stop()
    assert response.status_code == 200, response.text
    assert 'ingot_tokens_total{kind="completion"} 8.0' in metrics.text().decode()
