"""Requests that join a running batch of a sequence-to-sequence model, and leave it: their answers
are those they get alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from ingot.config.models.types import PROVED
from ingot.models.generation.loop import GenerationJob
from ingot.models.generation.request import Completion, CompletionChunk, join_chunks
from ingot.models.generation.sampling import Sampling
from ingot.models.generation.seq2seq import Seq2SeqRequest, answer_batch
from ingot.models.generation.seq2seq_generator import READ_TOKENS, Seq2SeqGenerator
from ingot.models.hf.config import read_hf_config
from ingot.models.hf.loading import init_hf_model
from ingot.models.hf.models import Seq2Seq
from tests import tolerances
from tests.models.generation.answers import generate
from tests.models.generation.test_seq2seq import SOURCES, spell
from tests.models.hf.shrunk import shrunk
from tests.models.hf.tiny import SEQ2SEQ, VOCAB, in_short
from tests.models.hf.tiny import varied as model_of

END = VOCAB - 3


def arriving(
    summarizer: Seq2SeqGenerator, requests: Sequence[Seq2SeqRequest], apart: int = 2
) -> list[Completion]:
    """The answers to requests of which one arrives every `apart` steps."""
    waiting, jobs = list(requests), list[GenerationJob]()
    parts: dict[GenerationJob, list[CompletionChunk]] = {}
    step = 0
    while waiting or summarizer.busy:
        if waiting and step % apart == 0:
            jobs.append(summarizer.add(waiting.pop(0)))
            parts[jobs[-1]] = []
        for job, piece in summarizer.step():
            parts[job].append(piece)
        step += 1
    return [join_chunks(parts[job]) for job in jobs]


def requests_of(count: int = len(SOURCES), **more: object) -> list[Seq2SeqRequest]:
    """Greedy and sampled ones, of answers of different length."""
    return [
        Seq2SeqRequest(SOURCES[row], 5 + (11 * row) % 17, Sampling(row % 2 * 0.9, 0.9, row), **more)  # type: ignore[arg-type]
        for row in range(count)
    ]


@pytest.mark.drawn(keep=3)
@pytest.mark.parametrize("name", in_short(SEQ2SEQ))
def test_an_answer_is_the_one_it_would_have_alone(name: str) -> None:
    model = model_of(name)
    requests = requests_of()
    alone = [answer_batch(model, [request], [END])[0] for request in requests]
    assert len({tuple(answer.ids) for answer in alone}) == len(alone)
    summarizer = Seq2SeqGenerator(model, decode=spell, eos=[END], max_rows=4)
    for apart in (1, 3):
        found = arriving(summarizer, requests, apart)
        assert [answer.text for answer in found] == [spell(answer.ids) for answer in alone]
        assert [(answer.generated, answer.finish) for answer in found] == [
            (answer.generated, answer.finish) for answer in alone
        ]


@pytest.mark.drawn(keep=3)
@pytest.mark.parametrize("kind", [kind for kind in PROVED["seq2seq"] if kind != "led"])
def test_every_proved_type_counts_the_positions_of_each_answer(kind: str) -> None:
    check_answers_that_arrive(kind)


def test_padding_of_shorter_answers_is_not_seen_by_a_decoder_that_asks_for_no_mask() -> None:
    check_answers_that_arrive("led")


def check_answers_that_arrive(kind: str) -> None:
    config = read_hf_config(shrunk(kind, "seq2seq"), "seq2seq", "here")
    model = init_hf_model(config, 3, torch.device("cpu")).eval()
    assert isinstance(model, Seq2Seq)
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():  # so that positions matter
        torch.nn.init.normal_(parameter, std=0.4, generator=generator)
    ids = [[5 + (row * place) % 40 for place in range(3 + 2 * row)] for row in range(5)]
    requests = [
        Seq2SeqRequest(source, 6 + row, Sampling(2.0 * (row % 2), seed=row))
        for row, source in enumerate(ids)
    ]
    alone = [answer_batch(model, [request])[0] for request in requests]
    found = arriving(Seq2SeqGenerator(model, decode=spell), requests)
    assert [answer.text for answer in found] == [spell(answer.ids) for answer in alone]


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_the_cache_has_the_name_that_transformers_gives_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`cache` since 5.24; whichever is installed, the other is put over it here."""
    model = model_of("t5")
    requests = requests_of(3)
    alone = [answer_batch(model, [request], [END])[0] for request in requests]
    of_both = {"past_key_values", "cache"}
    (own,) = of_both & set(inspect.signature(model.inner.forward).parameters)
    forward, made = model.inner.forward, model.inner.generate

    def renamed(**given: Any) -> Any:
        found = forward(**{own if key in of_both else key: each for key, each in given.items()})
        return found | {name: found[own]}

    def generated(*sources: Any, **given: Any) -> Any:
        with monkeypatch.context() as inside:
            inside.delitem(vars(model.inner), "forward")
            ids, processors, state = made(*sources, **given)
        return ids, processors, {name if key == own else key: state[key] for key in state}

    parameter = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)
    renamed.__signature__ = inspect.Signature([parameter])  # type: ignore[attr-defined]
    monkeypatch.setitem(vars(model.inner), "forward", renamed)
    monkeypatch.setitem(vars(model.inner), "generate", generated)
    found = arriving(Seq2SeqGenerator(model, decode=spell, eos=[END]), requests)
    assert [answer.text for answer in found] == [spell(answer.ids) for answer in alone]


