"""Attention and norms of transformers' T5 and its kin that keep less for backward.

A bias that is added to the scores and needs a gradient leaves torch on a CPU nothing but its plain
path, which keeps the probabilities `[B, H, T, S]` of every layer. Here a block of queries of one
row is computed at a time, forward and again in backward, and only q, k, v and the bias, which all
layers share, are kept. On a GPU torch has a kernel, and this attention is not used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ingot.models.device import is_planned, kernel_type
from ingot.models.native.attention import BLOCK, causal_mask, cpu_operator, empty_heads_like

NAME = "ingot_relative"
"""How transformers' registry of attention functions knows `attend_relative`."""
LEAST_WEIGHT = 2.0**-60
"""What a norm multiplies by is divided out again in backward where it is larger than this: products
of smaller ones may lose bits below the least normal number.
"""


def attend_relative(
    plain: Callable[..., tuple[Tensor, None]],
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    position_bias: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """An attention function for transformers' registry: `[B, T, H, E]`, and no probabilities. What
    it is not for goes to `plain`, transformers' own over torch's `scaled_dot_product_attention`.

    query `[B, H, T, E]`; key, value `[B, H, S, E]`; mask bool, broadcast to `[B, H, T, S]`, True
    where a query attends; position_bias `[1, H, T, S]`.
    """
    if not is_for_blocks(query, key, attention_mask, dropout, position_bias, more):
        return plain(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            position_bias=position_bias,
            **more,
        )
    mask = attention_mask
    if mask is None and module.is_causal:
        mask = causal_mask(query.shape[2], None, query.device)[None, None]
    # Drawn from torch's generator, which is seeded for each micro-batch and set back where layers
    # are computed again.
    seed = torch.randint(2**62, (1,)) if dropout else None
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    mixed: Tensor = cpu_relative_attention(
        query, key, value, position_bias, mask, scale, dropout, seed
    )
    return mixed.transpose(1, 2), None


def is_for_blocks(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    dropout: float,
    bias: Tensor | None,
    more: dict[str, Any],
) -> bool:
    """Whether torch would keep the probabilities, and what is asked for is what blocks compute."""
    return (
        query.device.type == "cpu"
        and torch.is_grad_enabled()
        and bias is not None
        and (bias.requires_grad or (dropout > 0 and query.requires_grad))
        and bias.shape == (1, *query.shape[1:3], key.shape[2])
        and (mask is None or mask.dtype == torch.bool)
        and not any(value is not None and value is not False for value in more.values())
    )


def _blocks(
    q: Tensor,
    k: Tensor,
    bias: Tensor,
    mask: Tensor | None,
    scale: float,
    dropout: float,
    seed: Tensor | None,
) -> Iterator[tuple[int, slice, Tensor, Tensor | None]]:
    """For each block of t queries of a row: the row, the queries, their probabilities `[H, t, S]`,
    and the factors of dropout, 0 or 1 / (1 - dropout); None without. The same seed gives the same
    factors, here and in backward.

    Scores, bias and softmax are in float32, products in the type of q and k. A masked score is the
    least finite number: a query that sees nothing has a mean, not NaN.
    """
    generator = None if seed is None else torch.Generator().manual_seed(int(seed))
    rows, _, length, _ = q.shape
    bias = bias[0].float().contiguous()  # an embedding looked it up: heads come last
    hidden = None if mask is None else ~mask.expand(rows, -1, length, -1)
    for row in range(rows):
        for first in range(0, length, BLOCK):
            queries = slice(first, min(first + BLOCK, length))
            scores = torch.bmm(q[row, :, queries], k[row].transpose(1, 2)).float()
            if scale != 1:
                scores *= scale
            scores += bias[:, queries]
            if hidden is not None:
                scores.masked_fill_(hidden[row, :, queries], torch.finfo(torch.float32).min)
            p = torch.softmax(scores, dim=-1)
            factors: Tensor | None = None
            if generator is not None:
                kept = 1 - dropout
                factors = scores.bernoulli_(kept, generator=generator).mul_(1 / kept)
            yield row, queries, p, factors


def _relative_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None,
    scale: float,
    dropout: float,
    seed: Tensor | None,
) -> Tensor:
    """q `[B, H, T, E]`, k and v `[B, H, S, E]`, bias `[1, H, T, S]`, mask bool `[B or 1, H or 1, T
    or 1, S]` -> `[B, H, T, E]`, stored as `[B, T, H, E]`.
    """
    out = empty_heads_like(q)
    for row, queries, p, factors in _blocks(q, k, bias, mask, scale, dropout, seed):
        weights = p if factors is None else factors.mul_(p)
        out[row, :, queries] = torch.bmm(weights.to(v.dtype), v[row])
    return out


