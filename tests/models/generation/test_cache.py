"""What a query sees of the stored keys."""

from __future__ import annotations

import pytest
import torch

from ingot.models.generation.cache import KVCache
from ingot.models.native.attention import attend, causal_mask
from tests import tolerances


@pytest.mark.parametrize("window", [None, 1, 3, 6, 9, 150])
@pytest.mark.parametrize("length", [7, 300])
@pytest.mark.parametrize("starts", [[0], [4], [6], [2, 5, 0]])
@pytest.mark.parametrize("sinks", [False, True])
def test_generation_sees_what_training_sees(
    window: int | None, length: int, starts: list[int], sinks: bool
) -> None:
    """Rows that are stored up to `starts` and then read on, in blocks of queries where they are
    long, attend as rows that are read whole.
    """
    cpu, rows = torch.device("cpu"), len(starts)
    draw = torch.Generator().manual_seed(3)
    q = torch.randn(rows, 4, length, 8, generator=draw)
    k, v = torch.randn(2, rows, 2, length, 8, generator=draw)
    extra = torch.randn(4, generator=draw) if sinks else None
    expected = attend(q, k, v, causal_mask(length, window, cpu), extra)
    cache = KVCache([window], 4, 512)
    for row, start in enumerate(starts):
        here = slice(row, row + 1)
        if start:
            first = cache.window(1 + row, [0], start, cpu)
            first.attend(0, q[here, :, :start], k[here, :, :start], v[here, :, :start], extra)
    time = length - max(starts)
    new = [
        torch.stack([part[row, :, start : start + time] for row, start in enumerate(starts)])
        for part in (q, k, v)
    ]
    mixed = cache.window(1, starts, time, cpu).attend(0, new[0], new[1], new[2], extra)
    for row, start in enumerate(starts):
        whole = expected[row, :, start : start + time]
        assert float((mixed[row] - whole).norm() / whole.norm()) < tolerances.SHARED_ROWS
