"""The loop that every decoder runs in, whoever computes its logits: requests wait in a queue, join
between two steps, get one token a step, and leave when they end.

The server calls `step` itself, so that requests come and go meanwhile; `run` calls it to the end.
Knows no model, no cache and no tokenizer: `Generator` has ingot's own decoder and its cache,
`TransformersGenerator` a model of transformers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ingot.models.generation.request import (
    Completion,
    CompletionChunk,
    Decode,
    DecoderLimits,
    FinishReason,
    GeneratedToken,
    Request,
    TextStream,
    check_request,
    join_chunks,
)
from ingot.models.generation.sampling import SampledToken, UniformDraws, sample_tokens


class GenerationJob:
    """A request on its way through a `DecodingLoop`."""

    def __init__(self, request: Request, decode: Decode | None) -> None:
        self.request = request
        self.read = 0  # tokens in the cache
        self.last = 0  # the newest token, not in the cache yet
        self.generated = 0
        self.given = 0  # characters given out
        self.dice = UniformDraws(request.sampling)
        self.stream = TextStream(decode, request.prompt, request.stop) if decode else None
        self.waiting: list[GeneratedToken] = []  # tokens whose text is not given out yet

    def accept(self, choice: SampledToken, eos: Collection[int], room: int) -> CompletionChunk:
        """Take in the next token. `room`: how many more the model's positions hold."""
        self.last = choice.token
        self.generated += 1
        if not choice.finite:
            return self._finish("error", "")
        if choice.token in eos:
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
        """Put the token among the waiting ones, where its text begins; answer the text that it
        makes certain.
        """
        before, unsettled = (self.stream.length, self.stream.unsettled) if self.stream else (0, 0)
        self.waiting.append(
            GeneratedToken(choice.token, before + unsettled, choice.logprob, choice.top)
        )
        text = self.stream.push(choice.token) if self.stream else ""
        if self.stream and self.stream.length > before:
            # Tokens that turned out to be parts of the last character begin with it, not behind it.
            last = self.stream.length - 1
            self.waiting = [
                replace(token, offset=last) if token.offset > last else token
                for token in self.waiting
            ]
        return text

    def _finish(self, finish: FinishReason, text: str) -> CompletionChunk:
        return CompletionChunk(text, tuple(self.waiting), self.generated, finish)


class DecodingLoop(ABC):
    """Queue, steps and ends of up to `max_rows` requests together; more wait in the order in which
    they came. A subclass computes logits and keeps the cache.

    Args:
        limits: vocabulary and positions of the model.
        eos: tokens that end a completion.
        decode: ids to text; None when nobody wants text or stop strings.
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

    @property
    @abstractmethod
    def rows(self) -> int:
        """Requests that have a row of the batch."""

    @abstractmethod
    def _admit(self) -> list[tuple[GenerationJob, CompletionChunk]]:
        """Give rows to waiting requests, if there are any free, and read (a share of) prompts."""

    @abstractmethod
    def _advance(self) -> list[tuple[GenerationJob, CompletionChunk]]:
        """One token for each request whose prompt is read."""

    @abstractmethod
    def _drop(self, job: GenerationJob) -> None:
        """Forget a request that has a row; one that is finished already is ignored."""

    @abstractmethod
    def _reset(self) -> None:
        """Free all rows and the cache."""

    @property
    def busy(self) -> int:
        """Requests that are not finished."""
        return self.rows + len(self._pending)

    def add(self, request: Request) -> GenerationJob:
        """Queue a request. Raises WrongInput when it cannot be served; see `check_request`."""
        check_request(request, self._limits)
        job = GenerationJob(request, self._decode)
        self._pending.append(job)
        return job

    @torch.inference_mode()
    def cancel(self, job: GenerationJob) -> None:
        """Forget a request, whatever it is at; one that is finished already is ignored."""
        if job in self._pending:
            self._pending.remove(job)
        else:
            self._drop(job)

    def clear(self) -> None:
        """Forget every request and free the cache; what to do after `step` raised."""
        self._pending.clear()
        self._reset()

    @torch.inference_mode()
    def step(self) -> list[tuple[GenerationJob, CompletionChunk]]:
        """Let requests in, then decode one token for each running one. Several pieces of one job
        come in order.
        """
        return self._admit() + self._advance()

    def run(self, requests: Iterable[Request]) -> list[Completion]:
        """Complete `requests` and nothing else; the answers in their order."""
        jobs = [self.add(request) for request in requests]
        parts: dict[GenerationJob, list[CompletionChunk]] = {job: [] for job in jobs}
        while self.busy:
            for job, piece in self.step():
                parts[job].append(piece)
        return [join_chunks(parts[job]) for job in jobs]

    def _accept(
        self, jobs: Sequence[GenerationJob], logits: Tensor
    ) -> list[tuple[GenerationJob, CompletionChunk]]:
        """The next token of each of `jobs`, by their logits `[B, V]`."""
        choices = sample_tokens(
            logits, [job.request.sampling for job in jobs], [job.dice.roll() for job in jobs]
        )
        positions = self._limits.max_position_embeddings
        return [
            (
                job,
                job.accept(
                    choice, self._eos, positions - len(job.request.prompt) - job.generated - 1
                ),
            )
            for job, choice in zip(jobs, choices, strict=True)
        ]
