"""Attention over packed rows as a GPU computes it: what it sees is what the plain one sees."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ingot.models.device import deterministic_kernels
from ingot.models.native.attention import attention_masks, make_attn_fns, make_flex_attn_fns
from tests import tolerances

TIME, WINDOWS = 160, (None, 7, 200)


def made(device: str = "cpu", time: int = TIME) -> tuple[Tensor, Tensor, list[Tensor]]:
    """positions and segments of rows of several documents, one across the border of a block,
    padding at the end; q, k, v with shared heads.
    """
    generator = torch.Generator().manual_seed(0)
    segments = torch.ones(2, time, dtype=torch.int64)
    segments[0, 30:], segments[0, 90:], segments[1, 127:], segments[1, 150:] = 2, 3, 2, 0
    positions = torch.arange(time).expand(2, time)
    heads = [torch.randn(2, count, time, 16, generator=generator).to(device) for count in (4, 2, 2)]
    return positions.to(device), segments.to(device), heads


@pytest.mark.parametrize("packed", [True, False])
@torch.no_grad()
def test_it_sees_what_plain_attention_sees(packed: bool) -> None:
    positions, segments, heads = made()
    given = segments if packed else None
    plain, other = (
        make_attn_fns(positions, given, WINDOWS),
        make_flex_attn_fns(given, TIME, WINDOWS, torch.device("cpu")),
    )
    assert plain.keys() == other.keys()
    for window in WINDOWS:
        assert (
            float((plain[window](*heads) - other[window](*heads)).abs().max()) < tolerances.PACKED
        )
    assert float((other[None](*heads) - other[7](*heads)).abs().max()) > 0.1


def test_it_is_taken_on_a_gpu_only_where_plain_causal_attention_would_not_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(
        "ingot.models.native.attention.make_flex_attn_fns", lambda *given: asked.append(given) or {}
    )
    monkeypatch.setattr("ingot.models.native.attention.attention_masks", lambda *given: {})

    class Positions:
        device, shape = torch.device("cuda"), (2, TIME)

    segments = torch.ones(2, TIME, dtype=torch.int64)
    make_attn_fns(Positions(), None, [None, 200])  # type: ignore[arg-type]
    assert not asked
    make_attn_fns(Positions(), segments, [None])  # type: ignore[arg-type]
    make_attn_fns(Positions(), None, [None, 7])  # type: ignore[arg-type]
    assert [given[0] is not None for given in asked] == [True, False]
    with deterministic_kernels(torch.device("cuda")):
        make_attn_fns(Positions(), None, [None])  # type: ignore[arg-type]
    assert len(asked) == 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("time", [TIME, 96])
def test_gradients_on_a_gpu(time: int) -> None:
    """Also of rows so short that torch has another kernel for them."""
    positions, segments, heads = made("cuda", time)
    for window in WINDOWS:
        mask = attention_masks(segments, time, [window], positions.device)[window]
        one, other = ([each.clone().requires_grad_() for each in heads] for _ in range(2))
        torch.nn.functional.scaled_dot_product_attention(
            *one, attn_mask=mask, enable_gqa=True
        ).square().sum().backward()
        make_flex_attn_fns(segments, time, [window], positions.device)[window](
            *other
        ).square().sum().backward()
        for wanted, found in zip(one, other, strict=True):
            assert wanted.grad is not None
            assert found.grad is not None
            assert (
                float((wanted.grad - found.grad).norm() / wanted.grad.norm()) < 1e-2
            )  # tensor cores round float32 products
