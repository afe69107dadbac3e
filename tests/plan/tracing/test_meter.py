"""What is allocated, freed, gathered and computed is recorded without contents, as the allocator
counts it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.plan_memory import MEASURED, count_everywhere, smallest_peak
from ingot.plan.tracing.meter import Meter

ROWS, WIDE = 64, 4096


@dataclass(frozen=True)
class GradientCase:
    """Code whose backward formulas make another tensor where a mode is active."""

    name: str
    loss: Callable[[Tensor], Tensor]


CASES = (
    GradientCase("gather", lambda x: x.gather(-1, torch.zeros(ROWS, 1, dtype=torch.int64)).sum()),
    GradientCase(
        "gather twice",
        lambda x: (
            x.logsumexp(-1).sum() + x.gather(-1, torch.zeros(ROWS, 1, dtype=torch.int64)).sum()
        ),
    ),
    GradientCase("index", lambda x: x[torch.zeros(ROWS // 2, dtype=torch.int64)].sum()),
    GradientCase("select", lambda x: x.index_select(0, torch.zeros(9, dtype=torch.int64)).sum()),
    GradientCase("two products", lambda x: (x * 2).sum() + (x * 3).sum()),
    GradientCase("sum of four", lambda x: (x.exp() + x.sin() + x.cos() + x.tanh()).sum()),
)


def _counted(case: GradientCase) -> int:
    count_everywhere()
    with torch.profiler.profile(profile_memory=True) as profile:
        x = torch.zeros(ROWS, WIDE, requires_grad=True)
        with torch.profiler.record_function(MEASURED):
            case.loss(x).backward()
    return smallest_peak(profile)["peak"]


def _traced(case: GradientCase) -> int:
    with FakeTensorMode(), Meter() as meter:
        x = torch.zeros(ROWS, WIDE, requires_grad=True)
        case.loss(x).backward()
        return meter.peaks([(0, meter.now)])[0].total


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients_are_written_in_place_as_without_a_mode(case: GradientCase) -> None:
    assert _traced(case) == pytest.approx(_counted(case), abs=4096)


def test_the_count_covers_blocks_that_another_thread_lets_go() -> None:
    blocks: list[Tensor] = []
    count_everywhere()
    with (
        torch.profiler.profile(profile_memory=True) as profile,
        torch.profiler.record_function(MEASURED),
    ):
        for _ in range(4):
            blocks[:] = [torch.zeros(1 << 18)]
            thread = threading.Thread(target=blocks.clear)
            thread.start()
            thread.join()
        torch.zeros(1)
    assert 1 << 20 <= smallest_peak(profile)["peak"] < 2 << 20


def test_what_sharding_gathers_counts_while_it_is_there() -> None:
    """It resizes storages, which is no operator."""
    with FakeTensorMode(), Meter() as meter:
        gathered = torch.empty(1000)
        gathered.untyped_storage().resize_(0)
        before = meter.now
        gathered.untyped_storage().resize_(4000)
        during = meter.now
        gathered.untyped_storage().resize_(0)
    there, after = meter.peaks([(before, during), (meter.now, meter.now)])
    assert (there.bytes["gathered"], there.total) == (4000, 4000)
    assert after.total == 0


def _collectives() -> None:
    whole, share = torch.empty(2000), torch.empty(1000)
    dist.all_gather_into_tensor(whole, share)
    dist.reduce_scatter_tensor(share, whole)
    dist.all_gather([share, torch.empty(1000)], share)
    dist.all_reduce(whole)


def test_what_gloo_copies_counts_during_a_collective() -> None:
    """Against gloo itself: all but `all_reduce` work on a copy of the whole tensor."""
    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        peaks = []
        for gloo in (False, True):
            with FakeTensorMode(), Meter(gloo=gloo) as meter:
                _collectives()
                whole, after = meter.peaks([(0, meter.now), (meter.now, meter.now)])
            assert after.total == 0
            peaks.append(whole.total)
    finally:
        dist.destroy_process_group()
    assert peaks == [16_000, 24_000]


def test_blocks_are_counted_once_and_as_an_allocator_rounds_them() -> None:
    for rounded, size in ((False, 40), (True, 512)):
        with FakeTensorMode(), Meter(rounded=rounded) as meter:
            one = torch.empty(10)
            view = one.view(2, 5)
            del one
            held = meter.now
            del view
        whole, after = meter.peaks([(0, held), (meter.now, meter.now)])
        assert (whole.total, after.total) == (size, 0)


def test_stretches_of_a_backward_pass_are_as_long_as_those_of_fewer_layers() -> None:
    """A line through two traces joins what happens in the same layers, from both ends."""
    meter = Meter()
    meter._phases = [*["forward"] * 6, *["backward"] * 20]
    meter._changes = [(0, 1)] * 26
    assert meter.windows(0) == [(0, 6), (6, 18), (14, 26)]
    assert meter.windows(0, [4, 7, 7]) == [(0, 6), (6, 13), (19, 26)]
    assert meter.windows(0, [4, 99, 99]) == [(0, 6), (6, 26), (6, 26)]
