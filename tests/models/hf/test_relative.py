"""Attention with a bias that is trained, by blocks of queries, beside torch's plain path in float64;
and the norm beside transformers' own.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.t5.modeling_t5 import T5LayerNorm

from ingot.models.hf.models import Seq2Seq
from ingot.models.hf.relative import LeanNorm, attend_relative, cpu_relative_attention
from ingot.models.native.attention import causal_mask
from tests.models.hf.tiny import drawn
from tests.tolerances import SHARED_ROWS, SHARED_ROWS_BF16

ROWS, HEADS, SIZE = 2, 3, 16


def inputs(length: int, keys: int, dtype: torch.dtype, size: int = SIZE) -> list[Tensor]:
    """q, k and v as projections leave them, and the bias as an embedding looks it up."""
    generator = torch.Generator().manual_seed(length)
    shapes = [(ROWS, count, HEADS, size) for count in (length, keys, keys)]
    made = [
        torch.randn(shape, generator=generator).to(dtype) for shape in [*shapes, (length, keys, 3)]
    ]
    return [tensor.requires_grad_() for tensor in made]


def padding(length: int, keys: int) -> Tensor:
    """Bool `[B, 1, T, S]`: the second row ends early."""
    ends = torch.tensor([keys, keys // 3])
    return (torch.arange(keys) < ends[:, None])[:, None, None].expand(-1, 1, length, -1)


def refused(*args: Any, **more: Any) -> Any:
    raise AssertionError("transformers' own attention was called")


def attend(given: list[Tensor], mask: Tensor | None, causal: bool, **more: Any) -> Tensor:
    q, k, v = (tensor.transpose(1, 2) for tensor in given[:3])
    bias = given[3].permute(2, 0, 1)[None]
    module = SimpleNamespace(is_causal=causal)
    return attend_relative(refused, module, q, k, v, mask, position_bias=bias, **more)[0]


def seen(mask: Tensor | None, causal: bool, length: int, keys: int) -> Tensor:
    """The mask that is meant: causality is not in the given one where there is none."""
    if mask is None:
        return (
            causal_mask(length, None, torch.device("cpu"))
            if causal
            else torch.ones(length, keys) > 0
        )
    return mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("length", "keys", "causal", "masked"),
    [
        (300, 300, False, False),
        (300, 300, False, True),
        (130, 130, True, False),
        (7, 150, False, True),
    ],
    ids=["encoder", "padded encoder", "decoder", "over the source"],
)
def test_output_and_gradients(
    length: int, keys: int, causal: bool, masked: bool, dtype: torch.dtype
) -> None:
    given = inputs(length, keys, dtype)
    mask = padding(length, keys) if masked else None
    made = attend(given, mask, causal, scaling=0.3)
    exact = [tensor.detach().double().requires_grad_() for tensor in given]
    bias = exact[3].permute(2, 0, 1)[None]
    q, k, v = (tensor.transpose(1, 2) for tensor in exact[:3])
    hidden = ~seen(mask, causal, length, keys)
    wanted = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=bias.masked_fill(hidden, -torch.inf), scale=0.3
    ).transpose(1, 2)
    gradient = torch.randn(made.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    made.backward(gradient)
    wanted.backward(gradient.double())
    tolerance = SHARED_ROWS if dtype == torch.float32 else 2 * SHARED_ROWS_BF16
    pairs = [
        (made, wanted),
        *((mine.grad, other.grad) for mine, other in zip(given, exact, strict=True)),
    ]
    for name, (mine, other) in zip(("out", "q", "k", "v", "bias"), pairs, strict=True):
        assert mine is not None
        assert other is not None
        off = (mine.detach().double() - other.detach()).norm() / other.detach().norm()
        assert off < tolerance, f"{name}: {off}"


def test_dropout_is_drawn_once_for_output_and_gradients() -> None:
    """With values that are the unit matrix the output is the probabilities that dropout left."""
    length, rate, scale = 160, 0.25, 0.1
    q, k, _, bias = inputs(length, length, torch.float32, size=length)
    unit = torch.eye(length)[None, :, None].repeat(ROWS, 1, HEADS, 1)

    def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seed: int) -> Tensor:
        torch.manual_seed(seed)
        mixed: Tensor = cpu_relative_attention(
            *(tensor.transpose(1, 2) for tensor in (q, k, v)),
            bias.permute(2, 0, 1)[None],
            None,
            scale,
            rate,
            torch.randint(2**62, (1,)),
        )
        return mixed

    left = run(q, k, unit, bias, 1)  # [B, H, T, S]
    assert torch.equal(left, run(q, k, unit, bias, 1))
    assert not torch.equal(left, run(q, k, unit, bias, 2))
    factors = (left.detach() != 0) / (1 - rate)
    share = float((factors == 0).float().mean())
    assert abs(share - rate) < 0.01
    assert not torch.equal(factors[0], factors[1])
    assert not torch.equal(factors[..., :32, :], factors[..., 128:, :])

    others = [tensor.detach().clone().requires_grad_() for tensor in (q, k, bias)]
    scores = scale * others[0].transpose(1, 2) @ others[1].permute(0, 2, 3, 1)
    wanted = (scores + others[2].permute(2, 0, 1)).softmax(-1) * factors
    gradient = torch.randn(left.shape, generator=torch.Generator().manual_seed(0))
    left.backward(gradient)
    wanted.backward(gradient)
    for mine, other in zip((q, k, bias), others, strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        assert (mine.grad - other.grad).norm() / other.grad.norm() < SHARED_ROWS


def test_a_compiler_and_a_plan_take_it_as_it_is() -> None:
    q, k, v, bias = inputs(5, 7, torch.float32)
    torch.library.opcheck(
        cpu_relative_attention,
        (
            *(tensor.detach().transpose(1, 2).requires_grad_() for tensor in (q, k, v)),
            bias.detach().permute(2, 0, 1)[None].requires_grad_(),
            padding(5, 7),
            1.0,
            0.5,
            torch.tensor([3]),
        ),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.parametrize("least", [0.5, 0.0, 1e-30], ids=["large", "a zero", "a tiny one"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_norm_is_transformers_own(dtype: torch.dtype, least: float) -> None:
    made: list[list[Any]] = []
    kinds: tuple[Any, ...] = (LeanNorm, T5LayerNorm)
    for kind in kinds:
        norm: Any = kinds[1](SIZE, eps=0.1)
        x, _, gradient, _ = inputs(7, 7, dtype)
        norm.weight.data = torch.linspace(least, 2, SIZE)
        norm.to(dtype).__class__ = kind
        out = norm(x)
        out.backward(gradient.detach())
        assert out.dtype == dtype
        made.append([out.detach(), x.grad, norm.weight.grad])
    tolerance = SHARED_ROWS if dtype == torch.float32 else 2 * SHARED_ROWS_BF16
    for mine, other in zip(*made, strict=True):
        assert (mine.double() - other.double()).norm() / other.double().norm() < tolerance


@pytest.mark.parametrize(("least", "tensors"), [(0.5, 1), (0.0, 2)], ids=["large", "a zero"])
def test_what_is_normalised_is_kept_once(least: float, tensors: int) -> None:
    """The product after the norm keeps what the norm keeps, but where a weight is 0."""
    norm, after = LeanNorm(), torch.nn.Linear(SIZE, 3)
    norm.weight = torch.nn.Parameter(torch.linspace(least, 2, SIZE))
    norm.variance_epsilon = 0.1
    kept: set[int] = set()

    def note(tensor: Tensor) -> Tensor:
        if tensor.numel() == ROWS * 7 * HEADS * SIZE:
            kept.add(tensor.untyped_storage().data_ptr())
        return tensor

    x, *_ = inputs(7, 7, torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = after(norm(x))
    assert out.requires_grad
    assert len(kept) == tensors


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_training_t5_comes_here_and_answering_does_not(
    dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention over the source has a bias of zeros, which torch is left with unless it drops."""
    model = drawn("t5").train()
    assert isinstance(model, Seq2Seq)
    for module in model.inner.modules():
        if hasattr(module, "relative_attention_max_distance"):
            module.dropout = dropout
    calls: list[Tensor] = []

    def noted(q: Tensor, *more: Any) -> Any:
        calls.append(q)
        return cpu_relative_attention(q, *more)

    monkeypatch.setattr("ingot.models.hf.relative.cpu_relative_attention", noted)
    tokens = torch.randint(4, 50, (2, 9))
    model.hidden(tokens, None, tokens[:, :5])
    assert len(calls) == (6 if dropout else 4), "two layers: encoder, decoder, decoder over encoder"
    with torch.no_grad():
        model.eval().hidden(tokens, None, tokens[:, :5])
    assert len(calls) == (6 if dropout else 4)
