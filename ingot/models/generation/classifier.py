"""Classification of texts by an encoder: waiting texts are batched, and the batch does not change
their scores.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ingot.models.generation.request import CompletionChunk, Request
from ingot.models.generation.seq2seq import check_text
from ingot.models.hf.models import Encoder


@dataclass(frozen=True)
class ClassScores(CompletionChunk):
    """The answer of a classifier: `text` is the most likely label, `scores` the probability of each
    class, in the model's order.
    """

    scores: tuple[float, ...] = ()


@torch.inference_mode()
def classify(model: Encoder, texts: Sequence[Sequence[int]]) -> list[list[float]]:
    """Class probabilities of each text (framed ids), computed in one batch."""
    device = next(model.parameters()).device
    longest = max(len(text) for text in texts)
    tokens = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts], device=device)
    segments = torch.tensor(
        [[1] * len(text) + [0] * (longest - len(text)) for text in texts], device=device
    )
    positions = torch.arange(longest, device=device).expand(len(texts), longest)
    scores: list[list[float]] = model.logits(tokens, positions, segments).softmax(dim=-1).tolist()
    return scores


class ClassifierJob:
    """A text queued in a `Classifier`."""

    def __init__(self, request: Request) -> None:
        self.request = request


class Classifier:
    """The interface of `Generator` for encoders: each step classifies up to `max_rows` waiting
    texts and returns one final chunk for each.

    A request's `prompt` is the framed text as the model reads it; its other fields are ignored.
    """

    def __init__(self, model: Encoder, *, max_rows: int = 8) -> None:
        self._model, self._max_rows = model, max_rows
        self._pending: deque[ClassifierJob] = deque()

    @property
    def busy(self) -> int:
        """The number of texts not yet classified."""
        return len(self._pending)

    def add(self, request: Request) -> ClassifierJob:
        """Queue a text. Raises WrongInput if the model cannot read it."""
        check_text(request.prompt, self._model.config)
        job = ClassifierJob(request)
        self._pending.append(job)
        return job

    def cancel(self, job: ClassifierJob) -> None:
        """Drop a text; one that is already classified is ignored."""
        if job in self._pending:
            self._pending.remove(job)

    def clear(self) -> None:
        """Drop every text; for use after `step` raised."""
        self._pending.clear()

    def step(self) -> list[tuple[ClassifierJob, ClassScores]]:
        """Classify the next batch."""
        group = [self._pending[index] for index in range(min(self._max_rows, len(self._pending)))]
        if not group:
            return []
        verdicts = classify(self._model, [job.request.prompt for job in group])
        for job in group:
            self._pending.remove(job)
        return [(job, self._scored(scores)) for job, scores in zip(group, verdicts, strict=True)]

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
