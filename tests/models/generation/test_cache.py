"""What a query sees of the stored keys."""

from __future__ import annotations

import pytest
import torch

from ingot.models.generation.cache import KVCache
from ingot.models.native.attention import causal_mask


@pytest.mark.parametrize("window", [None, 1, 3, 6, 9])
@pytest.mark.parametrize("start", [0, 4])
def test_generation_sees_what_training_sees(window: int | None, start: int) -> None:
    cpu, length = torch.device("cpu"), 7
    cache = KVCache([window], 1, 16)
    keys = torch.zeros(1, 1, length - start, 2)
    _, _, mask = cache.window(0, [start], length - start, cpu).append(0, keys, keys)
    whole = causal_mask(length, window, cpu)[start:]
    seen = mask[0, 0]
    assert torch.equal(whole[:, length - seen.shape[1] :], seen)
    assert not whole[:, : length - seen.shape[1]].any()
