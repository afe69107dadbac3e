"""The order in two levels: every row once per pass, from a few parts at a time, and any place of it
at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.config.identity import changes, training_identity
from ingot.data.batches.order import SampleOrder
from tests.data.small import recipe
from tests.exhaustive import examples

SEEDS = st.integers(0, 2**63 - 1)
PARTS = st.lists(
    st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(sum), min_size=1, max_size=3
)
WINDOWS = st.integers(1, 7)


def order_of(
    parts: list[list[int]],
    seed: int,
    window: int | None,
    weights: list[float] | None = None,
    **about: Any,
) -> SampleOrder:
    return SampleOrder(
        [sum(rows) for rows in parts], seed, weights, parts=parts, window=window, **about
    )


def part_of(parts: list[list[int]], row: int) -> int:
    """Which part a row lies in, counted through the sources."""
    return int(
        np.searchsorted(np.cumsum([rows for source in parts for rows in source]), row, side="right")
    )


@settings(max_examples=examples(25, 150))
@given(parts=PARTS, window=WINDOWS, seed=SEEDS, epoch=st.integers(0, 10**12))
def test_every_row_once_per_pass(
    parts: list[list[int]], window: int, seed: int, epoch: int
) -> None:
    total = sum(sum(rows) for rows in parts)
    assert sorted(order_of(parts, seed, window).rows(epoch * total, total)) == list(range(total))


@settings(max_examples=examples(25, 150))
@given(
    parts=PARTS, window=WINDOWS, seed=SEEDS, first=st.integers(0, 10**12), weighted=st.booleans()
)
def test_each_sample_comes_from_the_parts_that_are_told(
    parts: list[list[int]], window: int, seed: int, first: int, weighted: bool
) -> None:
    weights = [1.0 + source for source in range(len(parts))] if weighted else None
    order = order_of(parts, seed, window, weights, skipped=[(first + 5, first + 40)])
    for sample in range(first, first + 60):
        now = order.parts(range(sample, sample + 1))
        assert part_of(parts, int(order.rows(sample, 1)[0])) in now
        assert len(now) <= window * (len(parts) if weighted else 1)
    among = {
        part
        for sample in range(first, first + 60)
        for part in order.parts(range(sample, sample + 1))
    }
    assert among <= set(order.parts(range(first, first + 60)))


@settings(max_examples=examples(12, 60))
@given(parts=st.lists(st.integers(1, 40), min_size=2, max_size=9), window=WINDOWS, seed=SEEDS)
def test_a_pass_goes_from_window_to_window(parts: list[int], window: int, seed: int) -> None:
    """The parts that are told one window ahead are those that come, and each comes once per
    pass.
    """
    order, total = order_of([parts], seed, window), sum(parts)
    told, ahead, before = (
        [order.parts(range(sample, sample + 1), **more) for sample in range(2 * total)]
        for more in (dict[str, int](), {"after": 1}, {"before": 1})
    )
    turns = [
        sample
        for sample in range(1, 2 * total)
        if told[sample] != told[sample - 1] or sample == total
    ]
    for sample in turns:
        assert ahead[sample - 1] == list(dict.fromkeys(told[sample - 1] + told[sample]))
        assert before[sample] == list(dict.fromkeys(told[sample - 1] + told[sample]))
    for epoch in range(2):
        drawn = [
            part for sample in (0, *turns) if sample // total == epoch for part in told[sample]
        ]
        assert sorted(drawn) == list(range(len(parts)))


@settings(max_examples=examples(12, 60))
@given(
    parts=PARTS,
    window=WINDOWS,
    seed=SEEDS,
    first=st.integers(0, 10**13),
    count=st.integers(0, 300),
    data=st.data(),
)
def test_any_stretch_is_the_same_sequence(
    parts: list[list[int]], window: int, seed: int, first: int, count: int, data: st.DataObject
) -> None:
    whole = order_of(parts, seed, window).rows(first, count)
    cuts = sorted(data.draw(st.lists(st.integers(0, count), max_size=4)))
    pieces = [
        order_of(parts, seed, window).rows(first + begin, end - begin)
        for begin, end in zip([0, *cuts], [*cuts, count], strict=True)
    ]
    assert np.array_equal(np.concatenate(pieces), whole)


def test_rows_and_parts_are_mixed_and_differently_in_each_pass() -> None:
    parts = [[500] * 12]
    order = order_of(parts, 3, 4)
    passes = [order.rows(epoch * 6000, 6000) for epoch in range(3)]
    for rows in passes:
        assert (
            len({part_of(parts, row) for row in rows[:100]}) == 4
        )  # all parts of the window at once
        assert abs(np.corrcoef(np.arange(2000), rows[:2000])[0, 1]) < 0.1
    assert (
        len({tuple(order.parts(range(epoch * 6000, epoch * 6000 + 6000))) for epoch in range(20)})
        == 20
    )
    assert len({tuple(rows[:20].tolist()) for rows in passes}) == 3
    assert order.parts(range(1)) != order_of(parts, 4, 4).parts(range(1))
    # Windows of one pass are permuted by keys of their own: rows counted through their parts come
    # in another order in each.
    within = []
    for begin in (0, 2000, 4000):
        members = order.parts(range(begin, begin + 1))
        within.append(
            [
                members.index(row // 500) * 500 + row % 500
                for row in passes[0][begin : begin + 2000].tolist()
            ]
        )
        assert sorted(within[-1]) == list(range(2000))
    assert within[0] != within[1] != within[2] != within[0]


def test_one_part_alone_is_mixed_differently_in_each_pass() -> None:
    order = order_of([[50]], 3, 1)
    assert len({tuple(order.rows(epoch * 50, 50).tolist()) for epoch in range(5)}) == 5


def test_what_is_skipped_is_in_no_window() -> None:
    order = order_of([[10] * 1000], 0, 2, skipped=[(500, 9000)])
    parts = order.parts(range(496, 504))
    assert len(parts) <= 8
    assert {int(row) // 10 for row in order.rows(496, 8)} <= set(parts)


def test_a_window_over_everything_and_none() -> None:
    parts = [[7, 5], [4]]
    assert sorted(order_of(parts, 0, 100).rows(0, 16)) == list(range(16))
    assert sorted(order_of(parts, 0, 100).parts(range(10**6, 10**6 + 1), after=3)) == [0, 1, 2]
    assert not order_of(parts, 0, None).windowed
    assert order_of(parts, 0, None).parts(range(2)) == []
    assert np.array_equal(order_of(parts, 0, None).rows(0, 50), SampleOrder([12, 4], 0).rows(0, 50))


def test_another_window_is_another_training(tmp_path: Path) -> None:
    before, now = (
        training_identity(recipe(tmp_path, "text.jsonl", data__window=window))
        for window in (None, 4)
    )
    assert changes(before, now) == ["data.window not set -> 4"]
