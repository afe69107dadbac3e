"""Requests to sequence-to-sequence models, and their answers a batch of sources at a time; batching
does not change an answer. For requests that come and go see `seq2seq_generator`.

transformers runs the search. The maximum length is always set here, so its default of twenty tokens
never applies. Of a model's `generation_config.json` only the settings that forbid or prefer texts
are used (`PREFERENCES`); lengths, beams and sampling come from the request.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ingot.base.errors import WrongInput
from ingot.models.device import kernels_for_any_length
from ingot.models.generation.request import (
    DecoderLimits,
    FinishReason,
    Request,
    TooLong,
    check_ids,
)
from ingot.models.generation.rules import rules_of
from ingot.models.generation.sampling import UniformDraws, sample_tokens
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


@kernels_for_any_length
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
    was_training = model.training
    model.eval()
    try:
        with configured(model, max(request.max_tokens for request in requests), beams, eos):
            rows = model.inner.generate(
                tokens,
                attention_mask=mask,
                logits_processor=[monitor.choose],
                stopping_criteria=[monitor.stop],
            )
    finally:
        model.train(was_training)
    ends = ends_of(model, eos)
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


@contextmanager
def configured(model: Seq2Seq, max_tokens: int, beams: int, eos: Collection[int]) -> Iterator[None]:
    """Meanwhile the model has a generation configuration of ours. transformers takes settings that
    are not passed, lengths and sampling included, from there.
    """
    own = model.inner.generation_config
    kept = {name: value for name in PREFERENCES if (value := getattr(own, name, None)) is not None}
    model.inner.generation_config = type(own)(
        **kept,
        max_new_tokens=max_tokens,
        num_beams=beams,
        do_sample=False,
        eos_token_id=sorted(ends_of(model, eos)) or None,
        pad_token_id=model.config.pad,
        decoder_start_token_id=model.inner.config.decoder_start_token_id,
    )
    try:
        yield
    finally:
        model.inner.generation_config = own


def ends_of(model: Seq2Seq, eos: Collection[int]) -> frozenset[int]:
    """The tokens that end a text: `eos`, or the model's own if that is empty."""
    own = model.inner.generation_config.eos_token_id
    return frozenset(eos) or frozenset(
        () if own is None else own if isinstance(own, list) else [own]
    )


def _answer(
    row: list[int], request: Seq2SeqRequest, ends: Collection[int], *, finite: bool
) -> Seq2SeqAnswer:
    row = row[: request.max_tokens]
    end = next((place for place, token in enumerate(row) if token in ends), None)
    finish: FinishReason = "error" if not finite else "length" if end is None else "stop"
    return Seq2SeqAnswer(row[:end], len(row) if end is None else end + 1, finish)


def check_seq2seq_request(request: Seq2SeqRequest, config: HFConfig) -> None:
    """Raises WrongInput if the model cannot serve the request."""
    check_text(request.prompt, config)
    check_ids([token for token, _ in request.sampling.logit_bias], config, "logit_bias: token")
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
    """Raises WrongInput if a text has no tokens or unknown ids, TooLong if more than positions.
    Texts are never truncated.
    """
    if not ids:
        raise WrongInput("the text is empty; give at least one character")
    if len(ids) > config.max_position_embeddings:
        raise TooLong(
            f"the text has {len(ids):,} tokens, but the model has"
            f" {config.max_position_embeddings:,} positions; shorten it",
            config.max_position_embeddings,
        )
    check_ids(ids, config)
