"""The kernels of GPUs: how they are called, and that none is used which gives other numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ingot.models.device import planning_for
from ingot.parallel import fused_blocks as fused
from ingot.parallel.blockwise import FlashKernel, MatmulKernel, PartialAttention
from ingot.parallel.fused_blocks import (
    CUDNN,
    EFFICIENT,
    FLASH,
    Case,
    FusedKernel,
    KernelInputs,
    is_right,
    kernel_for,
)
from tests.parallel.stand_in_kernel import STAND_IN, attend, differentiate

CPU = torch.device("cpu")
CASES = [
    Case(CPU, dtype, heads, shared, 16, masked)
    for dtype in (torch.float32, torch.bfloat16)
    for heads, shared in ((4, 4), (6, 2))
    for masked in (False, True)
]


@pytest.mark.parametrize("kernel", [FLASH, CUDNN, EFFICIENT], ids=lambda kernel: kernel.name)
def test_torch_has_them_with_these_arguments(kernel: FusedKernel) -> None:
    """On tensors without contents, as on any device."""
    q, k, v = (
        torch.empty(2, heads, length, 64, dtype=torch.bfloat16, device="meta")
        for heads, length in ((8, 64), (2, 96), (2, 96))
    )
    masks = [None, torch.ones(2, 1, 64, 96, dtype=torch.bool, device="meta")]
    for mask in masks[: 2 if kernel is EFFICIENT else 1]:
        part = kernel.forward(q, k, v, mask, False)
        assert part.out.shape == q.shape
        assert part.logsum.shape == (2, 8, 64)
        assert part.out.dtype == part.logsum.dtype == torch.float32
        found = kernel.backward(part.out, q, k, v, part, mask, False)
        assert [each.shape for each in found] == [q.shape, k.shape, v.shape]


def test_the_output_is_read_as_it_was_written() -> None:
    """The memory-efficient kernel takes one layout of it for granted in bf16."""
    q = torch.empty(2, 8, 64, 32, dtype=torch.bfloat16, device="meta")
    part, seen = EFFICIENT.forward(q, q, q, None, True), list[Tensor]()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if "efficient_attention_backward" in str(func):
                seen.append(args[5])
            return func(*args, **(kwargs or {}))

    with Watch():
        EFFICIENT.backward(q, q, q, q, part, None, True)
    assert [each.transpose(1, 2).is_contiguous() for each in seen] == [True]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_kernel_that_is_right_is_found_right(case: Case) -> None:
    assert is_right(STAND_IN, case)


def _less(block: KernelInputs) -> tuple[Tensor, Tensor]:
    return attend(block._replace(q=block.q * 0.9))


def _other_logsum(block: KernelInputs) -> tuple[Tensor, Tensor]:
    out, logsum = attend(block)
    return out, logsum / 0.6931


def _without_mask(block: KernelInputs) -> tuple[Tensor, Tensor]:
    return attend(block._replace(added=None))


def _not_causal(block: KernelInputs) -> tuple[Tensor, Tensor]:
    return attend(block._replace(causal=False))


def _nothing(*given: Any) -> Any:
    raise RuntimeError("no kernel image\nis available")


def _not_finite(block: KernelInputs) -> tuple[Tensor, Tensor]:
    out, logsum = attend(block)
    return out * float("nan"), logsum


def _own_logsum(gradient: Tensor, block: KernelInputs, *whole: Tensor) -> Any:
    """A gradient by what this block alone sums to."""
    return differentiate(gradient, block, *(own.contiguous() for own in attend(block)))


def _in_another_order(*given: Any) -> Any:
    dq, dk, dv = differentiate(*given)
    return dq, dv, dk


@pytest.mark.parametrize(
    ("wrong", "masked"),
    [
        *((replace(STAND_IN, attend=one), False) for one in (_less, _other_logsum, _not_causal)),
        *((replace(STAND_IN, attend=one), False) for one in (_nothing, _not_finite)),
        (replace(STAND_IN, attend=_without_mask), True),
        (replace(STAND_IN, differentiate=_own_logsum), False),
        (replace(STAND_IN, differentiate=_in_another_order), True),
        (replace(STAND_IN, differentiate=_nothing), True),
    ],
)
def test_one_that_is_wrong_is_left_out_and_told(
    wrong: FusedKernel, masked: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    case = Case(CPU, torch.bfloat16, 4, 2, 16, masked)
    assert not is_right(wrong, case)
    told = capsys.readouterr().err
    assert "a CPU's attention cannot be used between ranks that share rows, for bfloat16" in told
    assert not is_right(wrong, case)
    assert not capsys.readouterr().err  # it is told once


def test_the_first_that_is_right_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def q(length: int = 64, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.zeros(1, 2, length, 16, dtype=dtype)

    mask = torch.ones(1, 1, 64, 64, dtype=torch.bool)
    right: set[FusedKernel] = {CUDNN, FLASH, EFFICIENT}
    monkeypatch.setattr(fused, "is_right", lambda kernel, case: kernel in right)
    monkeypatch.setattr(fused, "prefers_cudnn_attention", lambda device: True)
    monkeypatch.setattr(fused, "kernel_type", lambda device: "cuda")
    assert kernel_for(q(), q(), None) is CUDNN
    assert kernel_for(q(), q(), mask) is EFFICIENT
    torch.use_deterministic_algorithms(True)
    try:
        assert kernel_for(q(), q(), None) is FLASH
    finally:
        torch.use_deterministic_algorithms(False)
    assert kernel_for(q(dtype=torch.float32), q(dtype=torch.float32), None) is EFFICIENT
    assert isinstance(kernel_for(q(40), q(40), torch.ones(1, 1, 40, 40).bool()), MatmulKernel)
    right.remove(CUDNN)
    assert kernel_for(q(), q(), None) is FLASH
    right.remove(FLASH)
    assert kernel_for(q(), q(), None) is EFFICIENT
    right.clear()
    assert isinstance(kernel_for(q(), q(), None), MatmulKernel)
    with planning_for("cuda"):
        assert kernel_for(q(), q(), None) is FLASH
        assert kernel_for(q(), q(), mask) is EFFICIENT


def test_each_device_has_a_kernel() -> None:
    q = torch.zeros(1, 2, 64, 16, dtype=torch.bfloat16)
    assert isinstance(kernel_for(q, q, None), FlashKernel)
    with planning_for("cuda"):
        assert kernel_for(q, q, None) is FLASH
    with planning_for("mps"):
        assert isinstance(kernel_for(q, q, None), MatmulKernel)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("size", [64, 128])
def test_on_this_gpu_a_fused_kernel_is_used_and_right(size: int, masked: bool) -> None:
    device, generator = torch.device("cuda"), torch.Generator().manual_seed(0)
    q, gradient, k, v = (
        torch.randn(2, heads, 512, size, generator=generator).to(device, torch.bfloat16)
        for heads in (8, 8, 2, 2)
    )
    mask = None
    if masked:
        place = torch.arange(512, device=device)
        mask = ((place[:, None] >= place) & (place[:, None] // 200 == place // 200))[None, None]
    chosen = kernel_for(q, k, mask)
    assert isinstance(chosen, FusedKernel)
    causal = not masked
    plain: PartialAttention = MatmulKernel().forward(q, k, v, mask, causal)
    part = chosen.forward(q, k, v, mask, causal)
    wanted = MatmulKernel().backward(gradient, q, k, v, plain, mask, causal)
    found = chosen.backward(gradient, q, k, v, plain, mask, causal)
    for one, other in zip((*part, *found), (*plain, *wanted), strict=True):
        assert (one.float() - other.float()).norm() < 2**-6 * other.float().norm()
