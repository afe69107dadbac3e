"""Attention by blocks gives what torch's does, output and gradients, for every kind of mask."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ingot.models.native import attention as cpu_attention
from ingot.models.native.attention import attend, causal_mask, document_mask
from tests.tolerances import SHARED_ROWS, SHARED_ROWS_BF16

HEADS, GROUPS, SIZE = 4, 2, 16
LENGTHS = [5, 128, 300]  # less than a block, one block, two and a part of one
LONG = 600  # of float32: nine blocks and a part of one


def tensors(length: int, dtype: torch.dtype = torch.bfloat16, size: int = SIZE) -> list[Tensor]:
    """q, k, v, laid out as projections leave them, and a gradient."""
    generator = torch.Generator().manual_seed(length)
    return [
        torch.randn(2, length, heads, size, generator=generator).to(dtype).transpose(1, 2)
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


@pytest.mark.parametrize("together", ["one row", "rows together"])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", MASKS)
def test_output_and_gradients(
    kind: str, length: int, together: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if together == "one row":
        queries = cpu_attention.BLOCKS[torch.bfloat16].queries
        alone = cpu_attention.QueryBlock(queries, scores=1)
        monkeypatch.setitem(cpu_attention.BLOCKS, torch.bfloat16, alone)
    compare_with_torch(MASKS[kind](length), tensors(length), 2 * SHARED_ROWS_BF16)


@pytest.mark.parametrize("kind", MASKS)
def test_output_and_gradients_in_float32(kind: str) -> None:
    compare_with_torch(MASKS[kind](LONG), tensors(LONG, torch.float32, 64), SHARED_ROWS)


def compare_with_torch(mask: Tensor | None, given: list[Tensor], most: float) -> None:
    """Output and gradients of attention by blocks are torch's in float64, but for rounding."""
    *inputs, gradient = given
    ours, theirs = (
        [tensor.to(dtype).detach().requires_grad_() for tensor in inputs]
        for dtype in (gradient.dtype, torch.float64)
    )
    made = attend(*ours, mask)
    wanted = functional.scaled_dot_product_attention(
        *theirs, attn_mask=mask, is_causal=mask is None, enable_gqa=True
    )
    assert takes_blocks(made)
    made.backward(gradient)
    wanted.backward(gradient.double())
    pairs = [
        (made, wanted),
        *((mine.grad, other.grad) for mine, other in zip(ours, theirs, strict=True)),
    ]
    for mine, other in pairs:
        assert mine is not None
        assert other is not None
        assert float(((mine.double() - other).norm() / other.norm()).detach()) < most


def takes_blocks(made: Tensor) -> bool:
    return "cpu_attention" in type(made.grad_fn).__name__


def test_keys_that_no_query_of_a_block_sees_are_left_out() -> None:
    mask = document_mask(torch.arange(512)[None] // 128)
    assert list(cpu_attention._blocks(mask[0], 512, 128)) == [
        (start, start, start + 128) for start in (0, 128, 256, 384)
    ]
    assert [start for start, _, _ in cpu_attention._blocks(None, 512, 128)] == [0, 0, 0, 0]


def test_a_compiler_takes_it_as_it_is() -> None:
    q, k, v, _ = (tensor.requires_grad_() for tensor in tensors(5))
    torch.library.opcheck(
        cpu_attention.cpu_attention, (q, k, v, None), test_utils=("test_schema", "test_faketensor")
    )


def test_other_than_whole_rows_in_training_does_not_come_here() -> None:
    q, k, v, _ = tensors(5)
    q.requires_grad_()
    assert takes_blocks(attend(q, k, v, None))
    assert not takes_blocks(attend(q[:, :, -1:], k, v, torch.ones(1, 5, dtype=torch.bool)))
    with torch.no_grad():
        assert not takes_blocks(attend(q, k, v, None))


@pytest.mark.parametrize(
    ("length", "size", "masked", "blocks"),
    [
        (512, 64, False, True),
        (511, 64, True, False),
        (512, 32, True, False),
        (1024, 64, False, False),
        (1024, 64, True, True),
    ],
)
def test_in_float32_where_it_was_measured_to_be_faster(
    length: int, size: int, masked: bool, blocks: bool
) -> None:
    q, k, v, _ = tensors(length, torch.float32, size)
    mask = MASKS["documents"](length) if masked else None
    assert takes_blocks(attend(q.requires_grad_(), k, v, mask)) is blocks
