"""Bodies that are small and cost much: refused after little work, with a short answer. Work is
counted, not timed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message

from ingot.config.sections.deployment import Serve
from ingot.serve.engines.proxy import create_proxy
from ingot.serve.http import errors
from ingot.serve.http.answers import PARTS_AT_ONCE, json_answer
from ingot.serve.http.bodies import GenerationOptions, PromptBounds
from ingot.serve.http.errors import ApiError
from ingot.serve.http.middleware import DRAIN_FACTOR, BodyLimit, JsonCount, ServerMetrics
from ingot.serve.http.service import Service
from ingot.serve.native.engine import ServingEngine
from ingot.serve.native.folder import most_characters
from ingot.serve.native.model import LoadedModel
from ingot.serve.server import create_app
from ingot.tokenizers.backend import LONG_TEXT as LONG_TEXT_FROM
from ingot.tokenizers.backend import JsonBackend
from ingot.tokenizers.tokenizer import Tokenizer

MANY = 20_000
LONG = "x" * 100_000
SHORT_ANSWER = 1500


@pytest.fixture(scope="module")
def app(loaded: LoadedModel) -> Iterator[FastAPI]:
    metrics = ServerMetrics()
    engine = ServingEngine(loaded.worker(2), metrics, max_batch=2, max_queue=2)
    engine.start()
    settings = Serve(max_body_bytes=10_000_000, max_batch=2, max_queue=2)
    service = Service("tiny", loaded, engine, settings)
    yield create_app(service, metrics, key=None, environ={})
    engine.stop()


@pytest.fixture(scope="module")
def proxy(loaded: LoadedModel) -> FastAPI:
    """What stands before vLLM, with nothing behind it."""
    bounds = PromptBounds(4, 8192, loaded.most_characters)
    settings = Serve(max_body_bytes=10_000_000)
    return create_proxy("http://127.0.0.1:9", settings, "tiny", bounds, key=None, environ={})


def post(app: FastAPI, path: str, body: Any, method: str = "POST") -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            return await client.request(method, path, content=content, headers=headers)

    return asyncio.run(send())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/predict", {"instances": [1] * MANY}),
        ("/predict", {"instances": [{"no": 1}] * (MANY // 2)}),
        ("/predict", {"instances": ["a"], **{f"field{number}": 1 for number in range(MANY)}}),
        ("/predict", {"instances": ["a"], LONG: 1}),
        ("/v1/chat/completions", {"messages": [1] * MANY}),
        ("/v1/chat/completions", {"messages": [{"role": "user"}] * (MANY // 2)}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [1] * MANY}]}),
        ("/v1/chat/completions", {"messages": [{"role": LONG, "content": "a"}]}),
        ("/v1/completions", {"prompt": [1.5] * MANY}),
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
    app: FastAPI, proxy: FastAPI, monkeypatch: pytest.MonkeyPatch, path: str, body: Any
) -> None:
    encoded: list[str] = []
    monkeypatch.setattr(LoadedModel, "encode", lambda self, text: encoded.append(text) or [1])
    for each in (app, proxy):
        answer = post(each, path, body)
        assert (answer.status_code, encoded) == (400, [])
        assert "this server takes at most 4" in answer.json()["error"]["message"]


def test_more_answers_than_ever_fit_are_refused_before_one_is_made(
    app: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GenerationOptions, "request", lambda *_, **__: pytest.fail("it was made"))
    answer = post(app, "/v1/completions", {"prompt": ["a"] * 4, "n": 128, "max_tokens": 1})
    assert answer.status_code == 400
    assert "512 answers in one request; this server takes at most 4" in answer.text


NESTED = "[" * MANY + "]" * MANY
TOO_MANY = {
    "numbers": {"prompt": [1] * 50_000},
    "lists": {"prompt": [[]] * MANY},
    "fields": {"metadata": {f"field{number}": "a" for number in range(50_000)}},
}


@pytest.mark.parametrize("what", [*TOO_MANY, "nested"])
def test_bodies_of_many_values_are_refused_unparsed(
    app: FastAPI, proxy: FastAPI, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    body = NESTED.encode() if what == "nested" else json.dumps(TOO_MANY[what]).encode()
    parsed: list[int] = []
    loads = json.loads
    monkeypatch.setattr(json, "loads", lambda text: parsed.append(len(text)) or loads(text))
    for each in (app, proxy):
        answer = post(each, "/v1/completions", body)
        assert (answer.status_code, len(parsed)) == (413, 0)
        assert "send it in parts" in loads(answer.content)["error"]["message"]


values = st.recursive(
    st.integers() | st.booleans() | st.text('\\"[]{},é', max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('"\\,', max_size=3), inner),
    max_leaves=12,
)


def made(value: Any) -> tuple[int, int]:
    """Values and containers that parsing makes, keys and the outermost value left out."""
    if not isinstance(value, list | dict):
        return 0, 0
    inner = [made(item) for item in (value.values() if isinstance(value, dict) else value)]
    return len(inner) + sum(one for one, _ in inner), 1 + sum(other for _, other in inner)


@given(values, st.integers(1, 9))
def test_values_are_counted_whatever_the_texts_and_wherever_the_body_is_cut(
    value: Any, size: int
) -> None:
    body = json.dumps(value).encode()
    count = JsonCount()
    for start in range(0, len(body), size):
        count.add(body[start : start + size])
    least, containers = made(value)
    assert count.containers == containers
    assert least <= count.values <= least + containers, "an empty list counts as if it held one"


LONG_TEXT = "the quick brown fox " * 40_000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/predict", {"instances": [LONG_TEXT]}),
        ("/v1/completions", {"prompt": ["a", LONG_TEXT]}),
        ("/v1/completions", {"prompt": LONG_TEXT}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG_TEXT}]}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG_TEXT}]}]},
        ),
    ],
)
def test_a_prompt_that_can_never_fit_is_refused_before_it_is_encoded(
    app: FastAPI, proxy: FastAPI, monkeypatch: pytest.MonkeyPatch, path: str, body: Any
) -> None:
    monkeypatch.setattr(Tokenizer, "encode", lambda *_: pytest.fail("it was encoded"))
    monkeypatch.setattr(Tokenizer, "encode_chat", lambda *_: pytest.fail("it was rendered"))
    for each in (app, proxy):
        answer = post(each, path, body)
        assert answer.status_code == 400, "503 would mean that it went to the engine"
        error = answer.json()["error"]
        assert "has 800,000 characters; the model's" in error["message"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", next(iter(body)))


def test_the_longest_text_that_fits_is_not_too_long(loaded: LoadedModel) -> None:
    tokenizer, positions = loaded.tokenizer, 100
    longest = max((tokenizer.decode([token]) for token in range(tokenizer.vocab_size)), key=len)
    text = longest * (positions - 1)
    assert len(tokenizer.encode_prompt(text)) <= positions
    assert len(text) <= most_characters(tokenizer, positions)


def test_a_long_text_has_the_same_ids_while_others_run(loaded: LoadedModel) -> None:
    text = "the quick Straße \n" * (LONG_TEXT_FROM // 10)
    backend = loaded.tokenizer._reference
    assert isinstance(backend, JsonBackend)
    assert (
        loaded.tokenizer.encode(text) == backend.control.encode(text, add_special_tokens=False).ids
    )


def test_log_probabilities_are_bounded(app: FastAPI) -> None:
    asked = {"prompt": ["a", "b", "c", "d"], "max_tokens": 1024, "logprobs": 20}
    answer = post(app, "/v1/completions", asked)
    assert answer.status_code == 400
    assert "would hold 86,016 log-probabilities" in answer.json()["error"]["message"]
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "logprobs": True}
    assert post(app, "/v1/chat/completions", {**chat, "top_logprobs": 20}).status_code == 200


def test_others_get_their_turn_while_a_long_answer_is_written() -> None:
    content = {"top": [{"a": number} for number in range(20_000)]}

    async def turns() -> tuple[int, bytes]:
        writing = asyncio.ensure_future(json_answer(content))
        count = 0
        while not writing.done():
            count += 1
            await asyncio.sleep(0)
        return count, writing.result().body

    count, body = asyncio.run(turns())
    assert json.loads(body) == content
    assert count > 20_000 // PARTS_AT_ONCE


def test_long_names_are_not_echoed(app: FastAPI) -> None:
    answer = post(app, "/v1/completions", {"prompt": "a", "model": LONG})
    assert answer.status_code == 404
    assert len(answer.content) < SHORT_ANSWER
    assert len(post(app, f"/{LONG[:10_000]}", {}).content) < SHORT_ANSWER
    assert len(post(app, "/v1/models", {}, method=LONG[:10_000]).content) < SHORT_ANSWER
    quoting = ApiError(400, f"the template refuses {LONG}")
    assert len(quoting.response().body) < SHORT_ANSWER


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"role": "wizard", "content": "a"}, "'wizard' is not a role; it is one of system,"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "part 0 is of type 'image_url'; this model reads text",
        ),
        ({"role": "user", "content": None}, "of the role user has no `content`; give its text"),
        ({"role": "system"}, "of the role system has no `content`; give its text"),
        ({"role": "user", "content": 5}, "`messages.0.content`: give a text, or a list of parts"),
        (
            {"role": "user", "content": "\ud800"},
            "`messages.0.content`: holds half of a surrogate pair; send whole characters",
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": 5}]},
            "`messages.0.content.0.text` is 5: input should be a valid string",
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


def test_a_body_that_is_no_text_is_told_so(app: FastAPI) -> None:
    answer = post(app, "/v1/completions", b'{"prompt": "\xff"}')
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "the body is not JSON in UTF-8; mend it"


def test_two_limits_of_one_answer_are_refused(app: FastAPI) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    answer = post(app, "/v1/chat/completions", {**body, "max_completion_tokens": 3})
    assert answer.status_code == 400
    assert "`max_tokens` and `max_completion_tokens` differ" in answer.json()["error"]["message"]


def through(limit: BodyLimit, headers: dict[str, str], coming: list[Message]) -> list[Message]:
    """What is answered to a client that sends what is `coming` and then nothing."""
    sent: list[Message] = []

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
    limit = BodyLimit(unreached, 1000, timeout_s=0.05)
    half: Message = {"type": "http.request", "body": b"{", "more_body": True}
    answer = through(limit, {"content-length": "100"}, [half])
    assert answer[0]["status"] == 408
    assert (b"connection", b"close") in answer[0]["headers"]


def test_of_a_body_beyond_the_limit_a_part_is_read_and_none_kept() -> None:
    """Some of it, since many clients read no answer before they have sent all."""
    coming: list[Message] = [{"type": "http.request", "body": b"x" * 1000, "more_body": True}] * 100
    assert through(BodyLimit(unreached, 1000), {}, coming)[0]["status"] == 413
    assert 100 - len(coming) == DRAIN_FACTOR + 1


def test_two_lengths_of_one_body_are_refused() -> None:
    limit = BodyLimit(unreached, 1000)
    body: Message = {"type": "http.request", "body": b"{}", "more_body": False}
    both = {"content-length": "2", "transfer-encoding": "chunked"}
    assert through(limit, both, [body])[0]["status"] == 400


def test_of_many_faults_the_first_are_told(app: FastAPI) -> None:
    answer = post(
        app, "/predict", {"instances": ["a"], **{f"f{n}{LONG[:200]}": 1 for n in range(50)}}
    )
    assert answer.status_code == 400
    assert len(answer.content) < SHORT_ANSWER
    assert answer.json()["error"]["message"].endswith("and 46 more faults")
