"""What a query sees of the stored keys."""

from __future__ import annotations

import pytest
import torch

from ingot.models.generation import windows
from ingot.models.generation.cache import KVCache
from ingot.models.generation.windows import StepWindow
from ingot.models.native.attention import attend, causal_mask
from tests import tolerances

CPU = torch.device("cpu")


@pytest.mark.parametrize("window", [None, 1, 3, 6, 9, 150])
@pytest.mark.parametrize("length", [7, 300])
@pytest.mark.parametrize("starts", [[0], [4], [6], [2, 5, 0], [0, 0]])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("skips", [False, True])
def test_generation_sees_what_training_sees(
    window: int | None,
    length: int,
    starts: list[int],
    sinks: bool,
    skips: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows that are stored up to `starts` and then read on, in blocks of queries where they are
    long, or as a GPU reads them, attend as rows that are read whole.
    """
    monkeypatch.setattr(windows, "skips_masked", lambda device: skips)
    rows = len(starts)
    draw = torch.Generator().manual_seed(3)
    q = torch.randn(rows, 4, length, 8, generator=draw)
    k, v = torch.randn(2, rows, 2, length, 8, generator=draw)
    extra = torch.randn(4, generator=draw) if sinks else None
    expected = attend(q, k, v, causal_mask(length, window, CPU), extra)
    cache = KVCache([window], 4, 512)
    for row, start in enumerate(starts):
        here = slice(row, row + 1)
        if start:
            first = cache.window(1 + row, [0], start, CPU)
            first.attend(0, q[here, :, :start], k[here, :, :start], v[here, :, :start], extra)
    time = length - max(starts)
    new = [
        torch.stack([part[row, :, start : start + time] for row, start in enumerate(starts)])
        for part in (q, k, v)
    ]
    mixed = cache.window(1, starts, time, CPU).attend(0, new[0], new[1], new[2], extra)
    for row, start in enumerate(starts):
        whole = expected[row, :, start : start + time]
        assert float((mixed[row] - whole).norm() / whole.norm()) < tolerances.SHARED_ROWS


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("sinks", [False, True])
def test_a_step_that_is_recorded_sees_the_same(
    window: int | None, sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a row too many, which writes where no request reads; computed as on a GPU."""
    draw = torch.Generator().manual_seed(4)
    starts, extra = [7, 2], torch.randn(4, generator=draw) if sinks else None
    stored = torch.randn(2, 3, 2, 7, 8, generator=draw)
    q = torch.randn(3, 4, 1, 8, generator=draw)
    k, v = torch.randn(2, 3, 2, 1, 8, generator=draw)
    caches = [KVCache([window], 4, 64, recorded=recorded) for recorded in (False, True)]
    for cache in caches:
        cache.window(0, [0] * 3, 7, CPU).attend(0, stored[0].repeat(1, 2, 1, 1), *stored)
    wanted = caches[0].window(0, starts, 1, CPU).attend(0, q[:2], k[:2], v[:2], extra)
    monkeypatch.setattr(windows, "skips_masked", lambda device: True)
    rows = torch.tensor([0, 1, caches[1].spare_row])
    step = StepWindow(caches[1], rows, torch.tensor([[7], [2], [0]]), 16)
    found = step.attend(0, q, k, v, extra)[:2]
    assert float((found - wanted).norm() / wanted.norm()) < tolerances.SHARED_ROWS
    for one, other in zip(caches[0].saved(2, 0, 7), caches[1].saved(2, 0, 7), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("recorded", [False, True])
def test_what_a_long_row_has_left_is_given_back_and_others_stay(recorded: bool) -> None:
    cache = KVCache([None], 4, 4096, recorded=recorded)
    q, k, v = torch.randn(3, 3, 2, 1300, 8, generator=torch.Generator().manual_seed(5))
    cache.window(0, [0] * 3, 1300, CPU).attend(0, q, k, v, None)
    kept, addresses = [cache.saved(row, 0, 70) for row in range(2)], cache.changes
    held = cache.store(0, k)[0].nbytes
    assert cache.growth(3, 1300) == 0
    assert cache.growth(3, 2000) > 0
    cache.shorten(2, 400)
    assert (cache.changes, cache.store(0, k)[0].nbytes) == (addresses, held), "not much longer"
    cache.shorten(2, 70)
    assert cache.changes > addresses
    assert cache.store(0, k)[0].nbytes < held / 2
    cache.window(2, [0], 90, CPU).attend(0, q[:1, :, :90], k[:1, :, :90], v[:1, :, :90], None)
    for row, saved in enumerate(kept):
        assert torch.equal(cache.saved(row, 0, 70), saved)
    assert cache.store(0, k)[0].isfinite().all()
