"""The replay of torch's allocator, against what torch's own tests expect of it and by hand."""

from __future__ import annotations

import random

import pytest

from ingot.plan.tracing.segments import replay

KIB, MIB = 2**10, 2**20


def _allocations(*sizes: int) -> list[tuple[int, int]]:
    return list(enumerate(sizes))


@pytest.mark.parametrize(
    ("size", "count", "reserved"),
    [
        # torch's test_graph_memory_stats_and_use_result_after_destroy_graph has these numbers.
        (512, 1, 2 * MIB),
        (MIB, 2, 2 * MIB),
        (MIB + 512, 1, 20 * MIB),
        (10 * MIB - 512, 2, 20 * MIB),
        (10 * MIB + 512, 3, 3 * 12 * MIB),
        # By hand: a third one of 10 MiB - 512 finds no place, a block is at least 512 bytes.
        (10 * MIB - 512, 3, 40 * MIB),
        (1, 4096, 2 * MIB),
        (1, 4097, 4 * MIB),
    ],
)
def test_segments_are_of_the_sizes_that_torch_asks_for(
    size: int, count: int, reserved: int
) -> None:
    assert replay(_allocations(*[size] * count)).reserved == reserved


def test_the_smallest_block_that_is_large_enough_is_taken() -> None:
    first = _allocations(12 * MIB, 30 * MIB, 16 * MIB)
    freed = [(0, -12 * MIB), (1, -30 * MIB), (2, -16 * MIB)]
    # 14 MiB go into the one of 16, so that the one of 30 is there for 30.
    found = replay([*first, *freed, (3, 14 * MIB), (4, 30 * MIB)])
    assert found.reserved == 58 * MIB
    # The other way round, 14 MiB are cut from the 16, and 2 MiB of them stay free.
    assert found.needed == 58 * MIB
    assert replay([*first, *freed, (3, 14 * MIB)]).allocated == 58 * MIB


def test_a_rest_of_a_large_block_is_cut_off_only_above_a_mebibyte() -> None:
    for rest, reserved in ((MIB, 32 * MIB), (MIB + 512, 12 * MIB)):
        again = [(0, 12 * MIB), (0, -12 * MIB), (1, 12 * MIB - rest)]
        assert replay([*again, (2, MIB + 512)]).reserved == reserved


def test_free_neighbours_become_one_block() -> None:
    parts = _allocations(6 * MIB, 6 * MIB, 8 * MIB)
    for order in ((0, 1), (1, 0)):
        freed = [(number, -6 * MIB) for number in order]
        assert replay([*parts, *freed, (3, 12 * MIB)]).reserved == 20 * MIB


def test_a_hole_between_two_blocks_stays_a_hole() -> None:
    parts = _allocations(5 * MIB, 5 * MIB, 5 * MIB, 5 * MIB)
    found = replay([*parts, (0, -5 * MIB), (2, -5 * MIB), (4, 9 * MIB)])
    assert (found.reserved, found.needed) == (40 * MIB, 40 * MIB)
    # 5 + 5 + 9 MiB are in use, in two segments.
    assert found.pieces == (20 * MIB, 20 * MIB, 20 * MIB)


def test_a_segment_without_blocks_goes_back_before_the_device_is_full() -> None:
    found = replay([(0, 40 * MIB), (0, -40 * MIB), (1, 64 * MIB)])
    assert (found.allocated, found.needed, found.reserved) == (64 * MIB, 64 * MIB, 104 * MIB)
    assert found.pieces == (0, 0, 40 * MIB)


def test_nothing_is_lost_in_a_random_sequence() -> None:
    draw = random.Random(3)
    held: dict[int, int] = {}
    changes = []
    for number in range(3000):
        held[number] = draw.choice((draw.randrange(1, 2 * MIB), draw.randrange(1, 64 * MIB)))
        changes.append((number, held[number]))
        while len(held) > 40:
            gone = draw.choice(list(held))
            changes.append((gone, -held.pop(gone)))
    found = replay(changes)
    assert found.allocated <= found.needed <= found.reserved
    again = replay([*changes, *((number, -size) for number, size in held.items()), *changes])
    assert again.needed < 1.5 * found.needed
