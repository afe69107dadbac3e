"""Attention of one query a head over many keys on a GPU: parts of the keys are attended to at once
(Flash-Decoding, Dao et al. 2023).

A kernel with a mask goes through the keys of a head one block after the other: the few heads of a
small batch leave most of a GPU idle, the longer the more keys there are.

Shapes: B rows, K key/value heads, G query heads of each, S keys, E head size.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ingot.base.progress import say

PART = 512
"""Keys of a part."""
MANY_KEYS, FEW_HEADS = 2048, 128
"""From so many keys on, for no more key/value heads of all rows: an H100 computes 132 at once."""
MASKED = -1e30
"""Added to scores that are not seen. A part of which nothing is seen then counts for nothing; of
scores of minus infinity the kernel says that their sum is one.
"""
ROUNDING, LEAST = 4, 1e-5
"""Units in the last place that a result may differ by, in norm, when parts are tried; at least
LEAST.
"""


def attend_one(q: Tensor, k: Tensor, v: Tensor, added: Tensor) -> Tensor:
    """q `[B, K, G, E]`, the heads of one query; k, v `[B, K, S, E]`; `added` `[B, 1, 1, S]` to
    scores; `[B, K, G, E]`.
    """
    rows, shared, _, size = q.shape
    if (
        q.device.type != "cpu"
        and k.shape[2] >= MANY_KEYS
        and rows * shared <= FEW_HEADS
        and _splits(k)
        and _is_right(_Kind(q.device, q.dtype, q.shape[2], size))
    ):
        return in_parts(q, k, v, added)
    return functional.scaled_dot_product_attention(q, k, v, added)


def _splits(k: Tensor) -> bool:
    """Whether keys lie in memory so that parts of them are heads."""
    return k.shape[2] % PART == 0 and k.stride(1) == k.shape[2] * k.stride(2)


def in_parts(q: Tensor, k: Tensor, v: Tensor, added: Tensor) -> Tensor:
    """As `attend_one`, of keys that are whole parts."""
    shared, together = q.shape[1], q.shape[2]
    count = k.shape[2] // PART
    keys, values = (x.unflatten(2, (count, PART)).flatten(1, 2) for x in (k, v))  # [B, K C, P, E]
    queries = q[:, :, None].expand(-1, -1, count, -1, -1).flatten(1, 2)  # [B, K C, G, E]
    mask = added.unflatten(-1, (count, PART)).transpose(2, 3).expand(-1, shared, -1, -1, -1)
    mask = mask.flatten(1, 2).expand(-1, -1, together, -1)  # [B, K C, G, P]
    out, logsum = _kernel(queries, keys, values, mask)
    weights = logsum[..., :together].unflatten(1, (shared, count)).softmax(2)  # [B, K, C, G]
    mixed: Tensor = (out.unflatten(1, (shared, count)) * weights[..., None]).sum(2)
    return mixed.to(q.dtype)


def _kernel(q: Tensor, k: Tensor, v: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
    """Output and, float32, log-sum of each query."""
    aten = torch.ops.aten
    out, logsum, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, added, True, 0.0, False)
    return out, logsum


class _Kind(NamedTuple):
    """What decides whether the kernel can be used."""

    device: torch.device
    dtype: torch.dtype
    together: int
    size: int


@cache
def _is_right(kind: _Kind) -> bool:
    """Whether parts give what plain products give; tried on three, one of which nobody sees."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, 2, length, kind.size, generator=draw).to(kind.device, kind.dtype)
        for length in (kind.together, 3 * PART, 3 * PART)
    )
    seen = torch.arange(3 * PART, device=kind.device) < torch.tensor(
        [[PART - 7], [2 * PART]], device=kind.device
    )
    added = q.new_zeros(()).masked_fill(~seen[:, None, None], MASKED)
    scores = q.float() @ k.float().mT * kind.size**-0.5 + added.float()
    wanted = scores.softmax(-1) @ v.float()
    try:
        apart = float((in_parts(q, k, v, added).float() - wanted).norm() / wanted.norm())
    except RuntimeError as error:
        return _left_out(" ".join(str(error).split())[:120])
    bound = max(ROUNDING * torch.finfo(kind.dtype).eps, LEAST)
    return apart <= bound or _left_out(f"it is {apart:.1g} off")


def _left_out(why: str) -> bool:
    say(f"keys cannot be attended to in parts here ({why}); long texts take longer for it")
    return False
