"""The likeliest tokens behind the masks of a text, by a masked language model: waiting texts are
batched, and the batch does not change their scores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ingot.models.device import kernels_for_any_length
from ingot.models.generation.classifier import TextBatches, padded_texts
from ingot.models.generation.request import CompletionChunk, Request
from ingot.models.hf.models import MaskedLM

TOP_K = 5
"""Tokens told of each mask, as transformers' fill-mask pipeline does."""


@dataclass(frozen=True)
class MaskRequest(Request):
    """A framed text with masks, and how many tokens are wanted for each of them."""

    top_k: int = TOP_K


@dataclass(frozen=True)
class MaskChoices(CompletionChunk):
    """The answer of a masked language model: for each mask in order its likeliest tokens, with
    their probabilities, the likeliest first.
    """

    masks: tuple[tuple[tuple[int, float], ...], ...] = ()


@kernels_for_any_length
@torch.inference_mode()
def fill_masks(
    model: MaskedLM, texts: Sequence[Sequence[int]], mask: int | None, top_k: int
) -> list[list[list[tuple[int, float]]]]:
    """For each text (framed ids) and each of its masks the `top_k` likeliest tokens with their
    probabilities, computed in one batch.
    """
    tokens, positions, segments = padded_texts(texts, next(model.parameters()).device)
    asked = ((tokens == (-1 if mask is None else mask)) & (segments == 1)).flatten().nonzero()[:, 0]
    logits = model.logits_at(tokens, positions, segments, asked).float()
    found = logits.softmax(-1).topk(min(top_k, logits.shape[-1]))
    told = [
        list(zip(ids, scores, strict=True))
        for ids, scores in zip(found.indices.tolist(), found.values.tolist(), strict=True)
    ]
    counts = [sum(token == mask for token in text) for text in texts]
    return [told[sum(counts[:row]) : sum(counts[: row + 1])] for row in range(len(texts))]


class MaskFiller(TextBatches):
    """Fills masks by a masked language model; fields of requests beside `prompt` and `top_k` are
    ignored. `mask`: the token that stands for a hidden one, None if there is none.
    """

    def __init__(self, model: MaskedLM, mask: int | None, *, max_rows: int = 8) -> None:
        super().__init__(model.config, max_rows=max_rows)
        self._model, self._mask = model, mask

    def _answers(self, requests: Sequence[Request]) -> list[MaskChoices]:
        wanted = [getattr(request, "top_k", TOP_K) for request in requests]
        texts = [request.prompt for request in requests]
        found = fill_masks(self._model, texts, self._mask, max(wanted))
        return [
            MaskChoices("", (), 0, "stop", tuple(tuple(mask[:most]) for mask in masks))
            if all(math.isfinite(score) for mask in masks for _, score in mask)
            else MaskChoices("", (), 0, "error")
            for masks, most in zip(found, wanted, strict=True)
        ]
