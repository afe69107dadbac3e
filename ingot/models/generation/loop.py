"""The decoding loop shared by all decoders: requests wait in a queue, join between two steps, get
one token per step, and leave when they finish.

The server calls `step`, so that requests can come and go in between; `run` steps until all are
done. Knows no model, no cache and no tokenizer: `Generator` adds the native decoder and its cache,
`TransformersGenerator` a transformers model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ingot.base.errors import Failed
from ingot.models.device import kernels_for_any_length
from ingot.models.generation.request import (
    Completion,
    CompletionChunk,
    Decode,
    DecoderLimits,
    FinishReason,
    GeneratedToken,
    PromptToken,
    Request,
    TextStream,
    check_request,
    join_chunks,
)
from ingot.models.generation.rules import rules_of
from ingot.models.generation.sampling import SampledToken, UniformDraws, sample_tokens


class GenerationJob:
    """A request inside a `DecodingLoop`, of a model that ends with `eos`."""

    def __init__(self, request: Request, decode: Decode | None, eos: Collection[int] = ()) -> None:
        self.request = request
        self.ends = request.ends(eos)
        self.tells_end = request.prompt_logprobs is not None
        self.rules = rules_of(request, self.ends)
        self.read = 0  # tokens in the cache
        self.cached: int | None = None  # of the prompt's, read for others before; None: not asked
        self.written: list[int] = []  # behind the request's prompt
        self.last = 0  # the newest token, not in the cache yet
        self.generated = 0
        self.told = 0  # of those generated, the ones whose chunks a step has returned
        self.given = 0  # characters given out
        self.draws = UniformDraws(request.sampling)
        self.roll: float | None = None  # the random number of the next token, once it is drawn
        self.stream = (
            TextStream(decode, request.prompt, request.stop, request.unstopped, request.special)
            if decode
            else None
        )
        self.waiting: list[GeneratedToken] = []  # tokens whose text is not given out yet
        self.prompt: list[PromptToken] = []  # until they are given out

    @property
    def looks_up(self) -> bool:
        """Whether tokens that were read for others need not be read again: log-probabilities of a
        prompt need all of its positions.
        """
        return self.request.prompt_logprobs is None

    def begin_again(self) -> None:
        """Let the prompt, and behind it what is written, be read again.

        Raises:
            Failed: the last step ended in the midst of this request's token.
        """
        if self.told != self.generated:
            raise Failed("a step failed within a token of this request; send the request again")
        asked = None if self.generated else self.request.prompt_logprobs  # they are told by now
        prompt = [*self.request.prompt, *self.written]
        self.request = replace(self.request, prompt=prompt, prompt_logprobs=asked)
        self.written, self.prompt, self.read = [], [], 0

    def next_roll(self) -> float:
        """The random number of the next token, the same until that is accepted."""
        if self.roll is None:
            self.roll = self.draws.next_uniform()
        return self.roll

    def accept(self, choice: SampledToken, room: int) -> CompletionChunk:
        """Take the next token. `room`: how many more tokens fit the model's positions."""
        chunk = self._taken(choice, room)
        if self.generated == 1 and self.cached is not None:
            chunk = replace(chunk, cached=self.cached)
        if self.prompt:
            chunk, self.prompt = replace(chunk, prompt=tuple(self.prompt)), []
        return chunk

    def _taken(self, choice: SampledToken, room: int) -> CompletionChunk:
        self.last, self.roll = choice.token, None
        self.written.append(choice.token)
        self.generated += 1
        if self.rules is not None:
            self.rules.push(choice.token)
        if not choice.finite or (self.rules is not None and self.rules.failed):
            return self._finish("error", "")
        if choice.token in self.ends:
            if self.tells_end:
                place = self.stream.length if self.stream else 0
                end = GeneratedToken(choice.token, place, choice.logprob, choice.top)
                self.waiting.append(end)
            return self._finish("stop", self.stream.finish() if self.stream else "")
        text = self._read(choice)
        if self.stream and self.stream.stopped:
            self.waiting = [token for token in self.waiting if token.offset < self.stream.length]
            return self._finish("stop", text)
        if self.generated == self.request.max_tokens or room == 0:
            return self._finish("length", text + (self.stream.finish() if self.stream else ""))
        self.given += len(text)
        ready = (
            self.waiting
            if self.stream is None
            else [token for token in self.waiting if token.offset < self.given]
        )
        self.waiting = self.waiting[len(ready) :]
        return CompletionChunk(text, tuple(ready), self.generated)

    def _read(self, choice: SampledToken) -> str:
        """Append the token to the waiting ones, with the offset where its text begins; returns the
        text that it makes final.
        """
        before, unsettled = (self.stream.length, self.stream.unsettled) if self.stream else (0, 0)
        self.waiting.append(
            GeneratedToken(choice.token, before + unsettled, choice.logprob, choice.top)
        )
        text = self.stream.push(choice.token) if self.stream else ""
        if self.stream and self.stream.length > before:
            # Tokens that turn out to be parts of the last character begin at it, not after it.
            last = self.stream.length - 1
            self.waiting = [
                replace(token, offset=last) if token.offset > last else token
                for token in self.waiting
            ]
        return text

    def _finish(self, finish: FinishReason, text: str) -> CompletionChunk:
        return CompletionChunk(text, tuple(self.waiting), self.generated, finish)


