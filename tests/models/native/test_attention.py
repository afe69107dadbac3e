"""Attention by blocks gives what torch's does, output and gradients, for every kind of mask."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ingot.models.native import attention as cpu_attention
from ingot.models.native.attention import attend, causal_mask, document_mask
from tests.tolerances import SHARED_ROWS_BF16

HEADS, GROUPS, SIZE = 4, 2, 16
LENGTHS = [5, 128, 300]  # less than a block, one block, two and a part of one


def tensors(length: int) -> list[Tensor]:
    """q, k, v in bf16, laid out as projections leave them, and a gradient."""
    generator = torch.Generator().manual_seed(length)
    return [
        torch.randn(2, length, heads, SIZE, generator=generator).bfloat16().transpose(1, 2)
        for heads in (HEADS, GROUPS, GROUPS, HEADS)
    ]


def segments(length: int) -> Tensor:
    """Documents that end at different places in each row; the end of the second row is padding."""
    places = torch.arange(length)
    return torch.stack(
        [places // 3 % 97 // 50 + places // 131, torch.where(places < length // 2, 1, 0)]
    )


MASKS = {
    "causal": lambda length: None,
    "window": lambda length: causal_mask(length, 2, torch.device("cpu")),
    "documents": lambda length: document_mask(segments(length)),
    "one mask for all rows": lambda length: document_mask(segments(length)[:1]),
}


@pytest.mark.parametrize("together", [1, cpu_attention.SCORES], ids=["one row", "rows together"])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", MASKS)
def test_output_and_gradients(
    kind: str, length: int, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_attention, "SCORES", together)
    mask = MASKS[kind](length)
    *inputs, gradient = tensors(length)
    ours, theirs = (
        [tensor.to(dtype).detach().requires_grad_() for tensor in inputs]
        for dtype in (torch.bfloat16, torch.float64)
    )
    made = attend(*ours, mask)
    wanted = functional.scaled_dot_product_attention(
        *theirs, attn_mask=mask, is_causal=mask is None, enable_gqa=True
    )
    assert made.grad_fn is not None
    assert "cpu_attention" in type(made.grad_fn).__name__
    made.backward(gradient)
    wanted.backward(gradient.double())
    pairs = [
        (made, wanted),
        *((mine.grad, other.grad) for mine, other in zip(ours, theirs, strict=True)),
    ]
    for mine, other in pairs:
        assert mine is not None
        assert other is not None
        assert (
            float(((mine.double() - other).norm() / other.norm()).detach()) < 2 * SHARED_ROWS_BF16
        )


def test_keys_that_no_query_of_a_block_sees_are_left_out() -> None:
    mask = document_mask(torch.arange(512)[None] // 128)
    assert list(cpu_attention._blocks(mask[0], 512)) == [
        (start, start, start + 128) for start in (0, 128, 256, 384)
    ]
    assert [start for start, _, _ in cpu_attention._blocks(None, 512)] == [0, 0, 0, 0]


def test_a_compiler_takes_it_as_it_is() -> None:
    q, k, v, _ = (tensor.requires_grad_() for tensor in tensors(5))
    torch.library.opcheck(
        cpu_attention.cpu_attention, (q, k, v, None), test_utils=("test_schema", "test_faketensor")
    )


def test_only_bf16_in_training_on_whole_rows_comes_here() -> None:
    q, k, v, _ = tensors(5)
    for mine in ([q, k, v], [tensor.float().requires_grad_() for tensor in (q, k, v)]):
        assert "cpu_attention" not in type(attend(*mine, None).grad_fn).__name__
