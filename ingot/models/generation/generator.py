"""Text generation by ingot's own decoder: requests join and leave a running batch, and each gets
what it would get alone.

One `step` reads a share of the waiting prompts and then gives every running request its next token.
Knows no HTTP and no tokenizer.
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

# Prompt tokens read in one step: what running requests wait for at most between two of their
# tokens.
PREFILL_TOKENS = 512


@dataclass
class _Batch:
    """Jobs by the row of the cache that they live in: those that decode first, then one whose
    prompt is partly read.
    """

    decoding: list[GenerationJob] = field(default_factory=list)
    entering: GenerationJob | None = None


class Generator(DecodingLoop):
    """Runs ingot's own decoder with continuous batching.

    Args:
        model: in evaluation mode; whoever calls `step` sets autocast around it if wanted.
        eos, decode, max_rows: as `DecodingLoop` has them.
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
        """Requests that have a row."""
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
        pieces = self._accept(jobs, self._model.logits(hidden))
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