class DecodingLoop(ABC):
    """Queue, steps and ends of up to `max_rows` concurrent requests; further ones wait in order of
    arrival. A subclass computes logits and keeps the cache.

    Args:
        limits: vocabulary and positions of the model.
        eos: tokens that end a completion.
        decode: ids to text; None if neither text nor stop strings are needed.
    """

    def __init__(
        self,
        limits: DecoderLimits,
        *,
        eos: Collection[int] = (),
        decode: Decode | None = None,
        max_rows: int = 8,
    ) -> None:
        self._limits, self._eos, self._decode = limits, frozenset(eos), decode
        self._max_rows = max_rows
        self._pending: deque[GenerationJob] = deque()
        self._failure: Exception | None = None

    @property
    @abstractmethod
    def rows(self) -> int:
        """The number of requests that have a row of the batch."""

    @abstractmethod
    def _admit(self) -> list[tuple[GenerationJob, CompletionChunk]]:
        """Give free rows to waiting requests and prefill (a part of) their prompts."""

    @abstractmethod
    def _advance(self) -> list[tuple[GenerationJob, CompletionChunk]]:
        """Decode one token for each request whose prompt has been read."""

    @abstractmethod
    def _drop(self, job: GenerationJob) -> None:
        """Drop a request that has a row; one that is finished is ignored."""

    @abstractmethod
    def _reset(self) -> None:
        """Free all rows and the cache."""

    @property
    def busy(self) -> int:
        """The number of unfinished requests."""
        return self.rows + len(self._pending)

    def add(self, request: Request) -> GenerationJob:
        """Queue a request. Raises WrongInput if it cannot be served; see `check_request`."""
        check_request(request, self._limits)
        job = GenerationJob(request, self._decode, self._eos)
        self._pending.append(job)
        return job

    @torch.inference_mode()
    def cancel(self, job: GenerationJob) -> None:
        """Drop a request in any state; one that is finished is ignored."""
        if job in self._pending:
            self._pending.remove(job)
        else:
            self._drop(job)

    def clear(self) -> None:
        """Drop every request and free the cache; for use after `step` raised."""
        self._pending.clear()
        self._failure = None
        self._reset()

    def resume(self, job: GenerationJob) -> None:
        """Queue a request that `clear` has dropped again: it goes on behind what it has written.

        Raises:
            Failed: the step that raised ended in the midst of its token.
        """
        job.begin_again()
        self._pending.append(job)

    @kernels_for_any_length
    @torch.inference_mode()
    def step(self) -> list[tuple[GenerationJob, CompletionChunk]]:
        """Admit requests, then decode one token for each running one. Several chunks of one job are
        in order. An error after the first chunks is raised by the next step, so that none is lost.
        """
        if self._failure is not None:
            raise self._failure
        made = self._admit()
        try:
            made += self._advance()
        except Exception as error:
            if not made:
                raise
            self._failure = error
        for job, piece in made:
            job.told = piece.generated
        return made

    def run(self, requests: Iterable[Request]) -> list[Completion]:
        """Complete `requests` and nothing else; returns the completions in their order."""
        jobs = [self.add(request) for request in requests]
        parts: dict[GenerationJob, list[CompletionChunk]] = {job: [] for job in jobs}
        while self.busy:
            for job, piece in self.step():
                parts[job].append(piece)
        return [join_chunks(parts[job]) for job in jobs]

    def _accept(
        self, jobs: Sequence[GenerationJob], logits: Tensor
    ) -> list[tuple[GenerationJob, CompletionChunk]]:
        """Sample the next token of each of `jobs` from logits `[B, V]`."""
        choices = sample_tokens(
            logits,
            [job.request.sampling for job in jobs],
            [job.next_roll() for job in jobs],
            [job.rules for job in jobs],
        )
        positions = self._limits.max_position_embeddings
        return [
            (job, job.accept(choice, positions - len(job.request.prompt) - len(job.written) - 1))
            for job, choice in zip(jobs, choices, strict=True)
        ]
