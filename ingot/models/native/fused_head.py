"""The head where layers are compiled for a GPU: one kernel forward and one backward make
log-probabilities and the gradients of logits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ingot.models.native.head import LogitsView, VocabularyHead

MANY_LOGITS = 2**28
"""Logits of a chunk, of which nothing as large is made in float32: what each chunk adds to the
gradient of the weight is read and written less often.
"""


def fuse(head: VocabularyHead) -> None:
    """Let a head on a GPU use these kernels."""
    head.view_type, head.many_logits = FusedView, MANY_LOGITS


class FusedView(LogitsView):
    """The view of an accelerator whose layers are compiled: log-probabilities and their gradient
    are computed in float32 from each logit as it is read, and the gradient is rounded as it is
    written, which moves a quarter of the bytes.
    """

    def log_probability(self, labels: Tensor, temperature: float = 1.0) -> Tensor:
        if temperature != 1 or not torch.is_grad_enabled():
            return super().log_probability(labels, temperature)
        values: Tensor = FusedLogProbability.apply(self._computed, labels)  # type: ignore[no-untyped-call]
        return values


class FusedLogProbability(torch.autograd.Function):
    """The log-probability of each label `[N]` from logits `[N, V]` of any floating-point type."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        values, highest, total = fused_kernels()[0](logits, labels)
        ctx.save_for_backward(logits, labels, highest, total)
        made: Tensor = values
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        of_logits: Tensor = fused_kernels()[1](*ctx.saved_tensors, gradient)
        return of_logits, None


@cache
def fused_kernels() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Forward and backward of `FusedLogProbability`, compiled once for all chunks."""
    return torch.compile(_log_probability), torch.compile(_log_probability_backward)


def _log_probability(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The values, and of each token the highest logit and the log of the sum of what the others are
    beside it.
    """
    highest = logits.amax(-1).float()
    total = (logits.float() - highest[:, None]).exp().sum(-1).log()
    return logits.gather(-1, labels[:, None])[:, 0].float() - highest - total, highest, total


def _log_probability_backward(
    logits: Tensor, labels: Tensor, highest: Tensor, total: Tensor, gradient: Tensor
) -> Tensor:
    of_label = torch.arange(logits.shape[-1], device=logits.device) == labels[:, None]
    probability = (logits.float() - highest[:, None] - total[:, None]).exp()
    return ((of_label.float() - probability) * gradient[:, None]).to(logits.dtype)
