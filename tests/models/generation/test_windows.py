"""Many keys attended to in parts, which a GPU does; here with the kernel of a CPU in its place."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from ingot.models.generation import windows
from ingot.models.generation.cache import KVCache
from ingot.models.generation.windows import (
    MANY_KEYS,
    MASKED,
    PART,
    StepWindow,
    attend_one,
    in_parts,
)
from tests import tolerances

CPU = torch.device("cpu")


def cpu_kernel(q: Tensor, k: Tensor, v: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
    """Log-sums of queries in multiples of 32, as the GPU's has them."""
    out, logsum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, False, attn_mask=added
    )
    return out, torch.nn.functional.pad(logsum, (0, -logsum.shape[2] % 32), value=7.0)


@pytest.fixture(autouse=True)
def _kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(windows, "_kernel", cpu_kernel)
    windows._is_right.cache_clear()
    yield
    windows._is_right.cache_clear()


def kind(size: int = 16) -> windows._Kind:
    return windows._Kind(CPU, torch.float32, 3, size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_give_what_the_whole_gives(dtype: torch.dtype) -> None:
    """Also where nothing of a part is seen, or one key alone."""
    draw = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(3, 2, length, 16, generator=draw).to(dtype) for length in (4, 2048, 2048)
    )
    seen = torch.arange(2048) < torch.tensor([[1], [PART + 1], [2048]])
    added = q.new_zeros(()).masked_fill(~seen[:, None, None], MASKED)
    wanted = attend_one(q, k, v, added).float()
    found = in_parts(q, k, v, added)
    assert found.dtype == dtype
    bound = tolerances.SHARED_ROWS if dtype == torch.float32 else 2**-7
    assert float((found.float() - wanted).norm() / wanted.norm()) < bound


@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("heads", [2, 6])
def test_a_step_over_many_keys_sees_the_same(
    window: int | None, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(windows, "skips_masked", lambda device: True)
    draw, time, starts = torch.Generator().manual_seed(2), 2100, [2100, 40]
    stored = torch.randn(2, 2, 2, time, 16, generator=draw)
    q = torch.randn(3, heads, 1, 16, generator=draw)
    k, v = torch.randn(2, 3, 2, 1, 16, generator=draw)
    caches = [KVCache([window], 4, 8192, recorded=recorded) for recorded in (False, True)]
    for cache in caches:
        few = stored[0].repeat_interleave(heads // 2, dim=1)
        cache.window(0, [0] * 2, time, CPU).attend(0, few, *stored)
    wanted = caches[0].window(0, starts, 1, CPU).attend(0, q[:2], k[:2], v[:2])
    taken = list[int]()

    def parts(q: Tensor, k: Tensor, v: Tensor, added: Tensor) -> Tensor:
        taken.append(k.shape[2])
        assert windows._splits(k)
        return in_parts(q, k, v, added)

    monkeypatch.setattr(windows, "attend_one", parts)
    caches[1].reserve(3, 2176)
    rows = torch.tensor([0, 1, caches[1].spare_row])
    step = StepWindow(caches[1], rows, torch.tensor([[2100], [40], [0]]), 2176)
    found = step.attend(0, q, k, v)[:2]
    assert taken == [2560], "whole parts, all that there is room for"
    assert float((found - wanted).norm() / wanted.norm()) < tolerances.SHARED_ROWS


def test_a_step_reads_no_more_than_it_needs_by_half() -> None:
    """Of many rows, of few tokens, and of a cache that a longer request has left, what it needs."""
    cache = KVCache([None], 64, 16_384, recorded=True)
    cache.reserve(20, 1000)
    assert cache.read_by_a_step(2, 768) == 768
    cache.reserve(20, 5000)
    assert cache.read_by_a_step(2, 5000) == 5120
    assert cache.read_by_a_step(16, 3584) == 5120
    assert cache.read_by_a_step(17, 5000) == 5000
    assert cache.read_by_a_step(2, 3072) == 3072


def test_keys_that_lie_otherwise_are_not_split() -> None:
    k = torch.empty(2, 3, 4 * PART, 8)
    assert windows._splits(k)
    assert not windows._splits(k[:, :, : 2 * PART])
    assert not windows._splits(k[:, :, : 2 * PART + 8])
    assert not windows._splits(k.transpose(0, 1)[:, :, 1:])


def test_parts_that_are_wrong_are_not_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert windows._is_right(kind())

    def other(q: Tensor, k: Tensor, v: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        out, logsum = cpu_kernel(q, k, v, added)
        return out, logsum.where(logsum > MASKED / 2, 0.0)

    def none(*given: Tensor) -> tuple[Tensor, Tensor]:
        raise RuntimeError("no kernel\nfor this")

    for kernel, told in {other: "it is ", none: "no kernel for this"}.items():
        monkeypatch.setattr(windows, "_kernel", kernel)
        windows._is_right.cache_clear()
        assert not windows._is_right(kind())
        assert f"keys cannot be attended to in parts here ({told}" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_this_gpu(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    draw = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(2, 8, length, 64, generator=draw).to("cuda", dtype)
        for length in (4, 2 * MANY_KEYS, 2 * MANY_KEYS)
    )
    seen = torch.arange(2 * MANY_KEYS) < torch.tensor([[3000], [40]])
    added = q.new_zeros(()).masked_fill(~seen[:, None, None].cuda(), MASKED)
    assert windows._is_right(windows._Kind(q.device, dtype, 4, 64))
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, added).float()
    found = attend_one(q, k, v, added).float()
    assert float((found - wanted).norm() / wanted.norm()) < 2**-6
