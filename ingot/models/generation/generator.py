"""Text generation by the native decoder with continuous batching, and its cache of keys and values:
requests join and leave a running batch, which does not change their completions.

One `step` prefills a share of the waiting prompts and then decodes one token for every running
request. Knows no HTTP and no tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ingot.base.errors import WrongInput
from ingot.models.generation.loop import DecodingLoop, GenerationJob
from ingot.models.generation.request import CompletionChunk, Decode, PromptToken
from ingot.models.generation.sampling import token_logprobs
from ingot.models.native.decoder import Decoder

LEAST_LENGTH = 64


class KVCache:
    """Rows for up to `max_rows` requests of up to `max_length` tokens, for layers that see
    `windows` tokens back (None: all).

    Nothing is allocated before the first keys arrive: their heads, dtype and device decide, so that
    sharded models and any number format work. Rows and lengths double when they run out. Rows in
    use are kept contiguous, so that attention reads them in place.

    Shapes: B rows of one pass, K key/value heads, T new tokens, S tokens to attend over, E head
    size.
    """

    def __init__(self, windows: Sequence[int | None], max_rows: int, max_length: int) -> None:
        self.windows, self.max_rows, self.max_length = windows, max_rows, max_length
        self._rows, self._length = 0, 0
        self._stores: list[tuple[Tensor, Tensor] | None] = [None] * len(windows)

    def window(
        self, first: int, starts: Sequence[int], time: int, device: torch.device
    ) -> CacheWindow:
        """The view of the cache for one forward pass: rows `first`, `first + 1`, ... each get
        `time` tokens from position `starts[i]` on.
        """
        needed = max(starts) + time
        if first + len(starts) > self.max_rows or needed > self.max_length:
            raise ValueError(
                f"rows {first} to {first + len(starts)} of {needed} tokens, {self.max_rows} of"
                f" {self.max_length} fit"
            )
        self._rows = _grown_size(self._rows, first + len(starts), 1, self.max_rows)
        self._length = _grown_size(self._length, needed, LEAST_LENGTH, self.max_length)
        return CacheWindow(self, first, starts, time, device)

    def store(self, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, each `[rows, K, length, E]`, large enough for every window
        handed out so far.
        """
        _, heads, _, size = like.shape
        old = self._stores[layer]
        if old is None or old[0].shape[0] < self._rows or old[0].shape[2] < self._length:
            # Zeros, not uninitialised memory: masked probabilities are 0, but 0 times NaN is NaN.
            made = tuple(like.new_zeros(self._rows, heads, self._length, size) for _ in range(2))
            if old is not None:
                rows, _, length, _ = old[0].shape
                for new, had in zip(made, old, strict=True):
                    new[:rows, :, :length] = had
            old = self._stores[layer] = (made[0], made[1])
        return old

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of row `source` to row `target`."""
        for store in self._stores:
            for tensor in store or ():
                tensor[target, :, :length] = tensor[source, :, :length]

    def wipe(self, row: int) -> None:
        """Zero a row that holds non-finite numbers, which would reach the next request in it even
        through the mask.
        """
        for store in self._stores:
            for tensor in store or ():
                tensor[row].zero_()


class CacheWindow:
    """The cache as the layers see it in one forward pass."""

    def __init__(
        self, cache: KVCache, first: int, starts: Sequence[int], time: int, device: torch.device
    ) -> None:
        self._cache, self._length = cache, max(starts) + time
        self._first, self._last = first, first + len(starts)
        begin = torch.tensor(starts, device=device)
        self.positions = begin[:, None] + torch.arange(time, device=device)  # [B, T]
        self._rows = torch.arange(self._first, self._last, device=device)[:, None]  # [B, 1]
        self._masks = {window: self._view(window, min(starts)) for window in set(cache.windows)}

    def _view(self, window: int | None, earliest: int) -> tuple[int, Tensor]:
        """The first stored token that any query of a layer with this window sees, and the mask
        `[B, 1, T, S]` from there on.
        """
        begin = 0 if window is None else max(0, earliest - window + 1)
        distance = self.positions[:, None, :, None] - torch.arange(
            begin, self._length, device=self.positions.device
        )
        return begin, distance >= 0 if window is None else (distance >= 0) & (distance < window)

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Store new keys and values `[B, K, T, E]`; returns the visible keys and values,
        `[B, K, S, E]` each, and the mask `[B, 1, T, S]`.
        """
        keys, values = self._cache.store(layer, k)
        keys[self._rows, :, self.positions] = k.transpose(1, 2)
        values[self._rows, :, self.positions] = v.transpose(1, 2)
        here = slice(self._first, self._last)
        begin, mask = self._masks[self._cache.windows[layer]]
        return keys[here, :, begin : self._length], values[here, :, begin : self._length], mask


def _grown_size(have: int, needed: int, least: int, most: int) -> int:
    """A size of at least `needed`, doubled from the present one, so that growing by ones is
    amortised.
    """
    if needed <= have:
        return have
    size = max(least, have)
    while size < needed:
        size *= 2
    return min(size, most)


# Prompt tokens read in one step: it bounds how long running requests wait between two tokens.
PREFILL_TOKENS = 512
# Tokens of a prompt whose logits are in memory at once, if their log-probabilities are asked for.
SCORED_AT_ONCE = 64


@dataclass
class _Batch:
    """Jobs by their row in the cache: the decoding ones first, then one whose prompt is
    partly read.
    """

    decoding: list[GenerationJob] = field(default_factory=list)
    entering: GenerationJob | None = None


