"""Attention in parts: each kernel against attention over all keys, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ingot.models.native.attention import attend, causal_mask
from ingot.parallel import blockwise as blocks
from ingot.parallel.blockwise import (
    BlockKernel,
    FlashKernel,
    MatmulKernel,
    PartialAttention,
    merge,
)
from tests import tolerances
from tests.parallel.stand_in_kernel import STAND_IN

KERNELS = [FlashKernel(), MatmulKernel(), STAND_IN]


def some(heads: int = 6, keys: int = 2, time: int = 20) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, and a gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, gradient = (
        torch.randn(2, count, time, 8, generator=generator) for count in (heads, keys, keys, heads)
    )
    return q, k, v, gradient


def near(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).norm() < tolerances.SHARED_ROWS * b.norm())


@pytest.mark.parametrize("kernel", KERNELS, ids=["fused", "products", "as on a GPU"])
@pytest.mark.parametrize("how", ["causal", "mask", "all"])
@pytest.mark.parametrize("heads", [(6, 2), (4, 4), (3, 1)])
def test_a_kernel_equals_attention(kernel: BlockKernel, how: str, heads: tuple[int, int]) -> None:
    q, k, v, gradient = some(*heads)
    allowed = (
        causal_mask(20, None, q.device)
        if how == "causal"
        else torch.ones(2, 1, 20, 20, dtype=torch.bool)
    )
    if how == "mask":
        allowed = (
            torch.rand(2, 1, 20, 20, generator=torch.Generator().manual_seed(1)) < 0.3
        ) | torch.eye(20, dtype=torch.bool)
    leaves = [each.clone().requires_grad_() for each in (q, k, v)]
    expected = attend(*leaves, allowed)
    part = kernel.forward(q, k, v, allowed if how == "mask" else None, how == "causal")
    assert near(part.out, expected)
    found = kernel.backward(
        gradient, q, k, v, part, allowed if how == "mask" else None, how == "causal"
    )
    for ours, theirs in zip(found, torch.autograd.grad(expected, leaves, gradient), strict=True):
        assert near(ours, theirs)


@pytest.mark.parametrize("kernel", KERNELS, ids=["fused", "products", "as on a GPU"])
def test_parts_make_the_whole(kernel: BlockKernel) -> None:
    """Keys cut in two unequal parts, of which some queries see nothing of one."""
    q, k, v, gradient = some()
    mask = torch.rand(2, 1, 20, 20, generator=torch.Generator().manual_seed(1)) < 0.5
    mask[:, :, :5, 8:], mask[:, :, 5:9, :8], mask[..., 0], mask[..., 12] = False, False, True, True
    mask[:, :, :5, 12], mask[:, :, 5:9, 0] = False, False
    whole = kernel.forward(q, k, v, mask, False)
    cuts, found, total = (slice(0, 8), slice(8, 20)), [], None
    for keys in cuts:
        part = kernel.forward(q, k[:, :, keys], v[:, :, keys], mask[..., keys], False)
        assert part.out.isfinite().all()
        total = merge(total, part)
        found.append(
            kernel.backward(
                gradient, q, k[:, :, keys], v[:, :, keys], whole, mask[..., keys], False
            )
        )
    assert total is not None
    assert near(total.out, whole.out)
    assert near(total.logsum, whole.logsum)
    dq, dk, dv = kernel.backward(gradient, q, k, v, whole, mask, False)
    assert near(found[0][0] + found[1][0], dq)
    assert near(torch.cat((found[0][1], found[1][1]), 2), dk)
    assert near(torch.cat((found[0][2], found[1][2]), 2), dv)


def test_products_of_a_few_queries_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, gradient = some()
    mask = causal_mask(20, 7, q.device)[None, None]
    at_once = MatmulKernel().forward(q, k, v, mask, False)
    gradients = MatmulKernel().backward(gradient, q, k, v, at_once, mask, False)
    monkeypatch.setattr(blocks, "_MAX_SCORES", 2 * 6 * 20 * 3)
    part = MatmulKernel().forward(q, k, v, mask, False)
    assert near(part.out, at_once.out)
    assert near(part.logsum, at_once.logsum)
    assert all(
        near(a, b)
        for a, b in zip(
            MatmulKernel().backward(gradient, q, k, v, part, mask, False), gradients, strict=True
        )
    )


@pytest.mark.parametrize("kernel", KERNELS, ids=["fused", "products", "as on a GPU"])
def test_half_precision_is_summed_in_full(kernel: BlockKernel) -> None:
    q, k, v, _ = (each.bfloat16() for each in some())
    part = kernel.forward(q, k, v, None, True)
    assert part.out.dtype == part.logsum.dtype == torch.float32
    exact: PartialAttention = MatmulKernel().forward(q.float(), k.float(), v.float(), None, True)
    assert (part.out - exact.out).norm() < tolerances.SHARED_ROWS_BF16 * exact.out.norm()
    assert (part.logsum - exact.logsum).abs().max() < tolerances.LOGPROB
