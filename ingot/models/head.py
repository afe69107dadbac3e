"""The end of a decoder: vocabulary projection and the objective's per-token function, in chunks.

The logits of a long row over a large vocabulary are the largest tensor of a training step by far; here only one chunk of
them exists at a time, in forward and in backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

IGNORE = -100
CHUNK_LOGITS = 2**25  # 128 MiB of float32


class View:
    """What an objective may ask about the logits of a chunk of N tokens; the same questions when the vocabulary is sharded."""

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits

    def logsumexp(self) -> Tensor:
        """`[N]`."""
        return self._logits.logsumexp(dim=-1)

    def gather(self, labels: Tensor) -> Tensor:
        """The logit of each token's label `[N]`; labels must be in the vocabulary."""
        return self._logits.gather(-1, labels[:, None])[:, 0]

    def log_probability(self, labels: Tensor) -> Tensor:
        """`gather(labels) - logsumexp()` `[N]`, in one kernel that is far cheaper going backward."""
        return -functional.cross_entropy(self._logits, labels, reduction="none")

    def logits(self) -> Tensor:
        """Those that this rank has of them, float32 `[N, V]`; all where the vocabulary is not sharded."""
        return self._logits

    def total(self, values: Tensor) -> Tensor:
        """Sum over the whole vocabulary, `[N]`, of `values` `[N, V]` that were made from `logits()`."""
        return values.sum(dim=-1)


class TokenFunction(Protocol):
    """An objective's value per token, float32 `[N]`. Labels of -100 arrive as 0; their values are discarded.

    `extras`: what else the objective asked for, `[N, ...]`, the tokens' own share of it; None where it asked for nothing.
    """

    def __call__(self, view: View, labels: Tensor, extras: Tensor | None) -> Tensor: ...


Project = Callable[[Tensor], Tensor]
"""Hidden states `[N, D]` -> logits `[N, V]`."""


class Vocabulary:
    """How the head is computed. This is the whole of it on one rank; `ingot.parallel` has one that is shared."""

    def enter(self, hidden: Tensor) -> Tensor:
        """Final hidden states as the head wants them: every token, all features."""
        return hidden

    def weight(self, weight: Tensor) -> Tensor:
        """The rows of the projection `[V, D]` that are here."""
        return weight

    def view(self, logits: Tensor) -> View:
        """Float32 logits of a chunk, to be asked by an objective."""
        return View(logits)

    def whole(self, logits: Tensor) -> Tensor:
        """`[..., V]` of what is here -> of the whole vocabulary."""
        return logits


def apply_head(
    hidden: Tensor, project: Project, vocab_size: int, labels: Tensor, token: TokenFunction, extras: Tensor | None = None,
    view: Callable[[Tensor], View] = View,
) -> Tensor:
    """Values `[N]` of the tokens whose final hidden states are `hidden` `[N, D]`; 0 where `labels` `[N]` is -100.

    A single chunk keeps its logits for backward; of several, each recomputes its own, so that memory does not grow with N.
    """

    def chunk_values(part: Tensor, part_labels: Tensor, part_extras: Tensor | None) -> Tensor:
        target = part_labels != IGNORE
        values = token(view(project(part).float()), part_labels.clamp_min(0), part_extras)
        return torch.where(target, values, 0.0)

    size = max(1, CHUNK_LOGITS // vocab_size)
    if hidden.shape[0] <= size:
        return chunk_values(hidden, labels, extras)
    values: list[Tensor] = []
    for first in range(0, hidden.shape[0], size):
        part, part_labels = hidden[first : first + size], labels[first : first + size]
        part_extras = None if extras is None else extras[first : first + size]
        if torch.is_grad_enabled():
            values.append(checkpoint(chunk_values, part, part_labels, part_extras, use_reentrant=False))
        else:
            values.append(chunk_values(part, part_labels, part_extras))
    return torch.cat(values)
