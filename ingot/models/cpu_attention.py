"""Attention in bf16 on a CPU, forward and backward, as products of blocks that stay in the
processor's cache.

torch's flash kernel for CPUs spends most of its time beside the matrix products: this costs half as
much. A block of queries meets all keys that it may see at once; what nobody in it may see (the
future, other documents) is left out. Scores are rounded to bf16 before the softmax, which itself
computes in float32. These are torch operators, so that a compiler takes them as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

BLOCK = 128  # queries


def _blocks(mask: Tensor | None, length: int) -> Iterator[tuple[int, int, int]]:
    """(first key, first query, end of both) of each block of one row; `mask` bool `[1 or H, T, T]`,
    None for plain causal attention.
    """
    for first in range(0, length, BLOCK):
        end = min(first + BLOCK, length)
        if mask is None:
            yield 0, first, end
        else:
            yield int(mask[:, first:end, :end].any(1).any(0).byte().argmax()), first, end


def _weights(q: Tensor, k: Tensor, hidden: Tensor) -> Tensor:
    """softmax(q k) `[K, G * t, S]` for scaled queries `[K, G * t, E]`, keys `[K, S, E]`, and
    `hidden` bool, broadcast to `[K, G, t, S]`.
    """
    scores = torch.bmm(q, k.transpose(1, 2))
    scores.view(k.shape[0], -1, hidden.shape[-2], k.shape[1])[
        ..., -hidden.shape[-1] :
    ].masked_fill_(hidden, -math.inf)
    return torch.softmax(scores, dim=-1, dtype=scores.dtype)


def _future(mask: Tensor | None, start: int, first: int, end: int) -> Tensor:
    """What the queries `first` to `end` may not see, for the last of the keys `start` to `end`."""
    if mask is None:
        return torch.ones(end - first, end - first, dtype=torch.bool).triu(1)
    return ~mask[:, first:end, start:end]


@torch.library.custom_op("ingot::cpu_attention", mutates_args=())
def cpu_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """q `[B, H, T, E]`, k and v `[B, K, T, E]`, mask bool `[B or 1, 1, T, T]` or None for causal ->
    `[B, H, T, E]`, laid out as `[B, T, H, E]`.
    """
    batch, _, length, size = q.shape
    groups = k.shape[1]
    out = _like(q)
    scaled = (q * size**-0.5).unflatten(1, (groups, -1))  # [B, K, G, T, E]
    mixed = out.unflatten(1, (groups, -1))
    for row in range(batch):
        seen = None if mask is None else mask[row % mask.shape[0]]
        for start, first, end in _blocks(seen, length):
            part = scaled[row, :, :, first:end].reshape(groups, -1, size)
            p = _weights(part, k[row, :, start:end], _future(seen, start, first, end))
            mixed[row, :, :, first:end] = torch.bmm(p, v[row, :, start:end]).view(
                groups, -1, end - first, size
            )
    return out


@torch.library.custom_op("ingot::cpu_attention_backward", mutates_args=())
def cpu_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v. What attention weighs by is computed again, which costs less
    than to keep it.
    """
    batch, _, length, size = q.shape
    groups, scale = k.shape[1], size**-0.5
    dq, dk, dv = _like(q), _like(k), _like(v)
    scaled, given, back = (x.unflatten(1, (groups, -1)) for x in (q * scale, grad, dq))
    for row in range(batch):
        seen = None if mask is None else mask[row % mask.shape[0]]
        sum_k, sum_v = torch.zeros(2, groups, length, size)
        for start, first, end in _blocks(seen, length):
            part = scaled[row, :, :, first:end].reshape(groups, -1, size)
            g = given[row, :, :, first:end].reshape(groups, -1, size)
            p = _weights(part, k[row, :, start:end], _future(seen, start, first, end))
            sum_v[:, start:end] += torch.bmm(p.transpose(1, 2), g)
            ds = torch._softmax_backward_data(
                torch.bmm(g, v[row, :, start:end].transpose(1, 2)), p, -1, p.dtype
            )
            back[row, :, :, first:end] = (torch.bmm(ds, k[row, :, start:end]) * scale).view(
                groups, -1, end - first, size
            )
            sum_k[:, start:end] += torch.bmm(ds.transpose(1, 2), part)
        dk[row], dv[row] = sum_k, sum_v
    return dq, dk, dv


@cpu_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return _like(q)


@cpu_attention_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    return _like(q), _like(k), _like(v)


def _like(x: Tensor) -> Tensor:
    """Room for `[B, H, T, E]` laid out as `[B, T, H, E]`, which the next product takes without a
    copy.
    """
    batch, heads, length, size = x.shape
    return x.new_empty(batch, length, heads, size).transpose(1, 2)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *cpu_attention_backward(grad, *ctx.saved_tensors), None


cpu_attention.register_autograd(_backward, setup_context=_keep)