def test_rows_hold_no_more_than_the_running_requests_need() -> None:
    """A finished answer's cache goes, and with it the places that only it needed."""
    model = model_of("bart")
    summarizer = Seq2SeqGenerator(model, decode=spell, eos=[VOCAB])  # which never comes
    summarizer.add(Seq2SeqRequest(SOURCES[4], 12))  # the longest source, the longest answer
    summarizer.step()
    summarizer.step()
    summarizer.add(Seq2SeqRequest(SOURCES[1], 40))
    rows = []
    while summarizer.busy != 1:
        summarizer.step()
        rows.append(summarizer.rows)
    assert max(rows) == 2
    cross = summarizer._rows
    assert cross is not None
    assert summarizer.rows == 1
    for layer in cross.cache.self_attention_cache.layers:
        assert layer.keys.shape[::2] == (1, cross.lengths[0])
    for layer in cross.cache.cross_attention_cache.layers:
        assert layer.values.shape[::2] == (1, len(SOURCES[1]))
    summarizer.clear()
    assert (summarizer.rows, summarizer._rows) == (0, None)


@pytest.mark.parametrize("name", ["t5-1.1", "bart"])
def test_who_leaves_early_changes_no_other_answer(name: str) -> None:
    model = model_of(name)
    wanted = generate(model, SOURCES[:4], 20, eos=[END])
    summarizer = Seq2SeqGenerator(model, decode=spell, eos=[END], max_rows=3)
    jobs = [summarizer.add(Seq2SeqRequest(source, 20)) for source in SOURCES[:4]]
    parts: dict[GenerationJob, list[CompletionChunk]] = {job: [] for job in jobs}
    for step in range(60):
        if step == 3:
            summarizer.cancel(jobs[0])
            summarizer.cancel(jobs[0])
        for job, piece in summarizer.step():
            parts[job].append(piece)
    assert summarizer.busy == 0
    assert parts[jobs[0]][-1].finish is None
    assert [join_chunks(parts[job]).text for job in jobs[1:]] == [spell(ids) for ids in wanted[1:]]


def test_log_probabilities_are_those_of_the_request_alone() -> None:
    model = model_of("t5-1.1")
    requests = [
        Seq2SeqRequest(source, 9, Sampling(row % 2, seed=row, logprobs=3))
        for row, source in enumerate(SOURCES)
    ]
    alone = [Seq2SeqGenerator(model, decode=spell, eos=[END]).run([one])[0] for one in requests]
    found = arriving(Seq2SeqGenerator(model, decode=spell, eos=[END], max_rows=5), requests)
    for one, other in zip(alone, found, strict=True):
        assert [token.id for token in one.tokens] == [token.id for token in other.tokens]
        mine, theirs = (
            torch.tensor([[token.logprob, *(p for _, p in token.top)] for token in answer.tokens])
            for answer in (one, other)
        )
        torch.testing.assert_close(mine, theirs, rtol=0, atol=tolerances.LOGITS_FP32)


def test_a_penalty_counts_what_is_written_from_the_first_token_on() -> None:
    """Of an answer, whose first token has none before it; the source is no part of it."""
    summarizer = Seq2SeqGenerator(model_of("t5-1.1"), decode=spell, eos=[END])
    plain, held = summarizer.run(
        [
            Seq2SeqRequest(SOURCES[2], 12, Sampling(logprobs=0, repetition_penalty=by))
            for by in (1.0, 1e4)
        ]
    )
    (first, *_), written = ([token.id for token in answer.tokens] for answer in (plain, held))
    assert written[0] == first
    assert len(set(written)) == len(written) > 3


