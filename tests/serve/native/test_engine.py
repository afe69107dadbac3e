"""The engine under failures: every request gets an answer, and the next ones are tried."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from ingot.models.generation.generator import Generator
from ingot.models.generation.request import Completion, CompletionChunk, Request, join_chunks
from ingot.models.generation.sampling import Sampling
from ingot.serve.http.errors import ApiError
from ingot.serve.http.middleware import ServerMetrics
from ingot.serve.native import engine as module
from ingot.serve.native.embedding import Embedder
from ingot.serve.native.engine import MAX_FAILURES, PROBE, ServingEngine, Ticket
from ingot.serve.native.model import LoadedModel, load
from tests.patience import PATIENCE_S
from tests.serve.test_masks import make_masked
from tests.serve.tiny import make_classifier, make_scorer, make_summarizer


class Failing:
    """Stands before the model's `hidden`: fails while told to, or on passes `by` which it does, and
    can be made to wait.
    """

    def __init__(self, hidden: Callable[..., torch.Tensor]) -> None:
        self._hidden, self.fails, self.gate = hidden, False, threading.Event()
        self.by: Callable[[torch.Tensor], bool] = lambda tokens: False
        self.gate.set()

    def __call__(self, tokens: torch.Tensor, *arguments: object, **more: object) -> torch.Tensor:
        self.gate.wait(30)
        if self.fails or self.by(tokens):
            raise torch.OutOfMemoryError("no memory")
        return self._hidden(tokens, *arguments, **more)


@pytest.fixture
def failing(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> Failing:
    made = Failing(loaded.model.hidden)
    monkeypatch.setattr(loaded.model, "hidden", made)
    return made


@pytest.fixture
def engine(loaded: LoadedModel, failing: Failing) -> Iterator[ServingEngine]:
    made = ServingEngine(
        Generator(loaded.model, decode=loaded.tokenizer.decode, max_rows=2),
        ServerMetrics(),
        max_batch=2,
        max_queue=3,
    )
    made.start()
    yield made
    failing.gate.set()
    made.stop()
    assert not made.healthy


def request(tokens: int = 4) -> Request:
    return Request([5, 6, 7], tokens)


async def answers(ticket: Ticket) -> list[Completion]:
    return await asyncio.wait_for(ticket.completions(), 30)


def test_a_failed_step_answers_everybody_and_the_next_request_succeeds(
    engine: ServingEngine, failing: Failing, capsys: pytest.CaptureFixture[str]
) -> None:
    async def story() -> None:
        failing.fails = True
        failing.gate.clear()
        tickets = [engine.submit([request(), request()]), engine.submit([request()])]
        failing.gate.set()
        for ticket in tickets:
            with pytest.raises(ApiError, match="the model failed on this request") as caught:
                await answers(ticket)
            assert caught.value.status == 500
        failing.fails = False
        (answer,) = await answers(engine.submit([request()]))
        assert (answer.generated, answer.finish) == (4, "length")
        assert engine.healthy

    asyncio.run(story())
    assert "OutOfMemoryError: no memory" in capsys.readouterr().err


@pytest.fixture
def wide(loaded: LoadedModel, failing: Failing) -> Iterator[ServingEngine]:
    """Four rows, and the memory of prompts, as a server has it."""
    worker = loaded.serving_worker(4, 16)
    made = ServingEngine(worker, ServerMetrics(), max_batch=4, max_queue=4)
    made.start()
    yield made
    made.stop()


OTHERS = [
    Request([5, 6, 7], 30),
    Request([8, 9], 30, Sampling(temperature=1.0, seed=3, repetition_penalty=1.2, logprobs=1)),
    Request([6, 6, 5, 8], 30, Sampling(temperature=0.9, top_p=0.9, seed=4), stop=("zzz",)),
]
"""Beside which something fails."""


def told(answer: Completion) -> tuple[str, list[int], int, str]:
    return (answer.text, [token.id for token in answer.tokens], answer.generated, answer.finish)


async def beside(
    engine: ServingEngine, *, then: Request, after: int
) -> list[Completion | ApiError]:
    """The answers to `OTHERS`, and to one more that is sent when they have had `after` tokens."""
    ticket, sent = engine.submit(OTHERS), None
    parts: list[list[CompletionChunk]] = [[] for _ in OTHERS]
    async for index, piece in ticket.pieces():
        parts[index].append(piece)
        if sent is None and index == 2 and piece.generated >= after:
            sent = engine.submit([then])
    assert sent is not None
    (last,) = await asyncio.gather(answers(sent), return_exceptions=True)
    assert isinstance(last, ApiError | list), last
    return [*map(join_chunks, parts), last if isinstance(last, ApiError) else last[0]]


def test_a_request_that_a_step_fails_on_fails_alone(
    wide: ServingEngine, loaded: LoadedModel, failing: Failing
) -> None:
    expected = Generator(loaded.model, decode=loaded.tokenizer.decode).run(OTHERS)
    failing.by = lambda tokens: bool((tokens == 300).any())

    async def story() -> None:
        for after in (1, 7):
            *others, bad = await beside(wide, then=Request([300, 5], 4), after=after)
            assert [told(one) for one in others] == [told(one) for one in expected]  # type: ignore[arg-type]
            assert isinstance(bad, ApiError)
            assert (bad.status, bad.message) == (
                500,
                "the model failed on this request; the server's log has the reason",
            )
        assert wide.healthy

    asyncio.run(story())


def test_of_several_that_join_together_the_bad_one_alone_fails(
    wide: ServingEngine, failing: Failing
) -> None:
    failing.by = lambda tokens: bool((tokens == 300).any())

    async def story() -> None:
        failing.gate.clear()
        tickets = [wide.submit([Request([first, 5], 6)]) for first in (7, 300, 8, 9)]
        failing.gate.set()
        ended = await asyncio.gather(*map(answers, tickets), return_exceptions=True)
        assert [isinstance(one, ApiError) for one in ended] == [False, True, False, False]

    asyncio.run(story())


def test_a_failure_that_does_not_come_again_fails_nobody(
    wide: ServingEngine, loaded: LoadedModel, failing: Failing
) -> None:
    expected = Generator(loaded.model, decode=loaded.tokenizer.decode).run(OTHERS)
    for bad in (1, 2, 3, 9):
        passes = iter(range(1000))
        failing.by = lambda tokens, passes=passes, bad=bad: next(passes) == bad  # type: ignore[misc]
        found = asyncio.run(_all(wide, OTHERS))
        assert [told(one) for one in found] == [told(one) for one in expected], bad


async def _all(engine: ServingEngine, requests: list[Request]) -> list[Completion]:
    return await answers(engine.submit(requests))


def test_where_memory_is_short_the_newest_fails(wide: ServingEngine, failing: Failing) -> None:
    failing.by = lambda tokens: len(tokens) > 3

    async def story() -> None:
        *others, last = await beside(wide, then=Request([9], 8), after=5)
        assert [isinstance(one, ApiError) for one in others] == [False] * 3
        assert isinstance(last, ApiError)

    asyncio.run(story())


def test_a_request_that_cannot_join_fails_alone(wide: ServingEngine) -> None:
    async def story() -> None:
        *others, last = await beside(wide, then=Request([10**6], 8), after=5)
        assert [isinstance(one, ApiError) for one in others] == [False] * 3
        assert isinstance(last, ApiError)
        assert wide.healthy

    asyncio.run(story())


def test_an_idle_server_returns_memory_once_and_goes_on(
    engine: ServingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    returned: queue.Queue[int] = queue.Queue()
    monkeypatch.setattr(module, "return_freed_memory", lambda: returned.put(1))
    monkeypatch.setattr(module, "IDLE_S", 0.02)

    async def story() -> None:
        for _ in range(2):
            (answer,) = await answers(engine.submit([request()]))
            assert answer.generated == 4
            returned.get(timeout=30)
        with pytest.raises(queue.Empty):
            returned.get(timeout=0.2)

    asyncio.run(story())


def test_a_model_that_keeps_failing_is_unhealthy_until_it_works(
    engine: ServingEngine, failing: Failing
) -> None:
    async def story() -> None:
        failing.fails = True
        for attempt in range(MAX_FAILURES):
            assert engine.healthy, attempt
            with pytest.raises(ApiError):
                await answers(engine.submit([request()]))
        assert not engine.healthy
        failing.fails = False
        await answers(engine.submit([request()]))
        assert engine.healthy

    asyncio.run(story())


def test_a_bad_request_that_comes_again_and_again_makes_no_server_unhealthy(
    wide: ServingEngine, failing: Failing
) -> None:
    failing.by = lambda tokens: bool((tokens == 300).any())

    async def story() -> None:
        for _ in range(MAX_FAILURES + 1):
            with pytest.raises(ApiError):
                await answers(wide.submit([Request([300, 5], 4)]))
        until = time.monotonic() + PATIENCE_S
        while not wide.healthy:
            assert time.monotonic() < until
            await asyncio.sleep(0.01)
        await answers(wide.submit([request()]))

    asyncio.run(story())


def test_the_queue_is_all_or_none(engine: ServingEngine, failing: Failing) -> None:
    async def story() -> None:
        failing.gate.clear()
        first = engine.submit([request()] * 3)
        with pytest.raises(
            ApiError, match=r"3 requests are running or waiting, 5 fit; try again in [12] s"
        ) as caught:
            engine.submit([request()] * 3)
        assert caught.value.status == 429
        assert caught.value.headers["Retry-After"] in ("1", "2")
        with pytest.raises(
            ApiError, match="6 answers in one request; this server takes at most 5"
        ) as caught:
            engine.submit([request()] * 6)
        assert caught.value.status == 400
        second = engine.submit([request(1)] * 2)
        failing.gate.set()
        assert [answer.generated for answer in await answers(first) + await answers(second)] == [
            4,
            4,
            4,
            1,
            1,
        ]

    asyncio.run(story())


def test_what_is_cancelled_frees_its_place(engine: ServingEngine, failing: Failing) -> None:
    async def story() -> None:
        failing.gate.clear()
        running, waiting = engine.submit([request(8000)] * 2), engine.submit([request(8000)] * 3)
        waiting.cancel()
        third = engine.submit([request()] * 3)
        running.cancel()
        running.cancel()
        failing.gate.set()
        assert [answer.generated for answer in await answers(third)] == [4, 4, 4]

    asyncio.run(story())


def test_an_abort_answers_what_runs_and_what_waits_and_refuses_what_comes(
    engine: ServingEngine, failing: Failing
) -> None:
    async def story() -> None:
        failing.gate.clear()
        tickets = [engine.submit([request()] * 2), engine.submit([request()] * 2)]
        engine.abort()
        for ticket in tickets:
            with pytest.raises(ApiError, match="the server is stopping") as caught:
                await answers(ticket)
            assert caught.value.status == 503
        with pytest.raises(ApiError, match="the server is stopping"):
            engine.submit([request()])

    asyncio.run(story())


def test_numbers_that_are_not_finite_fail_their_request_alone(
    engine: ServingEngine, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = loaded.model.hidden

    def broken_at_300(tokens: torch.Tensor, *arguments: object, **more: object) -> torch.Tensor:
        broken = (tokens == 300).any(dim=1)[:, None, None]
        return hidden(tokens, *arguments, **more).masked_fill(broken, float("nan"))  # type: ignore[arg-type]

    monkeypatch.setattr(loaded.model, "hidden", broken_at_300)

    async def story() -> None:
        broken, fine = engine.submit([Request([300], 4)]), engine.submit([Request([5], 4)])
        with pytest.raises(ApiError, match="not finite") as caught:
            await answers(broken)
        assert caught.value.status == 500
        assert len(await answers(fine)) == 1

    asyncio.run(story())


def test_a_loop_that_is_gone_harms_nobody(engine: ServingEngine, failing: Failing) -> None:
    async def leave() -> None:
        failing.gate.clear()
        engine.submit([request()])

    asyncio.run(leave())
    failing.gate.set()

    async def stay() -> None:
        assert len(await answers(engine.submit([request()]))) == 1

    asyncio.run(stay())


def test_every_kind_of_model_answers_what_a_failing_one_is_asked(
    folder: Path, tmp_path: Path
) -> None:
    folders = [
        make_summarizer(tmp_path / "t5"),
        make_classifier(tmp_path / "classes"),
        make_scorer(tmp_path / "score"),
        make_masked(tmp_path / "masks"),
    ]
    loads = [*map(load, folders), load(folder), load(folder, engine="transformers")]
    for loaded in loads:
        worker = loaded.serving_worker(2)
        worker.add(PROBE)
        pieces = [piece for _, piece in worker.step()]
        assert pieces[-1].finish in ("stop", "length"), loaded.kind
    read = Embedder(loaded.model, max_rows=2)  # as what is served for embeddings alone
    read.add(PROBE)
    ((_, vector),) = read.step()
    assert vector.finish == "stop"