class Generator(DecodingLoop):
    """Runs the native decoder with continuous batching.

    Args:
        model: in evaluation mode; the caller of `step` enables autocast if wanted.
        eos, decode, max_rows: as in `DecodingLoop`.
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
        super().__init__(model.config, eos=eos, decode=decode, max_rows=max_rows)
        self._model, self._prefill_tokens = model, prefill_tokens
        self._reset()

    @property
    def rows(self) -> int:
        """The number of requests that have a row."""
        return len(self._batch.decoding) + (self._batch.entering is not None)

    def _drop(self, job: GenerationJob) -> None:
        if job is self._batch.entering:
            self._batch.entering = None
        elif job in self._batch.decoding:
            self._leave(self._batch.decoding.index(job))

    def _reset(self) -> None:
        config = self._model.config
        self._batch = _Batch()
        self._cache = KVCache(config.windows, self._max_rows, config.max_position_embeddings)

    def _admit(self) -> list[tuple[GenerationJob, CompletionChunk]]:
        """Prefill the prompts of the next jobs, or the next part of a long one; returns the first
        tokens of those that were read completely.
        """
        group = [self._batch.entering] if self._batch.entering else self._next_group()
        if not group:
            return []
        start = group[0].read
        time = min(self._prefill_tokens, max(len(job.request.prompt) for job in group) - start)
        rows = [list(job.request.prompt[start : start + time]) for job in group]
        # Shorter prompts are padded on the right: entries after a row's own tokens are masked, and
        # overwritten later.
        hidden = self._forward(
            len(self._batch.decoding),
            [row + [0] * (time - len(row)) for row in rows],
            [start] * len(rows),
        )
        for job, row, states in zip(group, rows, hidden, strict=True):
            if job.request.prompt_logprobs is not None:
                self._score_prompt(job, states[: len(row)])
            job.read += len(row)
        if group[0].read < len(group[0].request.prompt):
            self._batch.entering = group[0]
            return []
        self._batch.entering = None
        last = torch.tensor([len(row) - 1 for row in rows], device=hidden.device)
        first = len(self._batch.decoding)
        self._batch.decoding += group
        return self._choose(first, hidden[torch.arange(len(rows), device=hidden.device), last])

    def _score_prompt(self, job: GenerationJob, states: Tensor) -> None:
        """Log-probabilities of the prompt's tokens behind those just read, from their hidden states
        `[T, D]`.
        """
        prompt, count = job.request.prompt, job.request.prompt_logprobs or 0
        if not job.read:
            job.prompt.append(PromptToken(prompt[0]))
        targets = prompt[job.read + 1 : job.read + 1 + len(states)]
        for start in range(0, len(targets), SCORED_AT_ONCE):
            ids = list(targets[start : start + SCORED_AT_ONCE])
            tokens = torch.tensor(ids, device=states.device)
            logits = self._model.logits(states[start : start + len(ids)])
            ranks = (logits > logits.gather(-1, tokens[:, None])).sum(dim=-1) + 1
            scored = token_logprobs(logits, tokens, count)
            for token, (logprob, top), rank in zip(ids, scored, ranks.tolist(), strict=True):
                job.prompt.append(PromptToken(token, logprob, top, rank))

    def _next_group(self) -> list[GenerationJob]:
        """Waiting jobs to prefill in one pass: together at most `prefill_tokens` with padding, or a
        single long prompt.
        """
        group: list[GenerationJob] = []
        longest = 0
        while self._pending and len(self._batch.decoding) + len(group) < self._max_rows:
            longest = max(longest, len(self._pending[0].request.prompt))
            if group and longest * (len(group) + 1) > self._prefill_tokens:
                break
            group.append(self._pending.popleft())
        return group

    def _advance(self) -> list[tuple[GenerationJob, CompletionChunk]]:
        jobs = self._batch.decoding
        if not jobs:
            return []
        hidden = self._forward(0, [[job.last] for job in jobs], [job.read for job in jobs])
        for job in jobs:
            job.read += 1
        return self._choose(0, hidden[:, 0])

    def _forward(
        self, first: int, tokens: Sequence[Sequence[int]], starts: Sequence[int]
    ) -> Tensor:
        """Hidden states `[B, T, D]` of new tokens `[B, T]` in the cache's rows from `first` on."""
        device = self._model.head_weight.device
        window = self._cache.window(first, starts, len(tokens[0]), device)
        return self._model.hidden(
            torch.tensor(tokens, device=device), window.positions, cache=window
        )

    def _choose(self, first: int, hidden: Tensor) -> list[tuple[GenerationJob, CompletionChunk]]:
        """Sample the next token of the decoding jobs from row `first` on, given hidden states
        `[B, D]`; finished jobs leave the batch.
        """
        jobs = self._batch.decoding[first:]
        pieces = self._accept(jobs, self._model.logits(hidden))
        for row in reversed(range(len(jobs))):
            finish = pieces[row][1].finish
            if finish == "error":
                self._cache.wipe(first + row)
            if finish:
                self._leave(first + row)
        return pieces

    def _leave(self, row: int) -> None:
        """Free a decoding row and close the gap: the last decoding row moves into it, and the
        partly read one moves up behind.
        """
        last = len(self._batch.decoding) - 1
        job = self._batch.decoding.pop()
        if row != last:
            self._cache.move(last, row, job.read)
            self._batch.decoding[row] = job
        if self._batch.entering:
            self._cache.move(last + 1, last, self._batch.entering.read)


def eos_ids(folder: Path, fallback: int | None = None) -> frozenset[int]:
    """The tokens that end a completion of the model in `folder`: those of `generation_config.json`,
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
