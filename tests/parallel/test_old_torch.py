"""What torch can do only since a version that is not the lowest that ingot takes is refused in
words before it; what it can do since is held by the tests of each.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.torch_version import TorchVersion

from ingot.base.errors import WrongInput
from ingot.parallel.shard import shard_weights


@pytest.fixture
def old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0+cu130"))


def packed() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.weight = nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
    return layer


def test_zero_bubble(old: None) -> None:
    from ingot.parallel.schedules import _schedule_class  # torch's pipelining is slow to import

    with pytest.raises(
        WrongInput, match=r"needs torch 2\.13 or newer, and this is 2\.11\.0\+cu130"
    ):
        _schedule_class("zero_bubble")
    assert _schedule_class("interleaved").__name__ == "ScheduleInterleaved1F1B"


def test_shards_of_packed_weights(old: None) -> None:
    nowhere: Any = None
    with pytest.raises(
        WrongInput, match=r"few bits .* need torch 2\.13 or newer, and this is 2\.11"
    ):
        shard_weights(packed(), nowhere, reshard=True, compute=None, reduce=torch.float32)
