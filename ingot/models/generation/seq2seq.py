"""Text generation by sequence-to-sequence models, a batch of sources at a time; batching does not
change an answer.

transformers runs the search. The maximum length is always set here, so its default of twenty tokens
never applies. Of a model's `generation_config.json` only the settings that forbid or prefer texts
are used (`PREFERENCES`); lengths, beams and sampling come from the request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ingot.base.errors import WrongInput
from ingot.models.generation.request import (
    Completion,
    CompletionChunk,
    Decode,
    DecoderLimits,
    FinishReason,
    Request,
    check_ids,
    join_chunks,
)
from ingot.models.generation.rules import rules_of
from ingot.models.generation.sampling import Sampling, UniformDraws, sample_tokens
from ingot.models.hf.config import HFConfig
from ingot.models.hf.models import Seq2Seq

PREFERENCES = (
    "bos_token_id",
    "forced_bos_token_id",
    "bad_words_ids",
    "suppress_tokens",
    "begin_suppress_tokens",
    "min_length",
    "min_new_tokens",
    "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size",
    "repetition_penalty",
    "length_penalty",
    "early_stopping",
    "renormalize_logits",
)


@dataclass(frozen=True)
class Seq2SeqRequest(Request):
    """`prompt` is the framed source as the model reads it. `beams` above 1 use beam search (greedy
    requests only).
    """

    beams: int = 1


@dataclass(frozen=True)
class Seq2SeqAnswer:
    """An answer. `ids` are those of the text, without start and end tokens; `generated` includes
    the end token.
    """

    ids: list[int]
    generated: int
    finish: FinishReason


def generate(
    model: Seq2Seq,
    sources: Sequence[Sequence[int]],
    max_tokens: int,
    beams: int = 1,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int | None = None,
    eos: Collection[int] = (),
) -> list[list[int]]:
    """Generate the ids of a text for each source, in one batch. `eos`: tokens that end a text; the
    model's own if empty.

    Raises:
        WrongInput: a source that the model cannot read, or settings that exclude each other.
    """
    requests = [
        Seq2SeqRequest(source, max_tokens, Sampling(temperature, top_p, seed), (), beams)
        for source in sources
    ]
    for request in requests:
        check_seq2seq_request(request, model.config)
    return [written.ids for written in answer_batch(model, requests, eos)] if requests else []


@torch.inference_mode()
def answer_batch(
    model: Seq2Seq,
    requests: Sequence[Seq2SeqRequest],
    eos: Collection[int] = (),
    is_cancelled: Callable[[int], bool] = lambda row: False,
) -> list[Seq2SeqAnswer]:
    """Answer requests with the same `beams` (and, above 1, the same `max_tokens`) in one batch.
    `is_cancelled(row)` says whether a row was cancelled; it is called at each token.
    """
    device, beams = next(model.parameters()).device, requests[0].beams
    longest = max(len(request.prompt) for request in requests)
    tokens = torch.tensor(
        [
            [*request.prompt, *[model.config.pad] * (longest - len(request.prompt))]
            for request in requests
        ],
        device=device,
    )
    mask = torch.tensor(
        [[1] * len(request.prompt) + [0] * (longest - len(request.prompt)) for request in requests],
        device=device,
    )
    monitor = _SearchMonitor(requests, is_cancelled)
    own, was_training = model.inner.generation_config, model.training
    # transformers takes settings that are not passed, lengths and sampling included, from the
    # model's own generation configuration, so that is replaced meanwhile.
    model.inner.generation_config = _settings(
        model, max(request.max_tokens for request in requests), beams, eos
    )
    model.eval()
    try:
        rows = model.inner.generate(
            tokens,
            attention_mask=mask,
            logits_processor=[monitor.choose],
            stopping_criteria=[monitor.stop],
        )
        ends = _ends(model.inner.generation_config.eos_token_id)
    finally:
        model.inner.generation_config = own
        model.train(was_training)
    return [
        _answer(row[1:], request, ends, finite=index not in monitor.broken)
        for index, (row, request) in enumerate(zip(rows.tolist(), requests, strict=True))
    ]


class _SearchMonitor:
    """Hooks into transformers' search: samples tokens as decoders do, detects non-finite scores,
    and stops rows that were cancelled.
    """

    def __init__(
        self, requests: Sequence[Seq2SeqRequest], is_cancelled: Callable[[int], bool]
    ) -> None:
        self._requests, self._is_cancelled = requests, is_cancelled
        self._beams = requests[0].beams
        self._draws = [UniformDraws(request.sampling) for request in requests]
        # The source does not count as written: penalties are for what the answer repeats.
        self._rules = [rules_of(replace(request, prompt=()), ()) for request in requests]
        self._length = 0
        self.broken: set[int] = set()

    def choose(self, ids: Tensor, scores: Tensor) -> Tensor:
        """Scores `[B * beams, V]`; without beams, all but the sampled token's become -inf."""
        self._length += 1
        if self._beams > 1:
            finite = scores.amax(dim=-1).isfinite().view(-1, self._beams).all(dim=1).tolist()
            self._mark(finite)
            return scores
        choices = sample_tokens(
            scores,
            [request.sampling for request in self._requests],
            [draws.next_uniform() for draws in self._draws],
            self._rules,
        )
        self._mark([choice.finite for choice in choices])
        for rules, choice in zip(self._rules, choices, strict=True):
            if rules is not None:
                rules.push(choice.token)
        chosen = torch.tensor([[choice.token] for choice in choices], device=scores.device)
        return torch.full_like(scores, float("-inf")).scatter(1, chosen, 0.0)

    def stop(self, ids: Tensor, scores: object, **_: object) -> Tensor:
        """Which rows `[N]` must stop for another reason than their last token."""
        done = [
            index in self.broken
            or self._is_cancelled(index)
            or (self._beams == 1 and self._length >= request.max_tokens)
            for index, request in enumerate(self._requests)
        ]
        return torch.tensor(done, device=ids.device).repeat_interleave(ids.shape[0] // len(done))

    def _mark(self, finite: Sequence[bool]) -> None:
        self.broken.update(index for index, good in enumerate(finite) if not good)


def _settings(model: Seq2Seq, max_tokens: int, beams: int, eos: Collection[int]) -> object:
    own = model.inner.generation_config
    kept = {name: value for name in PREFERENCES if (value := getattr(own, name, None)) is not None}
    return type(own)(
        **kept,
        max_new_tokens=max_tokens,
        num_beams=beams,
        do_sample=False,
        eos_token_id=sorted(eos) or _ends(own.eos_token_id) or None,
        pad_token_id=model.config.pad,
        decoder_start_token_id=model.inner.config.decoder_start_token_id,
    )


def _ends(value: int | list[int] | None) -> list[int]:
    return [] if value is None else value if isinstance(value, list) else [value]


def _answer(
    row: list[int], request: Seq2SeqRequest, ends: Sequence[int], *, finite: bool
) -> Seq2SeqAnswer:
    row = row[: request.max_tokens]
    end = next((place for place, token in enumerate(row) if token in ends), None)
    finish: FinishReason = "error" if not finite else "length" if end is None else "stop"
    return Seq2SeqAnswer(row[:end], len(row) if end is None else end + 1, finish)


def check_seq2seq_request(request: Seq2SeqRequest, config: HFConfig) -> None:
    """Raises WrongInput if the model cannot serve the request."""
    check_text(request.prompt, config)
    check_ids([token for token, _ in request.sampling.logit_bias], config)
    if not 1 <= request.max_tokens <= config.target_positions:
        raise WrongInput(
            f"max_tokens is {request.max_tokens}, but the model writes from 1 to"
            f" {config.target_positions:,}; ask for one of these"
        )
    if request.beams < 1:
        raise WrongInput(f"beams is {request.beams}; ask for at least 1")
    if request.beams > 1 and request.sampling.temperature > 0:
        raise WrongInput(
            f"beams {request.beams} and temperature {request.sampling.temperature} exclude each"
            " other; set beams to 1 or temperature to 0"
        )
    if request.min_tokens or request.stop_ids or request.ignore_eos or request.constraint:
        raise WrongInput(
            "min_tokens, stop_token_ids, ignore_eos and response_format are for decoders; leave"
            " them out with this sequence-to-sequence model"
        )
    if request.beams > 1 and rules_of(request, ()) is not None:
        raise WrongInput(
            f"beams {request.beams} and penalties or logit_bias exclude each other; set beams to 1"
            " or leave these out"
        )


def check_text(ids: Sequence[int], config: DecoderLimits) -> None:
    """Raises WrongInput if a text has no tokens, more than the model has positions, or unknown ids.
    Texts are never truncated.
    """
    if not ids:
        raise WrongInput("the text is empty; give at least one character")
    if len(ids) > config.max_position_embeddings:
        raise WrongInput(
            f"the text has {len(ids):,} tokens, but the model has"
            f" {config.max_position_embeddings:,} positions; shorten it"
        )
    check_ids(ids, config)


class Seq2SeqJob:
    """A request inside a `Seq2SeqGenerator`."""

    def __init__(self, request: Seq2SeqRequest) -> None:
        self.request = request
        self.wanted = True


class Seq2SeqGenerator:
    """The interface of `Generator` for sequence-to-sequence models: waiting requests are batched,
    and a batch is generated completely in one step.

    Args:
        eos: tokens that end a text; the model's own if empty.
        decode: ids to text.
    """

    def __init__(
        self, model: Seq2Seq, *, decode: Decode, eos: Collection[int] = (), max_rows: int = 8
    ) -> None:
        self._model, self._decode, self._eos, self._max_rows = (
            model,
            decode,
            frozenset(eos),
            max_rows,
        )
        self._pending: deque[Seq2SeqJob] = deque()

    @property
    def busy(self) -> int:
        """The number of unfinished requests."""
        return len(self._pending)

    def add(self, request: Request) -> Seq2SeqJob:
        """Queue a request. Raises WrongInput if the model cannot serve it."""
        asked = request if isinstance(request, Seq2SeqRequest) else Seq2SeqRequest(**vars(request))
        check_seq2seq_request(asked, self._model.config)
        job = Seq2SeqJob(asked)
        self._pending.append(job)
        return job

    def interrupt(self, job: Seq2SeqJob) -> None:
        """Cancel a request from any thread, also while `step` runs: it is abandoned at the next
        token.
        """
        job.wanted = False

    def cancel(self, job: Seq2SeqJob) -> None:
        """Drop a request; one that is finished is ignored."""
        job.wanted = False
        if job in self._pending:
            self._pending.remove(job)

    def clear(self) -> None:
        """Drop every request; for use after `step` raised."""
        self._pending.clear()

    def step(self) -> list[tuple[Seq2SeqJob, CompletionChunk]]:
        """Generate the next batch: up to `max_rows` requests with the same beam settings. Returns
        one final chunk each.
        """
        group = self._next_group()
        if not group:
            return []
        written = answer_batch(
            self._model,
            [job.request for job in group],
            self._eos,
            lambda row: not group[row].wanted,
        )
        for job in group:
            self._pending.remove(job)
        return [
            (job, self._piece(job.request, answer))
            for job, answer in zip(group, written, strict=True)
        ]

    def run(self, requests: Iterable[Request]) -> list[Completion]:
        """Answer `requests` and nothing else; returns the answers in their order."""
        jobs = [self.add(request) for request in requests]
        pieces: dict[Seq2SeqJob, CompletionChunk] = {}
        while self.busy:
            pieces.update(self.step())
        return [join_chunks([pieces[job]]) for job in jobs]

    def _next_group(self) -> list[Seq2SeqJob]:
        def width(request: Seq2SeqRequest) -> tuple[int, int]:
            return (1, 0) if request.beams == 1 else (request.beams, request.max_tokens)

        same = [
            job for job in self._pending if width(job.request) == width(self._pending[0].request)
        ]
        return same[: self._max_rows]

    def _piece(self, request: Seq2SeqRequest, answer: Seq2SeqAnswer) -> CompletionChunk:
        text = self._decode(answer.ids) if answer.finish != "error" else ""
        places = [place for stop in request.stop if (place := text.find(stop)) >= 0]
        if places:
            return CompletionChunk(text[: min(places)], (), answer.generated, "stop")
        return CompletionChunk(text, (), answer.generated, answer.finish)