def _relative_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None,
    scale: float,
    dropout: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v and the bias; that of the bias is summed over rows, in float32."""
    dq = empty_heads_like(q)
    dk, dv = (empty_heads_like(x).float().zero_() for x in (k, v))
    of_bias = torch.zeros(bias.shape)
    for row, queries, p, factors in _blocks(q, k, bias, mask, scale, dropout, seed):
        g = grad[row, :, queries]  # [H, t, E]
        weights = p if factors is None else factors * p
        dv[row] += torch.bmm(weights.to(g.dtype).transpose(1, 2), g)
        of_weights = torch.bmm(g, v[row].transpose(1, 2)).float()  # [H, t, S]
        if factors is not None:
            of_weights *= factors
        of_scores = torch._softmax_backward_data(of_weights, p, -1, p.dtype)
        of_bias[0, :, queries] += of_scores
        ds = of_scores.to(q.dtype)
        dq[row, :, queries] = torch.bmm(ds, k[row]) * scale
        dk[row] += torch.bmm(ds.transpose(1, 2), q[row, :, queries]) * scale
    return dq, dk.to(k.dtype), dv.to(v.dtype), of_bias


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, scale, dropout, seed = inputs
    ctx.save_for_backward(*tensors, seed)
    ctx.scale, ctx.dropout, ctx.bias_dtype = scale, dropout, inputs[3].dtype


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, seed = ctx.saved_tensors
    dq, dk, dv, of_bias = cpu_relative_attention_backward(
        grad, *tensors, ctx.scale, ctx.dropout, seed
    )
    of_bias = of_bias.to(ctx.bias_dtype) if ctx.needs_input_grad[3] else None
    return dq, dk, dv, of_bias, None, None, None, None


def _no_backward(ctx: Any, *grads: Tensor) -> None:
    raise NotImplementedError("attention with relative positions has no second derivative")


cpu_relative_attention_backward = cpu_operator(
    _relative_attention_backward,
    lambda grad, q, k, v, bias, *more: (
        *map(empty_heads_like, (q, k, v)),
        torch.empty_like(bias, dtype=torch.float32, memory_format=torch.contiguous_format),
    ),
    _no_backward,
)
cpu_relative_attention = cpu_operator(
    _relative_attention, lambda q, *more: empty_heads_like(q), _backward, _save
)


class LeanNorm(nn.Module):
    """Takes the place of the class of a norm of transformers, whose attributes it reads: root mean
    square without a mean (Zhang and Sennrich 2019, arXiv 1910.07467), the same numbers. It keeps
    one tensor for backward: in float32 its output, which the products after it keep as well.
    """

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        """`[..., D]` -> `[..., D]`, in the type of the weight if that is a half one."""
        normed: Tensor = _Norm.apply(hidden_states, self.weight, self.variance_epsilon)  # type: ignore[no-untyped-call]
        return normed


class _Norm(torch.autograd.Function):
    """Computes in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        factor = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)  # [..., 1]
        out = _normed(x, factor, weight) * weight
        ctx.keeps_output = _is_divisible(x, weight)
        ctx.save_for_backward(out if ctx.keeps_output else x, weight, factor)
        ctx.dtype = x.dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        kept, weight, factor = ctx.saved_tensors
        normed = kept / weight if ctx.keeps_output else _normed(kept, factor, weight)
        of_weight: Tensor | None = None
        if ctx.needs_input_grad[1]:
            of_weight = (gradient * normed).flatten(0, -2).sum(dim=0)
        of_normed = gradient.float() * weight
        shared = (of_normed * normed).mean(dim=-1, keepdim=True)
        of_x = torch.addcmul(of_normed, normed.float(), shared, value=-1).mul_(factor)
        return of_x.to(ctx.dtype), None if of_weight is None else of_weight.to(weight.dtype), None


def _is_divisible(x: Tensor, weight: Tensor) -> bool:
    """Whether the output over the weight is what was normalised, but for float32's last bits: no
    weight is nearly 0. A GPU would be waited for, and weights without contents are not asked.
    """
    if {x.dtype, weight.dtype} != {torch.float32} or kernel_type(x.device) != "cpu":
        return False
    if torch.compiler.is_compiling():
        return False
    return is_planned() or bool((weight.detach().abs() > LEAST_WEIGHT).all())


def _normed(x: Tensor, factor: Tensor, weight: Tensor) -> Tensor:
    """x over its root mean square, rounded to the type of a half weight, as transformers does."""
    normed = x * factor
    return normed if weight.dtype == torch.float32 else normed.to(weight.dtype)
