"""Attention of some queries over a block of keys, with what is needed to merge the results of
several blocks, forward and backward.

Two blocks with outputs o1, o2 and log-sums l1, l2 (logs of the sums of exponentials) merge to
l = log(e^l1 + e^l2) and o = e^(l1-l) o1 + e^(l2-l) o2. Backward needs no merging: with the log-sum
over all keys each block's probabilities are already correct, and gradients add up.

Shapes: B batch, H query heads, K key/value heads (H is a multiple of K), P queries, S keys, E head
size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ingot.models.native.attention import causal_mask

MASKED = -1e30
"""The score of a masked key. Not -inf: a query that sees no key of a block must get weight zero,
not NaN.
"""
_MAX_SCORES = 2**28
"""Largest number of scores held at once by the matmul kernel; a GiB in float32."""


class PartialAttention(NamedTuple):
    """Attention over a block of keys: output `[B, H, P, E]` and the log of the sum of exponentials
    `[B, H, P]`, float32.
    """

    out: Tensor
    logsum: Tensor


class BlockKernel(Protocol):
    """Attention of q `[B, H, P, E]` over k, v `[B, K, S, E]`. `mask` is bool, broadcast to
    `[B, 1, P, S]`, True where a query attends; None for everywhere. `causal` (P = S, no mask): each
    query sees the keys up to its own index.
    """

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool
    ) -> PartialAttention: ...

    def backward(
        self,
        gradient: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        whole: PartialAttention,
        mask: Tensor | None,
        causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v, in float32 or their own dtypes. `gradient` is that of the output
        over all keys, `whole` that output with its log-sum.
        """
        ...


def merge(one: PartialAttention | None, other: PartialAttention) -> PartialAttention:
    """Attention over the keys of both blocks."""
    if one is None:
        return other
    logsum = torch.logaddexp(one.logsum, other.logsum)
    first, second = (part.out * (part.logsum - logsum).exp()[..., None] for part in (one, other))
    return PartialAttention(first + second, logsum)


class FlashKernel:
    """torch's flash attention on CPU, which never materialises all scores."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool
    ) -> PartialAttention:
        out, logsum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=_additive_mask(mask)
        )
        return PartialAttention(out.float(), logsum)

    def backward(
        self,
        gradient: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        whole: PartialAttention,
        mask: Tensor | None,
        causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = backward(
            gradient,
            q,
            k,
            v,
            whole.out.to(q.dtype),
            whole.logsum,
            0.0,
            causal,
            attn_mask=_additive_mask(mask),
        )
        return dq, dk, dv


def _additive_mask(mask: Tensor | None) -> Tensor | None:
    """The mask in additive form, as the kernel takes it."""
    return None if mask is None else torch.where(mask, 0.0, MASKED)


class MatmulKernel:
    """Plain matrix products in float32 on any device; scores are materialised for a slice of the
    queries at a time.
    """

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool
    ) -> PartialAttention:
        outs, logsums = [], []
        for some, scores in _scores(q, k, _explicit_mask(mask, causal, q)):
            outs.append(
                (scores.softmax(-1).flatten(2, 3) @ v.float()).view(some.shape)
            )  # [B, H, C, E]
            logsums.append(scores.logsumexp(-1).flatten(1, 2))  # [B, H, C]
        return PartialAttention(torch.cat(outs, 2), torch.cat(logsums, 2))

    def backward(
        self,
        gradient: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        whole: PartialAttention,
        mask: Tensor | None,
        causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dqs = []
        dk = torch.zeros_like(k, dtype=torch.float32)
        dv = torch.zeros_like(v, dtype=torch.float32)
        first = 0
        for some, scores in _scores(q, k, _explicit_mask(mask, causal, q)):
            count, size = some.shape[2:]
            out, grad, logsum = (
                each.narrow(2, first, count) for each in (whole.out, gradient, whole.logsum)
            )
            grad = _grouped(grad, k)
            probabilities = (
                (scores - logsum.reshape(scores.shape[:-1])[..., None]).exp().flatten(2, 3)
            )  # [B, K, GC, S]
            dv += probabilities.mT @ grad
            mean = (grad * _grouped(out, k)).sum(-1, keepdim=True)
            ds = probabilities * (grad @ v.float().mT - mean) * size**-0.5
            dqs.append((ds @ k.float()).view(some.shape))
            dk += ds.mT @ _grouped(some, k)
            first += count
        return torch.cat(dqs, 2), dk, dv


def _explicit_mask(mask: Tensor | None, causal: bool, q: Tensor) -> Tensor | None:
    return causal_mask(q.shape[2], None, q.device)[None, None] if causal else mask


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """`[B, H, C, E]` -> float32 `[B, K, GC, E]`: the G query heads of a key/value head
    concatenated.
    """
    return x.float().reshape(x.shape[0], k.shape[1], -1, x.shape[3])  # [B, K, G * C, E]


def _scores(q: Tensor, k: Tensor, mask: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Slices of the queries `[B, H, C, E]`, each with its scores, float32 `[B, K, G, C, S]`."""
    batch, heads, _, size = q.shape
    count, first = max(1, _MAX_SCORES // (batch * heads * k.shape[2])), 0
    for some in q.split(count, 2):
        scores = (_grouped(some, k) @ k.float().mT * size**-0.5).view(
            batch, k.shape[1], -1, some.shape[2], k.shape[2]
        )
        if mask is not None:
            scores = scores.masked_fill(~mask[:, :, None, first : first + some.shape[2]], MASKED)
        first += some.shape[2]
        yield some, scores
