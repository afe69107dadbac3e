"""Who looks at whom in a ring, without one: the plans of all ranks together are the mask of the
whole row.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ingot.models.native.attention import causal_mask, document_mask
from ingot.parallel.context import RingAttention, plan_ring
from ingot.parallel.rows import join_rows
from tests.parallel.shared_rows import LENGTH, make_rows

NOBODY: Any = None  # plans need no group
CPU = torch.device("cpu")


def seen(
    world: int, segments: torch.Tensor | None, window: int | None, *, peek: bool
) -> torch.Tensor:
    """Bool `[B, 1, T, T]`, from the plans of all ranks; a pair of tokens that is looked at twice is
    an error.
    """
    size = LENGTH // (2 * world)
    pieces = None if segments is None else segments.chunk(2 * world, 1)
    counts = torch.zeros(
        1 if segments is None else len(segments), 1, LENGTH, LENGTH, dtype=torch.int64
    )
    place = torch.arange(LENGTH).chunk(2 * world)
    for rank in range(world):
        steps = plan_ring(
            RingAttention(NOBODY, rank, world), size, pieces, window, CPU, peek=peek
        ).steps
        for step, glances in enumerate(steps):
            other = (rank - step) % world
            for queries, keys, mask, causal in glances:
                i, j = (rank, 2 * world - 1 - rank)[queries], (other, 2 * world - 1 - other)[keys]
                block = (
                    mask
                    if mask is not None
                    else (
                        causal_mask(size, None, CPU)
                        if causal
                        else torch.ones(size, size, dtype=torch.bool)
                    )
                )
                counts[:, :, place[i][:, None], place[j][None]] += block
    assert counts.max() == 1
    return counts == 1


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("window", [None, 1, 2, 6, 7, 14, 24, 47])
@pytest.mark.parametrize("peek", [True, False])
def test_plans_are_the_mask_of_the_row(world: int, window: int | None, peek: bool) -> None:
    segments = make_rows().segments
    assert segments is not None
    assert torch.equal(seen(world, segments, window, peek=peek), document_mask(segments, window))
    assert torch.equal(seen(world, None, window, peek=peek)[0, 0], causal_mask(LENGTH, window, CPU))


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_have_the_same_work_and_no_mask_in_rows_of_one_document(world: int) -> None:
    for rank in range(world):
        steps = plan_ring(RingAttention(NOBODY, rank, world), 6, None, None, CPU, peek=True).steps
        assert [len(glances) for glances in steps] == [3] + [2] * (world - 1)
        assert all(glance.mask is None for glances in steps for glance in glances)
        assert [glance.causal for glances in steps for glance in glances].count(True) == 2


def test_what_no_query_sees_costs_nothing() -> None:
    """Documents of a piece each, and windows shorter than a piece: nobody needs another rank's keys
    but the neighbour's.
    """
    alone = join_rows(
        [torch.tensor([[rank, 7 - rank]]).repeat_interleave(6, 1) for rank in range(4)]
    ).chunk(8, 1)
    for rank in range(4):
        steps = plan_ring(RingAttention(NOBODY, rank, 4), 6, alone, None, CPU, peek=True).steps
        assert [len(glances) for glances in steps] == [2, 0, 0, 0]
        assert all(glance.causal and glance.mask is None for glance in steps[0])
        near = plan_ring(RingAttention(NOBODY, rank, 4), 6, None, 4, CPU, peek=False).steps
        assert sum(len(glances) for glances in near) == 2 + (rank > 0) + 1
