"""Text generation by the native decoder with continuous batching: requests join and leave a running
batch, which does not change their completions.

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
from ingot.models.generation.cache import KVCache
from ingot.models.generation.loop import DecodingLoop, GenerationJob
from ingot.models.generation.request import CompletionChunk, Decode
from ingot.models.native.decoder import Decoder

# Prompt tokens read in one step: it bounds how long running requests wait between two tokens.
PREFILL_TOKENS = 512


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
