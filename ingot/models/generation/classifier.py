"""Classification of texts by an encoder: waiting texts are batched, and the batch does not change
their scores.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ingot.models.device import kernels_for_any_length
from ingot.models.generation.request import CompletionChunk, DecoderLimits, Request
from ingot.models.generation.seq2seq import check_text
from ingot.models.hf.models import Encoder


@dataclass(frozen=True)
class ClassScores(CompletionChunk):
    """The answer of a classifier: `text` is the most likely label, `scores` the probability of each
    class, in the model's order. Of a model with one output it is that output as it is.
    """

    scores: tuple[float, ...] = ()


@kernels_for_any_length
@torch.inference_mode()
def classify(model: Encoder, texts: Sequence[Sequence[int]]) -> list[list[float]]:
    """Class probabilities of each text (framed ids), computed in one batch; of a model with one
    output its score.
    """
    logits = model.logits(*padded_texts(texts, next(model.parameters()).device))
    scores: list[list[float]] = (logits if model.config.scores else logits.softmax(-1)).tolist()
    return scores


def padded_texts(
    texts: Sequence[Sequence[int]], device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, positions and segments `[B, S]` of texts that are computed in one batch; segments are
    0 on padding.
    """
    longest = max(len(text) for text in texts)
    tokens = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts], device=device)
    segments = torch.tensor(
        [[1] * len(text) + [0] * (longest - len(text)) for text in texts], device=device
    )
    return tokens, torch.arange(longest, device=device).expand(tokens.shape), segments


class TextJob:
    """A text queued in a `TextBatches`."""

    def __init__(self, request: Request) -> None:
        self.request = request


class TextBatches(ABC):
    """The interface of `Generator` for what reads texts and writes none: each step answers up to
    `max_rows` waiting texts with one final chunk each.

    A request's `prompt` is the framed text as the model reads it.
    """

    def __init__(self, limits: DecoderLimits, *, max_rows: int = 8) -> None:
        self._limits, self._max_rows = limits, max_rows
        self._pending: deque[TextJob] = deque()

    @abstractmethod
    def _answers(self, requests: Sequence[Request]) -> Sequence[CompletionChunk]:
        """The answers to texts that are computed together."""

    @property
    def busy(self) -> int:
        """The number of texts not yet answered."""
        return len(self._pending)

    def add(self, request: Request) -> TextJob:
        """Queue a text. Raises WrongInput if the model cannot read it."""
        check_text(request.prompt, self._limits)
        job = TextJob(request)
        self._pending.append(job)
        return job

    def cancel(self, job: TextJob) -> None:
        """Drop a text; one that is already answered is ignored."""
        if job in self._pending:
            self._pending.remove(job)

    def clear(self) -> None:
        """Drop every text; for use after `step` raised."""
        self._pending.clear()

    def resume(self, job: TextJob) -> None:
        """Queue a text that `clear` has dropped again."""
        self._pending.append(job)

    def step(self) -> list[tuple[TextJob, CompletionChunk]]:
        """Answer the next batch."""
        group = [self._pending[index] for index in range(min(self._max_rows, len(self._pending)))]
        if not group:
            return []
        answers = self._answers([job.request for job in group])
        for job in group:
            self._pending.remove(job)
        return list(zip(group, answers, strict=True))


class Classifier(TextBatches):
    """Classifies texts by an encoder; fields of requests beside `prompt` are ignored."""

    def __init__(self, model: Encoder, *, max_rows: int = 8) -> None:
        super().__init__(model.config, max_rows=max_rows)
        self._model = model

    def _answers(self, requests: Sequence[Request]) -> list[ClassScores]:
        return [
            self._scored(scores)
            for scores in classify(self._model, [request.prompt for request in requests])
        ]

    def _scored(self, scores: Sequence[float]) -> ClassScores:
        if not all(math.isfinite(score) for score in scores):
            return ClassScores("", (), 0, "error")
        return ClassScores(
            self._model.config.labels[max(range(len(scores)), key=scores.__getitem__)],
            (),
            0,
            "stop",
            tuple(scores),
        )
