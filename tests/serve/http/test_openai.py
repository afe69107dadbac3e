"""OpenAI's routes through OpenAI's own client, against a server process."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import openai
import pytest

from ingot.models.generation.request import Completion, CompletionChunk, Request
from ingot.models.generation.sampling import Sampling
from ingot.serve.http.openai import _chunks
from ingot.serve.native.engine import ServingEngine, Ticket
from ingot.serve.native.model import LoadedModel
from tests import tolerances
from tests.serve.running import Running

PROMPTS = [
    "the",
    "five wizards box",
    "the quick brown fox jumps over the lazy dog while",
    "Straße, ",
    "\n",
    "Q",
    "naïvely" * 30,
    "dog fox",
]
CHAT: list[Any] = [
    {"role": "system", "content": "Be quick."},
    {"role": "user", "content": "the lazy <|end_of_text|> dog"},
]


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60
    ) as made:
        yield made


def expected(
    loaded: LoadedModel,
    prompt: list[int],
    count: int,
    sampling: Sampling = Sampling(),  # noqa: B008
    stop: tuple[str, ...] = (),
) -> Completion:
    """What the model says alone, in this process."""
    return loaded.generator(1).run([Request(prompt, count, sampling, stop)])[0]


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "ingot"
    with pytest.raises(openai.NotFoundError, match="`other` is not served here, only `tiny`"):
        client.models.retrieve("other")


def test_completion(client: openai.OpenAI, loaded: LoadedModel) -> None:
    prompt = loaded.tokenizer.encode_prompt(PROMPTS[1])
    answer = client.completions.create(
        model="tiny", prompt=PROMPTS[1], max_tokens=20, temperature=0
    )
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.index, choice.logprobs) == (
        expected(loaded, prompt, 20).text,
        "length",
        0,
        None,
    )
    assert answer.usage is not None
    assert (
        answer.usage.prompt_tokens,
        answer.usage.completion_tokens,
        answer.usage.total_tokens,
    ) == (len(prompt), 20, len(prompt) + 20)
    assert (answer.object, answer.model) == ("text_completion", "tiny")


def test_usage_counts_the_tokens_of_every_prompt(
    client: openai.OpenAI, loaded: LoadedModel
) -> None:
    prompts = [loaded.tokenizer.encode_prompt(prompt) for prompt in PROMPTS[:3]]
    answer = client.completions.create(
        model="tiny", prompt=PROMPTS[:3], max_tokens=5, temperature=0
    )
    written = sum(expected(loaded, prompt, 5).generated for prompt in prompts)
    read = sum(map(len, prompts))
    assert answer.usage is not None
    assert answer.usage.completion_tokens == written > 5
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (read, read + written)


def test_default_is_sixteen_tokens_sampled(client: openai.OpenAI) -> None:
    answers = [client.completions.create(model="tiny", prompt="the") for _ in range(3)]
    assert all(
        answer.usage is not None and answer.usage.completion_tokens == 16 for answer in answers
    )
    assert len({answer.choices[0].text for answer in answers}) > 1


def test_seed_temperature_and_top_p(client: openai.OpenAI, loaded: LoadedModel) -> None:
    def text(**options: Any) -> str:
        return (
            client.completions.create(model="tiny", prompt="the", max_tokens=30, **options)
            .choices[0]
            .text
        )

    prompt = loaded.tokenizer.encode_prompt("the")
    assert (
        text(seed=4, temperature=0.8, top_p=0.9)
        == expected(loaded, prompt, 30, Sampling(0.8, 0.9, 4)).text
    )
    assert text(seed=4) == text(seed=4) != text(seed=5)
    assert text(temperature=2, top_p=1e-6) == text(temperature=0)


def test_many_prompts_and_ids(client: openai.OpenAI, loaded: LoadedModel) -> None:
    ids = [loaded.tokenizer.encode_prompt(prompt) for prompt in PROMPTS[:3]]
    wanted = [expected(loaded, prompt, 12).text for prompt in ids]
    for prompts in (PROMPTS[:3], ids):
        answer = client.completions.create(
            model="tiny", prompt=prompts, max_tokens=12, temperature=0
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert [choice.text for choice in answer.choices] == wanted
    assert (
        client.completions.create(model="tiny", prompt=ids[1], max_tokens=12, temperature=0)
        .choices[0]
        .text
        == wanted[1]
    )


def test_stop(client: openai.OpenAI, loaded: LoadedModel) -> None:
    whole = expected(loaded, loaded.tokenizer.encode_prompt("the"), 30).text
    stop = whole[10:14]
    place = whole.find(stop)
    for given in (stop, ["\u2603", stop]):
        (choice,) = client.completions.create(
            model="tiny", prompt="the", max_tokens=30, temperature=0, stop=given
        ).choices
        assert (choice.text, choice.finish_reason) == (whole[:place], "stop")
    chunks = list(
        client.completions.create(
            model="tiny", prompt="the", max_tokens=30, temperature=0, stop=stop, stream=True
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole[:place]


def test_logprobs(client: openai.OpenAI, loaded: LoadedModel) -> None:
    prompt = loaded.tokenizer.encode_prompt("the")
    wanted = expected(loaded, prompt, 20, Sampling(logprobs=3))
    (choice,) = client.completions.create(
        model="tiny", prompt="the", max_tokens=20, temperature=0, logprobs=3
    ).choices
    told = choice.logprobs
    assert told is not None
    assert told.token_logprobs == pytest.approx(
        [token.logprob for token in wanted.tokens], abs=tolerances.LOGPROB
    )
    assert told.top_logprobs is not None
    assert told.tokens is not None
    assert told.text_offset is not None
    for text, logprob, top in zip(
        told.tokens, told.token_logprobs or [], told.top_logprobs, strict=True
    ):
        assert max(top.values()) == top[text] == pytest.approx(logprob), (
            "greedy tokens are the likeliest"
        )
    whole = [index for index, text in enumerate(told.tokens) if "\ufffd" not in text]
    assert len(whole) > 5
    assert all(
        choice.text[told.text_offset[index] :].startswith(told.tokens[index]) for index in whole
    )


def test_streaming_gives_the_same_in_many_pieces(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "model": "tiny",
        "prompt": PROMPTS[:2],
        "max_tokens": 25,
        "seed": 3,
        "logprobs": 1,
    }
    answer = client.completions.create(**options)
    texts, tokens, finishes, usage, count = ["", ""], [[], []], ["", ""], None, 0
    for chunk in client.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    ):
        usage, count = chunk.usage or usage, count + 1
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            tokens[choice.index] += choice.logprobs.tokens
            finishes[choice.index] = choice.finish_reason or finishes[choice.index]
    assert count > 20
    assert texts == [choice.text for choice in answer.choices]
    assert tokens == [choice.logprobs.tokens for choice in answer.choices if choice.logprobs]
    assert finishes == ["length", "length"]
    assert usage == answer.usage


def test_a_stream_that_ends_without_text_has_its_finish_reason() -> None:
    """As at EOS, which is not shown."""

    async def choice(index: int, part: CompletionChunk) -> dict[str, Any]:
        return {"index": index, "text": part.text, "finish_reason": part.finish}

    async def streamed() -> list[Any]:
        ticket = Ticket(cast("ServingEngine", None), [Request([1], 9)])
        for part in (("a", 1, None), ("", 2, None), ("", 3, "stop")):
            text, generated, finish = part
            ticket.put(0, CompletionChunk(text, (), generated, cast("Any", finish)))
        chunks = _chunks(ticket, {}, choice, [[1]], with_usage=True)
        return [(chunk["choices"], chunk.get("usage")) async for chunk in chunks]

    first, last, usage = asyncio.run(streamed())
    assert first == ([{"index": 0, "text": "a", "finish_reason": None}], None)
    assert last == ([{"index": 0, "text": "", "finish_reason": "stop"}], None)
    assert usage[0] == []
    counts = {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4}
    assert usage[1] == {**counts, "prompt_tokens_details": {"cached_tokens": 0}}


def test_chat(client: openai.OpenAI, loaded: LoadedModel) -> None:
    prompt = loaded.tokenizer.encode_chat(CHAT)
    answer = client.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=20, temperature=0, logprobs=True, top_logprobs=2
    )
    (choice,) = answer.choices
    wanted = expected(loaded, prompt, 20, Sampling(logprobs=2))
    assert (choice.message.content, choice.message.role, choice.finish_reason) == (
        wanted.text,
        "assistant",
        "length",
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt)
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert [item.logprob for item in choice.logprobs.content] == pytest.approx(
        [token.logprob for token in wanted.tokens], abs=tolerances.LOGPROB
    )
    assert all(len(item.top_logprobs) == 2 for item in choice.logprobs.content)
    assert all(
        bytes(item.bytes or []).decode(errors="ignore") == item.token.replace("\ufffd", "")
        for item in choice.logprobs.content
    )

    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=CHAT, max_completion_tokens=20, temperature=0, stream=True
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == wanted.text
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


def test_calls_that_the_model_would_not_see_are_refused(client: openai.OpenAI) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages: list[Any] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "b"},
    ]
    with pytest.raises(openai.BadRequestError, match="writes no calls, so that the model would"):
        client.chat.completions.create(model="tiny", messages=messages, max_tokens=2)


def test_chat_takes_parts_and_what_clients_send_back(
    client: openai.OpenAI, loaded: LoadedModel
) -> None:
    messages: list[Any] = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "the "}, {"type": "text", "text": "fox"}],
        },
        {
            "role": "assistant",
            "content": "dog",
            "refusal": None,
            "tool_calls": None,
            "annotations": [],
        },
        {"role": "user", "content": "box", "name": "five"},
    ]
    plain = [
        {"role": "user", "content": "the fox"},
        {"role": "assistant", "content": "dog"},
        {"role": "user", "content": "box"},
    ]
    answer = client.chat.completions.create(
        model="tiny",
        messages=messages,
        max_tokens=9,
        temperature=0,
        n=1,
        presence_penalty=0,
        user="me",
    )
    assert (
        answer.choices[0].message.content
        == expected(loaded, loaded.tokenizer.encode_chat(plain), 9).text
    )


def test_together_each_gets_what_it_gets_alone(
    server: Running, client: openai.OpenAI, loaded: LoadedModel
) -> None:
    wanted = [
        expected(loaded, loaded.tokenizer.encode_prompt(prompt), 200 + 10 * index).text
        for index, prompt in enumerate(PROMPTS)
    ]
    before = (
        server.metric("ingot_batch_rows_bucket", le="4.0"),
        server.metric("ingot_batch_rows_bucket", le="+Inf"),
    )
    barrier = threading.Barrier(len(PROMPTS))

    def ask(index: int) -> str:
        barrier.wait()
        return (
            client.completions.create(
                model="tiny", prompt=PROMPTS[index], max_tokens=200 + 10 * index, temperature=0
            )
            .choices[0]
            .text
        )

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        assert list(pool.map(ask, range(len(PROMPTS)))) == wanted
    few = server.metric("ingot_batch_rows_bucket", le="4.0") - before[0]
    assert server.metric("ingot_batch_rows_bucket", le="+Inf") - before[1] > few, (
        "more than four must have been decoded together"
    )


@pytest.mark.parametrize("stream", [True, False])
def test_who_hangs_up_is_no_longer_computed_for(server: Running, stream: bool) -> None:
    cancelled, tokens = (
        server.metric("ingot_cancelled_total"),
        server.metric("ingot_tokens_total", kind="completion"),
    )
    body = {"prompt": "the", "max_tokens": 8000, "stream": stream, "temperature": 0}
    if stream:
        with (
            server.client() as client,
            client.stream("POST", "/v1/completions", json=body) as response,
        ):
            lines = response.iter_lines()  # kept: httpx closes the connection with it
            assert next(lines).startswith("data: ")
            assert server.metric("ingot_running") == 1
    else:
        with server.asked("/v1/completions", body):
            server.wait_for("ingot_running", 1)
    server.wait_for("ingot_cancelled_total", cancelled + 1)
    server.wait_for("ingot_running", 0)
    assert server.metric("ingot_tokens_total", kind="completion") < tokens + 8000


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt": "a", "temprature": 1}, "`temprature` is not known"),
        (
            {"prompt": "a", "max_tokens": 8001},
            "max_tokens 8001 is over this server's limit of 8000",
        ),
        (
            {"prompt": "a", "max_tokens": 0},
            "`max_tokens` is 0: input should be greater than or equal to 1",
        ),
        ({"prompt": "a", "max_tokens": True}, "`max_tokens` is True"),
        ({"prompt": "a", "temperature": -1}, "`temperature` is -1"),
        ({"prompt": "a", "temperature": "hot"}, "`temperature` is 'hot'"),
        ({"prompt": "a", "top_p": 1.5}, "`top_p` is 1.5"),
        ({"prompt": "a", "n": 0}, "`n` is 0"),
        ({"prompt": "a", "suffix": "b"}, "`suffix` is not supported"),
        ({"prompt": "a", "logprobs": 21}, "`logprobs` is 21"),
        ({"prompt": "a", "stop": [""]}, "`stop`: give a text or a list"),
        ({"prompt": "a", "seed": 2**64}, "`seed` is"),
        ({"prompt": "fox " * 9000}, "8,192 positions"),
        ({"prompt": []}, "`prompt`: give a text"),
        ({"prompt": [1, "a"]}, "`prompt`: item 0 is neither"),
        ({"prompt": ["a", []], "n": 2}, "prompt 1: the prompt is empty"),
        ({"prompt": "a", "logit_bias": {"9999": 1}}, "logit_bias: token 9999 is not in the"),
        ({"prompt": "a", "stop_token_ids": [9999]}, "stop_token_ids: token 9999 is not in the"),
        ({"prompt": [5, 100_000]}, "token 100000 is not in the vocabulary"),
        ({"prompt": "a\ud800"}, "half of a surrogate pair"),
        ({"prompt": ["a"] * 130}, "130 prompts in one request; this server takes at most 128"),
        ({}, "`prompt` is missing"),
        ([1], "not a JSON object"),
    ],
)
def test_refusals_name_the_field(server: Running, body: Any, words: str) -> None:
    with server.client() as client:
        response = client.post(
            "/v1/completions",
            content=json.dumps(body),
            headers={"Content-Type": "application/json"},
        )
    assert response.status_code == 400
    error = response.json()["error"]
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": ["a", [5] * 8192]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "fox " * 9000}]}),
        ("/v1/responses", {"input": "fox " * 9000}),
        ("/v1/embeddings", {"input": [5] * 8193}),
        ("/predict", {"instances": ["fox " * 9000]}),
    ],
)
def test_what_is_too_long_is_told_as_clients_look_for_it(
    server: Running, path: str, body: dict[str, Any]
) -> None:
    with server.client() as client:
        response = client.post(path, json=body)
    error = response.json()["error"]
    assert response.status_code == 400
    assert (error["code"], error["param"]) == ("context_length_exceeded", next(iter(body)))
    assert error["message"].startswith("this model's maximum context length is 8192 tokens: ")
    assert "tokens, but the model has 8,192 positions" in error["message"]


def test_a_slash_behind_a_route_names_nothing(server: Running) -> None:
    with server.client(follow_redirects=True) as client:
        assert client.get("/v1/models/").json() == client.get("/v1/models").json()
        for route, body in (
            ("responses", {"input": "the", "max_output_tokens": 2}),
            ("completions", {"prompt": "the", "max_tokens": 2}),
        ):
            answer = client.post(f"/v1/{route}/", json=body)
            assert (answer.status_code, answer.json()["model"]) == (200, "tiny")


def test_refusals_reach_the_client_as_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="`gpt` is not served here"):
        client.completions.create(model="gpt", prompt="a")
    with pytest.raises(openai.BadRequestError, match="over this server's limit") as caught:
        client.completions.create(model="tiny", prompt="a", max_tokens=9000)
    assert caught.value.param == "max_tokens"
    with pytest.raises(openai.BadRequestError, match="`top_logprobs` needs `logprobs`"):
        client.chat.completions.create(model="tiny", messages=CHAT, top_logprobs=2)
    with pytest.raises(openai.BadRequestError, match="knows no tools"):
        client.chat.completions.create(
            model="tiny", messages=CHAT, tools=[{"type": "function", "function": {"name": "f"}}]
        )


@pytest.mark.parametrize(
    ("content", "kind", "status", "words"),
    [
        (b'{"prompt": ', "application/json", 400, "not JSON"),
        (b'{"prompt": "\xff"}', "application/json", 400, "not JSON in UTF-8"),
        (b'{"prompt": "a"}', "text/plain", 400, "Content-Type: application/json"),
        (b"", "application/json", 400, "not a JSON object"),
    ],
)
def test_bodies_that_are_no_json(
    server: Running, content: bytes, kind: str, status: int, words: str
) -> None:
    with server.client() as client:
        response = client.post("/v1/completions", content=content, headers={"Content-Type": kind})
    assert (response.status_code, words in response.json()["error"]["message"]) == (
        status,
        True,
    ), response.text


def test_unknown_paths_and_methods(server: Running) -> None:
    with server.client() as client:
        assert client.get("/nope").json()["error"]["message"].startswith("GET /nope: not found")
        assert client.get("/v1/completions").status_code == 405
    assert server.metric("ingot_requests_total", route="other", status="404") >= 1


def test_what_prometheus_reads(server: Running, client: openai.OpenAI) -> None:
    before = (
        server.metric("ingot_tokens_total", kind="completion"),
        server.metric("ingot_tokens_total", kind="prompt"),
    )
    requests = server.metric("ingot_requests_total", route="/v1/completions", status="200")
    usage = client.completions.create(
        model="tiny", prompt="the dog", max_tokens=7, temperature=0
    ).usage
    assert usage is not None
    assert server.metric("ingot_tokens_total", kind="completion") == before[0] + 7
    assert server.metric("ingot_tokens_total", kind="prompt") == before[1] + usage.prompt_tokens
    assert (
        server.metric("ingot_requests_total", route="/v1/completions", status="200") == requests + 1
    )
    for name in (
        "ingot_request_seconds_count",
        "ingot_first_token_seconds_count",
        "ingot_batch_rows_count",
    ):
        assert server.metric(name) > 0
    assert server.metric("ingot_waiting") == 0
    with server.client() as http:
        assert http.get("/metrics").headers["content-type"].startswith("text/plain")


def test_what_was_read_before_is_counted_and_kept_apart_by_a_salt(
    server: Running, client: openai.OpenAI
) -> None:
    """By the `usage` of whole answers and streams, and for Prometheus."""

    def ask(text: str, salt: str, **more: Any) -> Any:
        return client.completions.create(
            model="tiny",
            prompt=text,
            max_tokens=4,
            temperature=0,
            extra_body={"cache_salt": salt},
            **more,
        )

    begin = "the dog and the cat and the bird saw " * 12
    seen, found = (
        server.metric(f"ingot_prefix_cache_{name}_total") for name in ("queries", "hits")
    )
    first, again, apart = ask(begin, "a"), ask(begin + "it", "a"), ask(begin, "b")
    *_, last = ask(begin, "a", stream=True, stream_options={"include_usage": True})
    cached = [answer.usage.prompt_tokens_details.cached_tokens for answer in (first, again, apart)]
    assert cached[0] == cached[2] == 0
    assert 32 <= cached[1] < again.usage.prompt_tokens
    assert last.usage.prompt_tokens_details.cached_tokens == cached[1]
    assert apart.choices[0].text == first.choices[0].text
    read = sum(answer.usage.prompt_tokens for answer in (first, again, apart, last))
    assert server.metric("ingot_prefix_cache_queries_total") == seen + read
    assert server.metric("ingot_prefix_cache_hits_total") == found + 2 * cached[1]
    with pytest.raises(openai.BadRequestError, match="cache_salt"):
        ask(begin, "")


def test_several_choices_each_with_a_seed_of_its_own(
    client: openai.OpenAI, loaded: LoadedModel
) -> None:
    prompts = [loaded.tokenizer.encode_prompt(prompt) for prompt in PROMPTS[:2]]
    answer = client.completions.create(
        model="tiny", prompt=PROMPTS[:2], max_tokens=12, n=3, seed=5, temperature=0.9
    )
    wanted = [
        expected(loaded, prompt, 12, Sampling(0.9, seed=5 + choice)).text
        for prompt in prompts
        for choice in range(3)
    ]
    assert [(choice.index, choice.text) for choice in answer.choices] == list(enumerate(wanted))
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(map(len, prompts))
    assert answer.usage.completion_tokens > 12 * 3


def test_several_choices_of_a_chat_whole_and_streamed(client: openai.OpenAI) -> None:
    options: Any = {"model": "tiny", "messages": CHAT, "max_tokens": 8, "n": 2, "seed": 1}
    whole = client.chat.completions.create(**options)
    texts, roles = ["", ""], [0, 0]
    for chunk in client.chat.completions.create(**options, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            roles[choice.index] += choice.delta.role == "assistant"
    assert texts == [choice.message.content for choice in whole.choices]
    assert texts[0] != texts[1]
    assert roles == [1, 1]


def test_echo_puts_each_prompt_before_its_completion(
    client: openai.OpenAI, loaded: LoadedModel
) -> None:
    ids = loaded.tokenizer.encode_prompt("dog fox")
    options: Any = {"model": "tiny", "max_tokens": 6, "temperature": 0}
    for prompts, given in ((PROMPTS[:2], PROMPTS[:2]), (ids, [loaded.tokenizer.decode(ids)])):
        plain = client.completions.create(prompt=prompts, **options)
        echoed = client.completions.create(prompt=prompts, echo=True, **options)
        texts = [""] * len(given)
        for chunk in client.completions.create(prompt=prompts, echo=True, stream=True, **options):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        assert [choice.text for choice in echoed.choices] == texts
        assert texts == [
            start + choice.text for start, choice in zip(given, plain.choices, strict=True)
        ]


def test_options_of_openai_and_of_vllm_reach_the_model(
    client: openai.OpenAI, loaded: LoadedModel
) -> None:
    prompt = loaded.tokenizer.encode_prompt("the")
    plain = expected(loaded, prompt, 20)
    first = plain.tokens[0].id

    def text(**options: Any) -> str:
        more = {"model": "tiny", "prompt": "the", "max_tokens": 20, "temperature": 0.0}
        return client.completions.create(**{**more, **options}).choices[0].text  # type: ignore[no-any-return]

    def alone(sampling: Sampling, **ends: Any) -> str:
        return loaded.generator(1).run([Request(prompt, 20, sampling, **ends)])[0].text

    cases: list[tuple[dict[str, Any], Sampling]] = [
        ({"presence_penalty": 1.5}, Sampling(presence_penalty=1.5)),
        ({"frequency_penalty": 1.5}, Sampling(frequency_penalty=1.5)),
        ({"logit_bias": {str(first): -100}}, Sampling(logit_bias=((first, -100.0),))),
        ({"extra_body": {"repetition_penalty": 1.8}}, Sampling(repetition_penalty=1.8)),
        (
            {"temperature": 1.0, "seed": 3, "extra_body": {"top_k": 3}},
            Sampling(1.0, seed=3, top_k=3),
        ),
        (
            {"temperature": 1.0, "seed": 3, "extra_body": {"min_p": 0.4}},
            Sampling(1.0, seed=3, min_p=0.4),
        ),
    ]
    for options, sampling in cases:
        assert text(**options) == alone(sampling) != plain.text, options
    unlimited = {"temperature": 1.0, "seed": 3, "extra_body": {"top_k": -1}}
    assert text(**unlimited) == alone(Sampling(1.0, seed=3))
    third = plain.tokens[2].id
    assert text(extra_body={"stop_token_ids": [third]}) == alone(Sampling(), stop_ids=(third,))
    assert text(extra_body={"stop_token_ids": [third]}) != plain.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"best_of": 3}, "`best_of` is not supported by this server; ask for several choices"),
        ({"logit_bias": {"x": 1}}, "'x': '1' is not a token id with a bias from -100 to 100"),
        ({"logit_bias": {"5": 101}}, "with a bias from -100 to 100"),
        ({"logit_bias": {"999999": 1}}, "token 999999 is not in the vocabulary"),
        ({"n": 129}, "n"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"extra_body": {"min_tokens": 40}}, "min_tokens is 40 and max_tokens 16"),
        (
            {"n": 100, "extra_body": {"prompt": ["a", "b"]}},
            "200 answers in one request; this server takes at most",
        ),
    ],
    ids=lambda given: "-".join(given) if isinstance(given, dict) else "",
)
def test_options_that_cannot_be_are_refused(
    client: openai.OpenAI, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="the", **options)
    assert message in str(caught.value)
