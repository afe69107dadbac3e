"""Requests that go on after a step failed: what they say is what they would have said."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ingot.base.errors import Failed
from ingot.models.generation.generator import Generator
from ingot.models.generation.loop import DecodingLoop, GenerationJob
from ingot.models.generation.prefixes import PrefixStore
from ingot.models.generation.request import Completion, CompletionChunk, Request, join_chunks
from ingot.models.generation.sampling import Sampling
from ingot.models.generation.seq2seq import Seq2SeqRequest
from ingot.models.generation.seq2seq_generator import Seq2SeqGenerator
from ingot.models.hf.folder import load_model
from ingot.models.native.decoder import Decoder
from tests import tolerances
from tests.models.generation.test_generator import letters
from tests.models.generation.test_seq2seq import SOURCES, spell
from tests.models.hf.tiny import varied
from tests.models.tiny import make_reference


class FailsOnce:
    """A constraint that allows everything, and cannot be asked the `bad`th time."""

    failed = False

    def __init__(self, bad: int) -> None:
        self.left, self.taken = bad, list[int]()

    def apply(self, logits: Tensor) -> None:
        self.left -= 1
        if not self.left:
            raise ValueError("the rules failed")

    def push(self, token: int) -> None:
        self.taken.append(token)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    torch.set_num_threads(1)
    return load_model(make_reference(tmp_path_factory.mktemp("model")), device=torch.device("cpu"))


def finished(loop: DecodingLoop, requests: Sequence[Request]) -> tuple[list[Completion], int]:
    """All completions, and how often a step failed; after that everything goes on."""
    jobs = [loop.add(request) for request in requests]
    parts: dict[GenerationJob, list[CompletionChunk]] = {job: [] for job in jobs}
    failures = 0
    while loop.busy:
        try:
            for job, piece in loop.step():
                parts[job].append(piece)
        except ValueError:
            failures += 1
            loop.clear()
            for job in jobs:
                if not parts[job] or parts[job][-1].finish is None:
                    loop.resume(job)
    return [join_chunks(parts[job]) for job in jobs], failures


def requests_of(bad: int) -> list[Request]:
    drawn = Sampling(1.0, 0.95, 7, 2, repetition_penalty=1.3)
    return [
        Request([3, 4, 5], 12, Sampling(logprobs=0), prompt_logprobs=1),
        Request([8, 9], 12, drawn, constraint=FailsOnce(bad)),
        Request([6], 3, Sampling(1.0, seed=2)),
    ]


@pytest.mark.parametrize("bad", [1, 2, 6])
@pytest.mark.parametrize("kept", [False, True])
def test_requests_go_on_where_they_were(model: Decoder, bad: int, kept: bool) -> None:
    def loop() -> Generator:
        prefixes = PrefixStore(10**6, lambda: False) if kept else None
        return Generator(model, decode=letters, prefixes=prefixes)

    expected, none = finished(loop(), requests_of(99))
    found, failures = finished(loop(), requests_of(bad))
    assert (none, failures) == (0, 1)
    for one, other in zip(found, expected, strict=True):
        assert (one.text, one.finish, one.generated) == (other.text, other.finish, other.generated)
        assert [token.id for token in one.tokens] == [token.id for token in other.tokens]
        assert [token.offset for token in one.tokens] == [token.offset for token in other.tokens]
        assert [token.id for token in one.prompt] == [token.id for token in other.prompt]
        told = [token.logprob for token in one.tokens if token.logprob is not None]
        theirs = [token.logprob for token in other.tokens if token.logprob is not None]
        assert told == pytest.approx(theirs, abs=tolerances.LOGPROB)


def test_a_request_whose_token_was_taken_and_not_told_cannot_go_on(model: Decoder) -> None:
    bad: list[Any] = []

    def decode(ids: Sequence[int]) -> str:
        if bad:
            raise ValueError("no text")
        return letters(ids)

    loop = Generator(model, decode=decode)
    job = loop.add(Request([3, 4, 5], 9))
    loop.step()
    bad.append(True)
    with pytest.raises(ValueError, match="no text"):
        loop.step()
    loop.clear()
    with pytest.raises(Failed, match="send the request again"):
        loop.resume(job)


def test_an_answer_to_a_source_begins_again_unless_it_was_begun() -> None:
    loop = Seq2SeqGenerator(varied("t5-1.1"), decode=spell, eos=[0])
    alone = loop.run([Seq2SeqRequest(SOURCES[0], 5)])
    job = loop.add(Seq2SeqRequest(SOURCES[0], 5))
    loop.clear()
    loop.resume(job)
    pieces = []
    while loop.busy:
        pieces += [piece for _, piece in loop.step()]
    assert join_chunks(pieces).text == alone[0].text
    begun = loop.add(Seq2SeqRequest(SOURCES[0], 5))
    loop.step()
    loop.clear()
    with pytest.raises(Failed, match="send the request again"):
        loop.resume(begun)
