"""The end of a decoder: vocabulary projection and the objective's per-token function, in chunks.

The logits of a long row over a large vocabulary are the largest tensor of a training step by far; here only one chunk of
them exists at a time, in forward and in backward.
"""

from __future__ import annotations

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
        """All of them, float32 `[N, V]`."""
        return self._logits


class TokenFunction(Protocol):
    """An objective's value per token, float32 `[N]`. Labels of -100 arrive as 0; their values are discarded."""

    def __call__(self, view: View, labels: Tensor) -> Tensor: ...


def apply_head(hidden: Tensor, weight: Tensor, labels: Tensor, token: TokenFunction) -> Tensor:
    """Values `[N]` of the tokens whose final hidden states are `hidden` `[N, D]`; 0 where `labels` `[N]` is -100.

    A single chunk keeps its logits for backward; of several, each recomputes its own, so that memory does not grow with N.
    """

    def chunk_values(part: Tensor, part_labels: Tensor) -> Tensor:
        target = part_labels != IGNORE
        view = View(functional.linear(part, weight).float())
        return torch.where(target, token(view, part_labels.clamp_min(0)), 0.0)

    size = max(1, CHUNK_LOGITS // weight.shape[0])
    if hidden.shape[0] <= size:
        return chunk_values(hidden, labels)
    values: list[Tensor] = []
    for part, part_labels in zip(hidden.split(size), labels.split(size), strict=True):
        if torch.is_grad_enabled():
            values.append(checkpoint(chunk_values, part, part_labels, use_reentrant=False))
        else:
            values.append(chunk_values(part, part_labels))
    return torch.cat(values)
