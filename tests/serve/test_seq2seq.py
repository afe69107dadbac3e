"""Sequence-to-sequence models over HTTP: requests that arrive while others are answered."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from ingot.models.generation.request import REPLACEMENT
from ingot.models.hf.models import Seq2Seq
from ingot.serve.native.model import LoadedModel, load
from tests.models.generation.answers import generate
from tests.serve.running import Running, running
from tests.serve.tiny import make_summarizer

PROMPTS = ["the", "five wizards box", "the quick brown fox jumps over", "Q", "dog fox", "lazy"]
LIMIT = 48
Served = tuple[Running, LoadedModel]


@pytest.fixture(scope="module", params=["t5-1.1", "bart"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    torch.set_num_threads(1)
    folder = make_summarizer(tmp_path_factory.mktemp("model") / "model", request.param)
    with running(folder, max_tokens=LIMIT) as made:
        yield made, load(folder)


def text_of(loaded: LoadedModel, body: dict[str, Any]) -> str:
    """What the model writes alone."""
    assert isinstance(loaded.model, Seq2Seq)
    how = {"temperature": body["temperature"], "seed": body.get("seed")}
    ids = loaded.encode(body["prompt"])
    (found,) = generate(loaded.model, [ids], body.get("max_tokens", LIMIT), eos=[1], **how)
    text = loaded.tokenizer.decode(found).rstrip(REPLACEMENT)
    for stop in body.get("stop", ()):
        text = text.partition(stop)[0]
    return text


@pytest.mark.drawn
def test_requests_that_arrive_one_after_another_get_what_each_gets_alone(served: Served) -> None:
    server, loaded = served
    bodies: list[dict[str, Any]] = [
        {"prompt": prompt, "max_tokens": LIMIT - 7 * row, "temperature": row % 2 * 0.8, "seed": row}
        for row, prompt in enumerate(PROMPTS)
    ]
    greedy = text_of(loaded, {"prompt": PROMPTS[2], "temperature": 0.0})
    bodies.append({"prompt": PROMPTS[2], "temperature": 0.0, "stop": [greedy[4:7]]})
    wanted = [text_of(loaded, body) for body in bodies]
    assert wanted[-1] == greedy.partition(greedy[4:7])[0] != greedy

    def ask(row: int) -> str:
        time.sleep(0.01 * row)
        with server.client() as client:
            answer = client.post("/v1/completions", json=bodies[row]).json()
        text: str = answer["choices"][0]["text"]
        return text

    before = [server.metric("ingot_batch_rows_bucket", le=some) for some in ("1.0", "+Inf")]
    gone = {"prompt": PROMPTS[1], "temperature": 0, "max_tokens": LIMIT}
    for _ in range(2):
        with ThreadPoolExecutor(len(bodies)) as pool:
            asked = pool.map(ask, range(len(bodies)))
            with server.asked("/v1/completions", gone):
                time.sleep(0.01)  # and its client hangs up
            assert list(asked) == wanted
    after = [server.metric("ingot_batch_rows_bucket", le=some) for some in ("1.0", "+Inf")]
    alone, steps = (new - old for new, old in zip(after, before, strict=True))
    assert steps > alone, "some must have been computed together"
    server.wait_for("ingot_running", 0)


def test_an_answer_is_streamed_while_it_is_written(served: Served) -> None:
    server, _ = served
    body = {"prompt": PROMPTS[2], "temperature": 0.0, "stream": True}
    with server.client() as client:
        lines = client.post("/v1/completions", json=body).text.splitlines()
    chunks = [line for line in lines if line.startswith("data: {")]
    assert len(chunks) > 4
