"""Text generation with continuous batching: requests join and leave a running batch, and each gets
what it would get alone.

One `step` reads a share of the waiting prompts and then gives every running request its next token.
Stop strings and text need a `decode` function; without one, requests are tokens in, tokens out.
Knows no HTTP and no tokenizer.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from ingot.base.errors import WrongInput
from ingot.models.generation.cache import KVCache
from ingot.models.generation.request import (
    Completion,
    CompletionChunk,
    Decode,
    FinishReason,
    GeneratedToken,
    Request,
    TextStream,
    check_request,
    join_chunks,
)
from ingot.models.generation.sampling import SampledToken, UniformDraws, sample_tokens
from ingot.models.native.decoder import Decoder

# Prompt tokens read in one step: what running requests wait for at most between two of their
# tokens.
PREFILL_TOKENS = 512


class GenerationJob:
    """A request on its way through a `Generator`."""

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


@dataclass
class _Batch:
    """Jobs by the row of the cache that they live in: those that decode first, then one whose
    prompt is partly read.
    """

    decoding: list[GenerationJob] = field(default_factory=list)
    entering: GenerationJob | None = None


class Generator:
    """Runs up to `max_rows` requests together; more wait in the order in which they came.

    Args:
        model: in evaluation mode; whoever calls `step` sets autocast around it if wanted.
        eos: tokens that end a completion.
        decode: ids to text; None when nobody wants text or stop strings.
        prefill_tokens: prompt tokens read in one step.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        eos: Collection[int] = (),
        decode: Decode | None = None,
        max_rows: int = 8,
        prefill_tokens: int = PREFILL_TOKENS,
    ) -> None:
        self._model, self._eos, self._decode = model, frozenset(eos), decode
        self._max_rows, self._prefill_tokens = max_rows, prefill_tokens
        self._positions = model.config.max_position_embeddings
        self._cache = KVCache(model.config.windows, max_rows, self._positions)
        self._pending: deque[GenerationJob] = deque()
        self._batch = _Batch()

    @property
    def rows(self) -> int:
        """Requests that have a row."""
        return len(self._batch.decoding) + (self._batch.entering is not None)

    @property
    def busy(self) -> int:
        """Requests that are not finished."""
        return self.rows + len(self._pending)

    def add(self, request: Request) -> GenerationJob:
        """Queue a request. Raises WrongInput when it cannot be served; see `check_request`."""
        check_request(request, self._model.config)
        job = GenerationJob(request, self._decode)
        self._pending.append(job)
        return job

    @torch.inference_mode()
    def cancel(self, job: GenerationJob) -> None:
        """Forget a request, whatever it is at; one that is finished already is ignored."""
        if job in self._pending:
            self._pending.remove(job)
        elif job is self._batch.entering:
            self._batch.entering = None
        elif job in self._batch.decoding:
            self._leave(self._batch.decoding.index(job))

    def clear(self) -> None:
        """Forget every request and free the cache; what to do after `step` raised."""
        self._pending.clear()
        self._batch = _Batch()
        self._cache = KVCache(self._model.config.windows, self._max_rows, self._positions)

    @torch.inference_mode()
    def step(self) -> list[tuple[GenerationJob, CompletionChunk]]:
        """Read prompts, then decode one token for each running request. Several pieces of one job
        come in order.
        """
        pieces: list[tuple[GenerationJob, CompletionChunk]] = []
        if self._pending or self._batch.entering:
            pieces += self._prefill()
        if self._batch.decoding:
            pieces += self._next_tokens()
        return pieces

    def run(self, requests: Iterable[Request]) -> list[Completion]:
        """Complete `requests` and nothing else; the answers in their order."""
        jobs = [self.add(request) for request in requests]
        parts: dict[GenerationJob, list[CompletionChunk]] = {job: [] for job in jobs}
        while self.busy:
            for job, piece in self.step():
                parts[job].append(piece)
        return [join_chunks(parts[job]) for job in jobs]

    def _prefill(self) -> list[tuple[GenerationJob, CompletionChunk]]:
        """Read the prompts of the next few jobs, or the next share of a long one; first tokens of
        those read to the end.
        """
        group = [self._batch.entering] if self._batch.entering else self._next_group()
        if not group:
            return []
        start = group[0].read
        time = min(self._prefill_tokens, max(len(job.request.prompt) for job in group) - start)
        rows = [list(job.request.prompt[start : start + time]) for job in group]
        # Shorter prompts are padded behind: what is after a row's own tokens is never looked at,
        # and later overwritten.
        hidden = self._forward(
            len(self._batch.decoding),
            [row + [0] * (time - len(row)) for row in rows],
            [start] * len(rows),
        )
        for job, row in zip(group, rows, strict=True):
            job.read += len(row)
        if group[0].read < len(group[0].request.prompt):
            self._batch.entering = group[0]
            return []
        self._batch.entering = None
        last = torch.tensor([len(row) - 1 for row in rows], device=hidden.device)
        first = len(self._batch.decoding)
        self._batch.decoding += group
        return self._choose(first, hidden[torch.arange(len(rows), device=hidden.device), last])

    def _next_group(self) -> list[GenerationJob]:
        """Waiting jobs that one pass can read: together at most `prefill_tokens`, padding included,
        or one long prompt alone.
        """
        group: list[GenerationJob] = []
        longest = 0
        while self._pending and len(self._batch.decoding) + len(group) < self._max_rows:
            longest = max(longest, len(self._pending[0].request.prompt))
            if group and longest * (len(group) + 1) > self._prefill_tokens:
                break
            group.append(self._pending.popleft())
        return group

    def _next_tokens(self) -> list[tuple[GenerationJob, CompletionChunk]]:
        jobs = self._batch.decoding
        hidden = self._forward(0, [[job.last] for job in jobs], [job.read for job in jobs])
        for job in jobs:
            job.read += 1
        return self._choose(0, hidden[:, 0])

    def _forward(
        self, first: int, tokens: Sequence[Sequence[int]], starts: Sequence[int]
    ) -> Tensor:
        """Hidden states `[B, T, D]` of new tokens `[B, T]` of the cache's rows from `first` on."""
        device = self._model.head_weight.device
        window = self._cache.window(first, starts, len(tokens[0]), device)
        return self._model.hidden(
            torch.tensor(tokens, device=device), window.positions, cache=window
        )

    def _choose(self, first: int, hidden: Tensor) -> list[tuple[GenerationJob, CompletionChunk]]:
        """The next token of the decoding jobs from row `first` on; those that end leave the
        batch.
        """
        jobs = self._batch.decoding[first:]
        choices = sample_tokens(
            self._model.logits(hidden),
            [job.request.sampling for job in jobs],
            [job.dice.roll() for job in jobs],
        )
        pieces = [
            (
                job,
                job.accept(
                    choice, self._eos, self._positions - len(job.request.prompt) - job.generated - 1
                ),
            )
            for job, choice in zip(jobs, choices, strict=True)
        ]
        for row in reversed(range(len(jobs))):
            finish = pieces[row][1].finish
            if finish == "error":
                self._cache.wipe(first + row)
            if finish:
                self._leave(first + row)
        return pieces

    def _leave(self, row: int) -> None:
        """Free a decoding row and close the gap: the last decoding row moves in, and the entering
        one moves up behind.
        """
        last = len(self._batch.decoding) - 1
        job = self._batch.decoding.pop()
        if row != last:
            self._cache.move(last, row, job.read)
            self._batch.decoding[row] = job
        if self._batch.entering:
            self._cache.move(last + 1, last, self._batch.entering.read)


def eos_ids(folder: Path, fallback: int | None = None) -> frozenset[int]:
    """The tokens that end a completion of the model in `folder`: as `generation_config.json` says,
    else `config.json`, else `fallback`.
    """
    for name in ("generation_config.json", "config.json"):
        try:
            value = json.loads((folder / name).read_bytes()).get("eos_token_id")
        except FileNotFoundError:
            continue
        except (ValueError, AttributeError):
            raise WrongInput(
                f"{folder / name} is not a JSON mapping; fetch or export the model again"
            ) from None
        if value is not None:
            return frozenset(value if isinstance(value, list) else [value])
    return frozenset(() if fallback is None else [fallback])
