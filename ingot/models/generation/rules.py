"""What changes a request's logits before its next token is chosen: biases, penalties of tokens that
were there before, a constraint, and ends that must not come yet. Meaning and order are vLLM's, but
for an end that is all that a constraint leaves: it comes before `min_tokens`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import torch
from torch import Tensor

from ingot.models.generation.request import Request


class LogitsRules:
    """The rules of one request, which depend on its tokens so far; `ends`: tokens that end it."""

    def __init__(self, request: Request, ends: Collection[int]) -> None:
        self._sampling, self._least = request.sampling, request.min_tokens
        self._constraint = request.constraint
        self._ends = sorted(ends)
        self._bias = dict(request.sampling.logit_bias)
        self._seen = dict.fromkeys(request.prompt)  # as a set in order
        self._written: Counter[int] = Counter()
        self._count = 0

    @property
    def failed(self) -> bool:
        """Whether the constraint cannot go on."""
        return self._constraint is not None and self._constraint.failed

    def push(self, token: int) -> None:
        """Take a token of the completion."""
        self._written[token] += 1
        self._seen[token] = None
        self._count += 1
        if self._constraint is not None:
            self._constraint.push(token)

    def apply(self, logits: Tensor) -> None:
        """Change the logits `[V]` of the next token in place."""
        if self._bias:
            logits[list(self._bias)] += logits.new_tensor(list(self._bias.values()))
        sampling = self._sampling
        if (by := sampling.repetition_penalty) != 1:
            seen = torch.tensor(list(self._seen), dtype=torch.long, device=logits.device)
            before = logits[seen]
            logits[seen] = torch.where(before > 0, before / by, before * by)
        if self._written and (sampling.frequency_penalty or sampling.presence_penalty):
            written = torch.tensor(list(self._written), device=logits.device)
            counts = logits.new_tensor(list(self._written.values()))
            logits[written] -= sampling.frequency_penalty * counts + sampling.presence_penalty
        if self._constraint is not None:
            self._constraint.apply(logits)
        if self._count < self._least and self._ends:
            ends = logits[self._ends]
            logits[self._ends] = float("-inf")
            if self._constraint is not None and bool(logits.isneginf().all()):
                logits[self._ends] = ends  # JSON that is complete can but end


def rules_of(request: Request, ends: Collection[int]) -> LogitsRules | None:
    """The rules of a request; None for most, which have none."""
    sampling = request.sampling
    plain = (
        not request.min_tokens
        and request.constraint is None
        and not sampling.logit_bias
        and sampling.repetition_penalty == 1
        and not sampling.presence_penalty
        and not sampling.frequency_penalty
    )
    return None if plain else LogitsRules(request, ends)