def test_what_a_folder_forbids_counts_the_tokens_of_each_answer_alone() -> None:
    """A first token that is forced, n-grams that may not come again, or not from the source."""
    from transformers import GenerationConfig

    model = model_of("bart")
    plain = [answer_batch(model, [request], [END])[0] for request in requests_of()]
    for settings in (
        {"forced_bos_token_id": 9, "no_repeat_ngram_size": 1, "min_length": 9},
        {"encoder_no_repeat_ngram_size": 1, "renormalize_logits": True},
    ):
        model.inner.generation_config = GenerationConfig(eos_token_id=END, **settings)
        alone = [answer_batch(model, [request], [END])[0] for request in requests_of()]
        assert alone != plain
        found = arriving(Seq2SeqGenerator(model, decode=spell, eos=[END]), requests_of())
        assert [answer.text for answer in found] == [spell(answer.ids) for answer in alone]


def test_searches_and_unknown_types_run_between_two_tokens_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of("bart")
    requests = [*requests_of(3), Seq2SeqRequest(SOURCES[5], 6, beams=2), *requests_of(2)]
    alone = [spell(answer_batch(model, [one], [END])[0].ids) for one in requests]
    summarizer = Seq2SeqGenerator(model, decode=spell, eos=[END])
    assert [answer.text for answer in arriving(summarizer, requests)] == alone
    monkeypatch.setattr("ingot.models.generation.seq2seq_generator.PROVED", {"seq2seq": ()})
    assert [answer.text for answer in arriving(summarizer, requests)] == alone


@pytest.mark.parametrize("beams", [1, 2])
def test_a_special_token_that_is_a_stop_ends_a_search_too(beams: int) -> None:
    """Its text is in no answer."""
    model, asked = model_of("bart"), Seq2SeqRequest(SOURCES[5], 6, beams=beams)
    ids = answer_batch(model, [asked], [END])[0].ids
    place = next(place for place, token in enumerate(ids) if token not in ids[:place] and place)

    def decode(tokens: Sequence[int]) -> str:
        return spell([token for token in tokens if token != ids[place]])

    named = replace(asked, stop=("<end>",), special={"<end>": ids[place]})
    (found,) = Seq2SeqGenerator(model, decode=decode, eos=[END]).run([named])
    assert (found.text, found.finish) == (spell(ids[:place]), "stop")


@pytest.mark.parametrize("beams", [1, 2])
def test_an_answer_with_a_token_without_text_reads_as_all_of_it_decodes(beams: int) -> None:
    """A word behind it is not the first one, which alone has no space before it."""
    model, asked = model_of("bart"), Seq2SeqRequest(SOURCES[5], 6, beams=beams)
    ids = answer_batch(model, [asked], [END])[0].ids

    textless = next(token for token in ids[1:-1] if token not in (ids[0], ids[-1]))

    def decode(tokens: Sequence[int]) -> str:
        return " ".join(spell([token]) for token in tokens if token != textless)

    (found,) = Seq2SeqGenerator(model, decode=decode, eos=[END]).run([asked])
    assert found.text == decode(ids)


def test_sources_are_read_a_share_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("t5-1.1")
    summarizer = Seq2SeqGenerator(model, decode=spell, eos=[END])
    read, sizes = summarizer._compute.read, list[int]()
    monkeypatch.setattr(
        summarizer._compute, "read", lambda sources: sizes.append(len(sources)) or read(sources)
    )
    sources = [[5] * (READ_TOKENS // 2), [6] * (READ_TOKENS // 2), [7] * (READ_TOKENS + 1), [8]]
    answers = summarizer.run([Seq2SeqRequest(source, 4) for source in sources])
    assert sizes == [2, 1, 1]
    assert [answer.text for answer in answers] == [
        spell(generate(model, [source], 4, eos=[END])[0]) for source in sources
    ]


def test_numbers_that_are_not_finite_end_their_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model: Seq2Seq = model_of("bart")
    encoder = model.inner.model.encoder
    forward = encoder.forward

    def broken(input_ids: torch.Tensor, **more: object) -> object:
        out = forward(input_ids, **more)
        bad = (input_ids == 7).any(dim=1)[:, None, None]
        out.last_hidden_state = out.last_hidden_state.masked_fill(bad, float("nan"))
        return out

    wanted = generate(model, [[5, 6]], 6, eos=[END])[0]
    monkeypatch.setattr(encoder, "forward", broken)
    summarizer = Seq2SeqGenerator(model, decode=spell, eos=[END])
    found = summarizer.run([Seq2SeqRequest([5, 7], 6), Seq2SeqRequest([5, 6], 6)])
    assert found[0].finish == "error"
    assert (found[1].finish, found[1].text) == ("length", spell(wanted))
