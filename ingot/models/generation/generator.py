"""Text generation by the native decoder with continuous batching: requests join and leave a running
batch, which does not change their completions.

One `step` prefills a share of the waiting prompts and then decodes one token for every running
request. Knows no HTTP and no tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ingot.base.errors import WrongInput
from ingot.models.generation.cache import KVCache, free_memory
from ingot.models.generation.loop import DecodingLoop, GenerationJob
from ingot.models.generation.prefixes import PrefixStore, in_common
from ingot.models.generation.recorded import Record, RecordedSteps, can_be_recorded
from ingot.models.generation.request import CompletionChunk, Decode, PromptToken
from ingot.models.generation.sampling import token_logprobs
from ingot.models.native.decoder import Decoder

# Prompt tokens read in one step: it bounds how long running requests wait between two tokens. An
# accelerator needs more of them to be busy.
PREFILL_TOKENS, PREFILL_TOKENS_FAST = 512, 2048
# Tokens of a prompt whose logits are in memory at once, if their log-probabilities are asked for.
SCORED_AT_ONCE = 64
SMALL_GROWTH = 2**28
"""Bytes by which the cache grows whatever is free, which nobody knows so exactly."""


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
        prefill_tokens: prompt tokens read in one step; None: as suits the device.
        prefixes: what earlier prompts left; None: every prompt is computed whole. It belongs to
            these weights and to this generator alone.
        all_say: whether all ranks say yes that run the same requests in step, to what this one
            answers; None: no other rank does.
        record: records decoding steps, on a GPU; None: each is computed kernel by kernel. The
            weights stay where they are as long as the generator is used.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        eos: Collection[int] = (),
        decode: Decode | None = None,
        max_rows: int = 8,
        prefill_tokens: int | None = None,
        prefixes: PrefixStore | None = None,
        record: Record | None = None,
        all_say: Callable[[bool], bool] | None = None,
    ) -> None:
        super().__init__(model.config, eos=eos, decode=decode, max_rows=max_rows)
        self._model, self._prefixes, self._all_say = model, prefixes, all_say
        slow = model.head_weight.device.type == "cpu"
        self._prefill_tokens = prefill_tokens or (PREFILL_TOKENS if slow else PREFILL_TOKENS_FAST)
        self._record = record if can_be_recorded(model) else None
        self._reset()

    @property
    def rows(self) -> int:
        """The number of requests that have a row."""
        return len(self._batch.decoding) + (self._batch.entering is not None)

    def _drop(self, job: GenerationJob) -> None:
        if job is self._batch.entering:
            self._batch.entering = None
            self._shorten()
        elif job in self._batch.decoding:
            self._leave(self._batch.decoding.index(job))

    def _reset(self) -> None:
        config = self._model.config
        self._batch = _Batch()
        if self._prefixes is not None:
            self._prefixes.clear()  # after a failure nobody knows what they hold
        self._cache = KVCache(
            config.windows,
            self._max_rows,
            config.max_position_embeddings,
            recorded=self._record is not None,
        )
        self._recorded = (
            None if self._record is None else RecordedSteps(self._model, self._cache, self._record)
        )

    def _admit(self) -> list[tuple[GenerationJob, CompletionChunk]]:
        """Prefill the prompts of the next jobs, or the next part of a long one; returns the first
        tokens of those that were read completely.
        """
        group = [self._batch.entering] if self._batch.entering else self._next_group()
        if not group:
            return []
        time = min(self._prefill_tokens, max(_unread(job) for job in group))
        rows = [list(job.request.prompt[job.read : job.read + time]) for job in group]
        # Shorter prompts are padded on the right: entries after a row's own tokens are masked, and
        # overwritten later.
        padded = [row + [0] * (time - len(row)) for row in rows]
        starts = [job.read for job in group]
        hidden = self._with_room(partial(self._hidden, len(self._batch.decoding), padded, starts))
        for job, row, states in zip(group, rows, hidden, strict=True):
            if job.request.prompt_logprobs is not None:
                self._score_prompt(job, states[: len(row)])
            job.read += len(row)
        for number, job in enumerate(group, len(self._batch.decoding)):
            self._keep(number, job)
        if _unread(group[0]):
            self._batch.entering = group[0]
            return []
        self._batch.entering = None
        last = torch.tensor([len(row) - 1 for row in rows], device=hidden.device)
        first = len(self._batch.decoding)
        self._batch.decoding += group
        states = hidden[torch.arange(len(rows), device=hidden.device), last]
        return self._choose(first, self._model.logits(states))

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
        single long prompt. What was read before is in their rows already.
        """
        if self._pending and not self.rows:
            self._make_room(len(self._pending[0].request.prompt))
        group: list[GenerationJob] = []
        longest = furthest = 0
        while self._pending and len(self._batch.decoding) + len(group) < self._max_rows:
            job = self._pending[0]
            known = self._known(job)
            if any(self._shares(job, other, known) for other in group):
                break  # once these are read, less is left of it
            longest, furthest = max(longest, len(job.request.prompt) - known), max(furthest, known)
            if group and (
                longest * (len(group) + 1) > self._prefill_tokens
                or furthest + longest > self._limits.max_position_embeddings
            ):
                break
            lengths = [len(each.request.prompt) for each in (*group, job)]
            if (self.rows or group) and not self._has_room(len(lengths), max(lengths)):
                break
            group.append(self._pending.popleft())
        if group:
            # For all of them at once: a cache that grows is copied.
            first = len(self._batch.decoding)
            longest = max(len(job.request.prompt) for job in group)
            self._cache.reserve(first + len(group), longest)
            for row, job in enumerate(group, first):
                self._restore(row, job)
        return group

    def _has_room(self, count: int, length: int) -> bool:
        """Whether `count` prompts of up to `length` tokens join the running ones now. All rows
        become as long as the longest, for which a long prompt waits until fewer of them run.
        """
        growth = self._cache.growth(len(self._batch.decoding) + count, length)
        room = growth <= SMALL_GROWTH or (
            growth <= free_memory(self._model.head_weight.device) // 2
        )
        # Ranks whose forward passes need each other must run equally many, whatever each has free.
        return room if self._all_say is None else self._all_say(room)

    def _make_room(self, length: int) -> None:
        """Before a prompt of `length` tokens that comes alone: one long prompt before it would
        leave all rows as long as itself. Recorded steps are worth what is a little too long.
        """
        if self._recorded is None or not self._cache.fits(length):
            self._cache.release()

    def _known(self, job: GenerationJob) -> int:
        """How many tokens of a prompt were read before."""
        if self._prefixes is None or not job.looks_up:
            return 0
        return self._prefixes.known(job.request.prompt, job.request.cache_salt)

    def _shares(self, job: GenerationJob, other: GenerationJob, known: int) -> bool:
        """Whether a job would find more than `known` tokens once another one's prompt is read."""
        one, two = job.request, other.request
        return (
            self._prefixes is not None
            and job.looks_up
            and one.cache_salt == two.cache_salt
            and in_common(one.prompt, two.prompt) > known
        )

    def _restore(self, row: int, job: GenerationJob) -> None:
        """Copy what was read before into a job's row."""
        if self._prefixes is None or not job.looks_up:
            return
        saved = self._prefixes.find(job.request.prompt, job.request.cache_salt)
        job.cached = 0
        if saved is not None:
            self._cache.restore(row, saved)
            job.read = job.cached = saved.shape[3]

    def _keep(self, row: int, job: GenerationJob) -> None:
        """Let later prompts find what is in a job's row."""
        if self._prefixes is not None:
            tokens = [*job.request.prompt, *job.written][: job.read]
            saved = partial(self._cache.saved, row)
            self._prefixes.add(tokens, job.request.cache_salt, saved)

    def _advance(self) -> list[tuple[GenerationJob, CompletionChunk]]:
        jobs = self._batch.decoding
        if not jobs:
            return []
        tokens, starts = [job.last for job in jobs], [job.read for job in jobs]
        logits = self._with_room(partial(self._next_logits, tokens, starts))
        for job in jobs:
            job.read += 1
        return self._choose(0, logits)

    def _next_logits(self, tokens: Sequence[int], starts: Sequence[int]) -> Tensor:
        """Logits `[B, V]` behind one token of each of the first rows."""
        logits = None if self._recorded is None else self._recorded.logits(tokens, starts)
        if logits is not None:
            return logits
        return self._model.logits(self._hidden(0, [[token] for token in tokens], starts)[:, 0])

    def _with_room(self, compute: Callable[[], Tensor]) -> Tensor:
        """What is computed, which writes the same into the rows when it is done again."""
        try:
            return compute()
        except torch.OutOfMemoryError:
            if self._prefixes is None or not self._prefixes.bytes:
                raise
            self._prefixes.clear()
            return compute()

    def _hidden(self, first: int, tokens: Sequence[Sequence[int]], starts: Sequence[int]) -> Tensor:
        """Hidden states `[B, T, D]` of new tokens `[B, T]` in the cache's rows from `first` on."""
        device = self._model.head_weight.device
        window = self._cache.window(first, starts, len(tokens[0]), device)
        return self._model.hidden(
            torch.tensor(tokens, device=device), window.positions, cache=window
        )

    def _choose(self, first: int, logits: Tensor) -> list[tuple[GenerationJob, CompletionChunk]]:
        """Sample the next token of the decoding jobs from row `first` on, given logits `[B, V]`;
        finished jobs leave the batch.
        """
        jobs = self._batch.decoding[first:]
        pieces = self._accept(jobs, logits)
        for row in reversed(range(len(jobs))):
            finish = pieces[row][1].finish
            if finish == "error":
                self._cache.wipe(first + row)
            elif finish:
                self._keep(first + row, jobs[row])
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
        self._shorten()

    def _shorten(self) -> None:
        """Give back the room that one long request has made in all rows, once it has left."""
        jobs = [*self._batch.decoding, *filter(None, [self._batch.entering])]
        if jobs:
            longest = max(max(job.read, len(job.request.prompt)) for job in jobs)
            self._cache.shorten(len(jobs), longest)


def _unread(job: GenerationJob) -> int:
    """How many tokens of a prompt are not in the cache yet."""
    return len(job.request.prompt) - job.read


def eos_ids(folder: Path, fallback: int | None = None) -> frozenset[int]:
    """The tokens that end a completion of the model in `folder`: those of `generation_config.json`,
    else `config.json`, else `fallback`. Raises WrongInput if what stands there is no id.
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
            ids = value if isinstance(value, list) else [value]
            if not all(type(token) is int for token in ids):
                raise WrongInput(
                    f"{folder / name}: eos_token_id is neither a token's id nor a list of ids; mend"
                    " it, or fetch or export the model again"
                )
            return frozenset(ids)
    return frozenset(() if fallback is None else [fallback])
