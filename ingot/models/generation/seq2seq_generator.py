"""Text generation by sequence-to-sequence models with continuous batching: requests join and leave
a running batch, which does not change their answers.

Searches with beams, and types of models whose rows are not proved to join, are answered in whole
batches by transformers (`answer_batch`), between two tokens of the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from ingot.base.errors import Failed
from ingot.config.models.types import PROVED
from ingot.models.generation.loop import DecodingLoop, GenerationJob
from ingot.models.generation.request import (
    CompletionChunk,
    Decode,
    ModelLimits,
    Request,
    TextStream,
)
from ingot.models.generation.seq2seq import (
    Seq2SeqAnswer,
    Seq2SeqRequest,
    answer_batch,
    check_seq2seq_request,
    configured,
    ends_of,
)
from ingot.models.generation.seq2seq_rows import OpenedRows, Seq2SeqRows, Seq2SeqStep
from ingot.models.hf.models import Seq2Seq

# Tokens of sources read in one step, with padding: it bounds how long running requests wait.
READ_TOKENS = 512


class Seq2SeqJob(GenerationJob):
    """A request inside a `Seq2SeqGenerator`. The source is no part of what is written: text and
    penalties begin behind it.
    """

    def __init__(self, asked: Seq2SeqRequest, decode: Decode, eos: Collection[int]) -> None:
        super().__init__(replace(asked, prompt=()), decode, eos)
        self.asked = asked
        self.wanted = True
        self.opened: OpenedRows | None = None  # the rows it joined with, and its place there
        self.place = 0

    def begin_again(self) -> None:
        """Let the source be read again. Raises Failed where text is written: the decoder would have
        to read that, too.
        """
        if self.generated:
            raise Failed("a step failed while this answer was written; send the request again")
        super().begin_again()

    def processed(self, logits: Tensor) -> Tensor:
        """The next token's logits `[1, V]` as transformers' own processors change them, by the
        tokens of this answer alone.
        """
        if self.opened is None or not self.opened.processors:
            return logits
        written = self.opened.ids.new_tensor([self.written])
        ids = torch.cat((self.opened.ids[self.place : self.place + 1], written), dim=1)
        changed: Tensor = self.opened.processors(ids, logits)
        return changed


class Seq2SeqGenerator(DecodingLoop):
    """Runs a sequence-to-sequence model in evaluation mode with continuous batching.

    Args:
        eos: tokens that end a text; the model's own if empty.
        decode, max_rows: as in `DecodingLoop`.
        decode_for: how the answer to a source becomes text, if it depends on that.
    """

    def __init__(
        self,
        model: Seq2Seq,
        *,
        decode: Decode,
        eos: Collection[int] = (),
        max_rows: int = 8,
        decode_for: Callable[[Sequence[int]], Decode] | None = None,
    ) -> None:
        limits = ModelLimits(model.config.vocab_size, model.config.target_positions)
        super().__init__(limits, eos=ends_of(model, eos), decode=decode, max_rows=max_rows)
        self._model = model
        self._decode_for = decode_for or (lambda source: decode)
        self._compute = Seq2SeqStep(model)
        self._reset()

    @property
    def rows(self) -> int:
        """The number of requests that have a row."""
        return len(self._jobs)

    def add(self, request: Request) -> Seq2SeqJob:
        """Queue a request. Raises WrongInput if the model cannot serve it."""
        asked = request if isinstance(request, Seq2SeqRequest) else Seq2SeqRequest(**vars(request))
        check_seq2seq_request(asked, self._model.config)
        job = Seq2SeqJob(asked, self._decode_for(asked.prompt), self._eos)
        self._pending.append(job)
        return job

    def interrupt(self, job: Seq2SeqJob) -> None:
        """Give up a request from any thread, also while `step` searches with beams for it: it is
        abandoned at the next token.
        """
        job.wanted = False

    def _reset(self) -> None:
        self._jobs: list[Seq2SeqJob] = []  # by their row
        self._rows: Seq2SeqRows | None = None

    def _drop(self, job: GenerationJob) -> None:
        if job in self._jobs:
            self._keep([row for row, other in enumerate(self._jobs) if other is not job])

    def _keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these."""
        if not rows:
            self._reset()
        elif len(rows) < len(self._jobs):
            assert self._rows is not None
            self._rows.keep(rows)
            self._jobs = [self._jobs[row] for row in rows]

    @property
    def _queue(self) -> deque[Seq2SeqJob]:
        return cast("deque[Seq2SeqJob]", self._pending)  # `add` puts no others there

    def _admit(self) -> list[tuple[GenerationJob, CompletionChunk]]:
        if self._queue and not self._joins(self._queue[0]):
            return self._search()
        group = self._next_group()
        if not group:
            return []
        with configured(self._model, 1, 1, self._eos):
            opened = self._compute.read([job.asked.prompt for job in group])
        for place, job in enumerate(group):
            job.opened, job.place = opened, place
        first = len(self._jobs)
        if self._rows is None:
            self._rows = opened.rows
        else:
            self._rows.join(opened.rows)
        self._jobs += group
        return self._choose(first, opened.logits)

    def _joins(self, job: Seq2SeqJob) -> bool:
        """Whether a request gets a row, rather than a search of its own."""
        return job.asked.beams == 1 and self._model.config.model_type in PROVED["seq2seq"]

    def _next_group(self) -> list[Seq2SeqJob]:
        """Waiting jobs whose sources are read in one pass: at most `READ_TOKENS` with padding, or a
        single one.
        """
        # Of transformers' processors this one alone knows the sources, by their row.
        own = self._model.inner.generation_config
        alone = bool(getattr(own, "encoder_no_repeat_ngram_size", None))
        group: list[Seq2SeqJob] = []
        longest = 0
        while self._queue and self.rows + len(group) < self._max_rows:
            job = self._queue[0]
            longest = max(longest, len(job.asked.prompt))
            full = alone or longest * (len(group) + 1) > READ_TOKENS
            if not self._joins(job) or (group and full):
                break
            group.append(self._queue.popleft())
        return group

    def _advance(self) -> list[tuple[GenerationJob, CompletionChunk]]:
        if self._rows is None:
            return []
        return self._choose(0, self._compute.advance(self._rows, [job.last for job in self._jobs]))

    def _choose(self, first: int, logits: Tensor) -> list[tuple[GenerationJob, CompletionChunk]]:
        """Sample the next token of the jobs from row `first` on, by their logits `[B, V]`; finished
        ones leave the batch.
        """
        jobs = self._jobs[first:]
        rows = [job.processed(row) for job, row in zip(jobs, logits.split(1), strict=True)]
        pieces = self._accept(jobs, torch.cat(rows))
        finished = {job for job, piece in pieces if piece.finish}
        self._keep([row for row, job in enumerate(self._jobs) if job not in finished])
        return pieces

    def _search(self) -> list[tuple[GenerationJob, CompletionChunk]]:
        """Answer the next requests that join no batch, and have the same settings, to their end."""
        first = self._queue[0].asked

        def alike(asked: Seq2SeqRequest) -> bool:
            longest = asked.beams == 1 or asked.max_tokens == first.max_tokens
            return asked.beams == first.beams and longest

        group = [job for job in self._queue if alike(job.asked)][: self._max_rows]
        answers = answer_batch(
            self._model, [job.asked for job in group], self._eos, lambda row: not group[row].wanted
        )
        for job in group:
            self._queue.remove(job)
        return [
            (job, self._piece(job.asked, found)) for job, found in zip(group, answers, strict=True)
        ]

    def _piece(self, asked: Seq2SeqRequest, answer: Seq2SeqAnswer) -> CompletionChunk:
        stream = TextStream(self._decode_for(asked.prompt), (), asked.stop, special=asked.special)
        text = ""
        if answer.finish != "error":
            for token in answer.ids:
                text += stream.push(token)
                if stream.stopped:
                    return CompletionChunk(text, (), answer.generated, "stop")
        return CompletionChunk(text + stream.finish(), (), answer.generated, answer.finish)
