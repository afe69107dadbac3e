"""Attention of some queries over some of their keys, with what it takes to put several such results
together, forward and backward.

A part of softmax attention is worth as much as the sum of its exponentials says: two parts with
outputs o1, o2 and log-sums l1, l2 make l = log(e^l1 + e^l2) and o = e^(l1-l) o1 + e^(l2-l) o2.
Backward needs no putting together: with the log-sums of the whole each part's probabilities are
right as they are, and gradients add up.

Shapes: B batch, H query heads, K key/value heads (H is a multiple of K), P queries, S keys, E head
size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ingot.models.native.attention import causal_mask

_NEVER = -1e30
"""The score of what may not be seen. Not -inf: a query that sees no key of a part must weigh
nothing, not make NaNs.
"""
_AT_ONCE = 2**28
"""Scores that exist at one time where they are computed as a matrix, a GiB in float32."""


class PartialAttention(NamedTuple):
    """Attention over some keys: the output `[B, H, P, E]` and the log of the sum of exponentials
    `[B, H, P]`, float32.
    """

    out: Tensor
    logsum: Tensor


class BlockKernel(Protocol):
    """q `[B, H, P, E]`; k, v `[B, K, S, E]`; `mask` bool, broadcast to `[B, 1, P, S]`, True where a
    query attends, None: everywhere; `causal` (P = S, without a mask): each query sees the keys up
    to its own number.
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
        """Gradients of q, k and v, float32 or in their types, from that of the output over all
        keys, whose result `whole` is.
        """
        ...


def kernel_for(device: torch.device) -> BlockKernel:
    return FlashKernel() if device.type == "cpu" else MatmulKernel()


def merge(one: PartialAttention | None, other: PartialAttention) -> PartialAttention:
    """The part over the keys of both."""
    if one is None:
        return other
    logsum = torch.logaddexp(one.logsum, other.logsum)
    first, second = (part.out * (part.logsum - logsum).exp()[..., None] for part in (one, other))
    return PartialAttention(first + second, logsum)


class FlashKernel:
    """torch's own kernel of a CPU, which never holds all scores."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool
    ) -> PartialAttention:
        out, logsum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=_added(mask)
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
            attn_mask=_added(mask),
        )
        return dq, dk, dv


def _added(mask: Tensor | None) -> Tensor | None:
    """A mask as the kernel wants it: what to add to the scores."""
    return None if mask is None else torch.where(mask, 0.0, _NEVER)


class MatmulKernel:
    """Plain matrix products in float32, for any device; of the scores only those of some queries
    exist at a time.
    """

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool
    ) -> PartialAttention:
        outs, logsums = [], []
        for some, scores in _scores(q, k, _explicit(mask, causal, q)):
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
        dqs, dk, dv, first = (
            [],
            torch.zeros_like(k, dtype=torch.float32),
            torch.zeros_like(v, dtype=torch.float32),
            0,
        )
        for some, scores in _scores(q, k, _explicit(mask, causal, q)):
            count, size = some.shape[2:]
            out, grad, logsum = (
                each.narrow(2, first, count) for each in (whole.out, gradient, whole.logsum)
            )
            grad = _grouped(grad, k)
            likely = (
                (scores - logsum.reshape(scores.shape[:-1])[..., None]).exp().flatten(2, 3)
            )  # [B, K, GC, S]
            dv += likely.mT @ grad
            mean = (grad * _grouped(out, k)).sum(-1, keepdim=True)
            ds = likely * (grad @ v.float().mT - mean) * size**-0.5
            dqs.append((ds @ k.float()).view(some.shape))
            dk += ds.mT @ _grouped(some, k)
            first += count
        return torch.cat(dqs, 2), dk, dv


def _explicit(mask: Tensor | None, causal: bool, q: Tensor) -> Tensor | None:
    return causal_mask(q.shape[2], None, q.device)[None, None] if causal else mask


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """`[B, H, C, E]` -> float32 `[B, K, GC, E]`: the queries that share a key/value head, one
    behind the other.
    """
    return x.float().reshape(x.shape[0], k.shape[1], -1, x.shape[3])


def _scores(q: Tensor, k: Tensor, mask: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Some queries `[B, H, C, E]` after the others, and their scores, float32 `[B, K, G, C, S]`."""
    batch, heads, _, size = q.shape
    count, first = max(1, _AT_ONCE // (batch * heads * k.shape[2])), 0
    for some in q.split(count, 2):
        scores = (_grouped(some, k) @ k.float().mT * size**-0.5).view(
            batch, k.shape[1], -1, some.shape[2], k.shape[2]
        )
        if mask is not None:
            scores = scores.masked_fill(~mask[:, :, None, first : first + some.shape[2]], _NEVER)
        first += some.shape[2]
        yield some, scores
