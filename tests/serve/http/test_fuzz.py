"""Whatever JSON a client sends, it gets an answer or a refusal in the agreed shape, never a
crash.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.config.sections.deployment import Serve
from ingot.serve.http.bodies import (
    IGNORED_FIELDS,
    NEUTRAL_VALUES,
    CompletionBody,
    PredictBody,
    RequestBody,
)
from ingot.serve.http.chat import ChatBody
from ingot.serve.http.middleware import ServerMetrics
from ingot.serve.http.service import Service
from ingot.serve.http.vertex import ClassifyBody, SummaryBody
from ingot.serve.native.engine import ServingEngine
from ingot.serve.native.model import LoadedModel, load
from ingot.serve.server import create_app
from tests.serve.tiny import make_classifier, make_summarizer

texts = st.text(max_size=5) | st.sampled_from(["the", "\ud800", "\x00", "tiny", "user", "text"])
plain = st.none() | st.booleans() | st.integers(-3, 20) | st.integers() | st.floats() | texts
anything = st.recursive(
    plain,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
message = st.fixed_dictionaries(
    {"role": texts, "content": texts},
    optional={"name": texts, "tool_calls": st.sampled_from([[], None, [1]])},
)
ids = st.lists(st.integers(1, 319), min_size=1, max_size=5)
good: dict[str, st.SearchStrategy[Any]] = {
    "prompt": texts | ids | st.lists(texts | ids, min_size=1, max_size=3),
    "messages": st.lists(message, min_size=1, max_size=3),
    "instances": st.lists(
        texts | st.fixed_dictionaries({"prompt": texts}) | st.fixed_dictionaries({"text": texts}),
        min_size=1,
        max_size=3,
    ),
    "parameters": (
        st.fixed_dictionaries(
            {}, optional={"max_tokens": st.integers(1, 4) | st.just(3.0), "seed": st.integers(0, 9)}
        )
        | (
            st.fixed_dictionaries(
                {}, optional={"beams": st.integers(0, 3), "temperature": st.floats(0, 2)}
            )
        )
    ),
    "model": st.just("tiny"),
    "max_tokens": st.integers(1, 4),
    "max_completion_tokens": st.integers(1, 4),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0, 1),
    "stop": texts | st.lists(texts, max_size=3),
    "logprobs": st.booleans() | st.integers(0, 5),
    "top_logprobs": st.integers(0, 3),
    "seed": st.integers(-9, 9),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}),
    **{name: st.sampled_from(values) for name, values in NEUTRAL_VALUES.items()},
}
routes = {"/v1/completions": CompletionBody, "/v1/chat/completions": ChatBody}


@st.composite
def calls(draw: st.DrawFn, predict: type[RequestBody] = PredictBody) -> tuple[str, Any]:
    """A route and a body: mostly its own fields with values that may be right, sometimes fields of
    elsewhere, values of all kinds, or no object.
    """
    rarely = st.sampled_from([False] * 7 + [True])
    route, kind = draw(
        st.sampled_from(sorted({**routes, "/predict": predict}.items(), key=lambda item: item[0]))
    )
    if draw(rarely):
        return route, draw(anything)
    names = [
        next(name for name in ("prompt", "messages", "instances") if name in kind.model_fields)
    ]
    names += draw(st.lists(st.sampled_from(list(kind.model_fields)), max_size=4))
    if draw(rarely):
        names += draw(
            st.lists(st.sampled_from([*NEUTRAL_VALUES, *IGNORED_FIELDS]) | texts, max_size=2)
        )
    return route, {
        name: draw(anything if name not in good or draw(rarely) else good[name]) for name in names
    }


@contextlib.contextmanager
def serving(loaded: LoadedModel) -> Iterator[FastAPI]:
    limits = Serve(max_tokens=4, max_body_bytes=2000)
    metrics = ServerMetrics()
    engine = ServingEngine(loaded.worker(4), metrics, max_batch=4, max_queue=8)
    engine.start()
    yield create_app(Service("tiny", loaded, engine, limits), metrics, key=None, environ={})
    engine.stop()


@pytest.fixture(scope="module")
def app(loaded: LoadedModel) -> Iterator[FastAPI]:
    with serving(loaded) as made:
        yield made


@pytest.fixture(scope="module")
def writing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FastAPI]:
    with serving(load(make_summarizer(tmp_path_factory.mktemp("fuzz") / "summarizer"))) as made:
        yield made


@pytest.fixture(scope="module")
def judging(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FastAPI]:
    with serving(load(make_classifier(tmp_path_factory.mktemp("fuzz") / "classifier"))) as made:
        yield made


@pytest.mark.drawn("fuzzed requests")
@settings(max_examples=300, deadline=None)
@given(calls())
def test_no_body_breaks_the_server(app: FastAPI, call: tuple[str, Any]) -> None:
    assert_answered(app, *call)


@pytest.mark.drawn("fuzzed requests")
@settings(max_examples=100, deadline=None)
@given(calls(SummaryBody))
def test_no_body_breaks_a_summarizer(writing: FastAPI, call: tuple[str, Any]) -> None:
    assert_answered(writing, *call)


@settings(max_examples=100, deadline=None)
@given(calls(ClassifyBody))
def test_no_body_breaks_a_classifier(judging: FastAPI, call: tuple[str, Any]) -> None:
    assert_answered(judging, *call)


def assert_answered(app: FastAPI, route: str, body: Any) -> None:
    async def send() -> httpx.Response:
        # Python's own JSON: it writes half surrogates, NaN and Infinity, which other clients may
        # send, too.
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post(
                route, content=json.dumps(body), headers={"Content-Type": "application/json"}
            )

    response = asyncio.run(send())
    assert response.status_code in (200, 400, 404, 413), response.text
    if response.status_code != 200:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert response.text.endswith("data: [DONE]\n\n")
    else:
        assert {"choices", "predictions"} & set(response.json())
