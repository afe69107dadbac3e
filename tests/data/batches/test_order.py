"""Every row once per pass, shares kept at every sample, the same for any number of ranks, any
position at once.
"""

from __future__ import annotations

import time
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.base.errors import WrongInput
from ingot.config.identity import changes, training_identity
from ingot.data.batches.order import SampleOrder
from tests.data.small import recipe
from tests.exhaustive import examples

SEEDS = st.integers(0, 2**63 - 1)
# The golden-ratio steps are never further than this from a source's exact share, in samples.
WITHIN = 8


@settings(max_examples=examples(50, 150), deadline=None)
@given(
    sizes=st.lists(st.integers(0, 400), min_size=1, max_size=4).filter(sum),
    seed=SEEDS,
    epoch=st.integers(0, 10**12),
)
def test_every_row_once_per_pass(sizes: list[int], seed: int, epoch: int) -> None:
    total = sum(sizes)
    assert sorted(SampleOrder(sizes, seed).rows(epoch * total, total)) == list(range(total))


@settings(max_examples=examples(33, 100), deadline=None)
@given(
    size=st.integers(1, 500),
    seed=SEEDS,
    first=st.integers(0, 10**13),
    count=st.integers(0, 900),
    data=st.data(),
)
def test_any_window_is_the_same_sequence(
    size: int, seed: int, first: int, count: int, data: st.DataObject
) -> None:
    """What resumes at any sample, once or twice in a row, goes on as if it had never stopped."""
    weights = data.draw(st.sampled_from([None, [1.0, 3.0, 0.5]]))
    order = SampleOrder([size, 7, 90], seed, weights)
    whole = order.rows(first, count)
    cuts = sorted(data.draw(st.lists(st.integers(0, count), max_size=4)))
    pieces = [
        SampleOrder([size, 7, 90], seed, weights).rows(first + begin, end - begin)
        for begin, end in zip([0, *cuts], [*cuts, count], strict=True)
    ]
    assert np.array_equal(np.concatenate(pieces), whole)


@settings(max_examples=examples(20, 60), deadline=None)
@given(seed=SEEDS, step=st.integers(0, 10**9), weights=st.sampled_from([None, [2.0, 1.0]]))
def test_any_number_of_ranks_sees_the_same_batches(
    seed: int, step: int, weights: list[float] | None
) -> None:
    batch, order = 24, SampleOrder([100, 37], seed, weights)
    whole = order.rows(step * batch, batch)
    for world in (1, 2, 3, 8):
        share = batch // world
        dealt = [order.rows(step * batch + rank * share, share) for rank in range(world)]
        assert np.array_equal(np.concatenate(dealt), whole)


@settings(max_examples=examples(15, 40), deadline=None)
@given(
    weights=st.lists(st.floats(0.001, 1000), min_size=2, max_size=5),
    seed=SEEDS,
    first=st.integers(0, 10**15),
)
def test_shares_hold_at_every_sample(weights: list[float], seed: int, first: int) -> None:
    sizes = [50 + 10 * number for number in range(len(weights))]
    order = SampleOrder(sizes, seed, weights)
    edges = np.cumsum([0, *sizes])
    source = np.searchsorted(edges, order.rows(first, 5000), side="right") - 1
    for number, weight in enumerate(weights):
        mine = np.cumsum(source == number)
        exact = weight / sum(weights) * np.arange(1, 5001)
        assert np.abs(mine - exact).max() < 2 * WITHIN
        assert order.drawn(number, first + 5000) - order.drawn(number, first) == mine[-1]


@settings(max_examples=examples(15, 40), deadline=None)
@given(seed=SEEDS, weights=st.lists(st.floats(0.05, 1), min_size=2, max_size=3))
def test_each_source_passes_over_its_own_rows(seed: int, weights: list[float]) -> None:
    """Within a mixture too, no row comes again before all rows of its source came."""
    sizes = [5, 17, 11][: len(weights)]
    rows = SampleOrder(sizes, seed, weights).rows(0, 2000)
    first = 0
    for size in sizes:
        mine = rows[(rows >= first) & (rows < first + size)]
        for begin in range(0, len(mine) - size + 1, size):
            assert sorted(mine[begin : begin + size]) == list(range(first, first + size))
        first += size


def test_far_shares_are_counted_without_going_there() -> None:
    order = SampleOrder([10, 10], 3, [0.7, 0.3])
    for samples in (0, 1, 10, 10**3, 10**10, 10**18):
        drawn = [order.drawn(source, samples) for source in range(2)]
        assert sum(drawn) == samples
        assert abs(drawn[0] - 0.7 * samples) < max(WITHIN, samples * 1e-15)


def test_orders_look_random() -> None:
    """Chi-square over all orders of four rows: over seeds, and over the passes of one seed."""
    for orders in (
        [tuple(SampleOrder([4], seed).rows(0, 4)) for seed in range(4800)],
        [tuple(order) for order in SampleOrder([4], 1).rows(0, 4 * 4800).reshape(-1, 4)],
    ):
        counts = Counter(orders)
        assert len(counts) == 24
        assert (
            sum((count - 200) ** 2 / 200 for count in counts.values()) < 60
        )  # 23 degrees of freedom: p < 1e-4 beyond


def test_large_orders_look_random() -> None:
    rows = SampleOrder([100_000], 7).rows(0, 100_000)
    assert abs(np.corrcoef(rows[:-1], rows[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(np.arange(100_000), rows)[0, 1]) < 0.02
    assert abs(np.corrcoef(rows, SampleOrder([100_000], 7).rows(100_000, 100_000))[0, 1]) < 0.02


def test_seeds_and_passes_differ() -> None:
    first = SampleOrder([1000], 1).rows(0, 1000)
    assert not np.array_equal(first, SampleOrder([1000], 2).rows(0, 1000))
    assert not np.array_equal(first, SampleOrder([1000], 1).rows(1000, 1000))


@pytest.mark.parametrize("weights", [None, [1.0, 2.0]])
def test_beyond_ten_billion_samples_costs_the_same(weights: list[float] | None) -> None:
    order = SampleOrder([10**10, 10**7], 0, weights)
    order.rows(0, 1024)
    seconds, memory = [], []
    for first in (0, 10**10 + 7, 10**14):
        tracemalloc.start()
        began = time.process_time()
        assert len(set(order.rows(first, 1024).tolist())) > 1000
        seconds.append(time.process_time() - began)
        memory.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert max(memory) < 2_000_000
    assert max(seconds) < 20


@settings(max_examples=examples(33, 100))
@given(
    seed=SEEDS,
    skipped=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 60)), max_size=6),
    first=st.integers(0, 400),
    count=st.integers(0, 200),
    weights=st.sampled_from([None, [1.0, 3.0]]),
)
def test_skipped_ranges_are_never_seen(
    seed: int, skipped: list[tuple[int, int]], first: int, count: int, weights: list[float] | None
) -> None:
    """The sequence with the ranges cut out, wherever one starts in it; ranges may touch, lie in
    each other, come in any order.
    """
    ranges = [(begin, begin + size) for begin, size in skipped]
    places = [
        place for place in range(2000) if not any(begin <= place < end for begin, end in ranges)
    ]
    whole = SampleOrder([70, 90], seed, weights).rows(0, 2000)
    order = SampleOrder([70, 90], seed, weights, ranges)
    assert np.array_equal(order.rows(first, count), whole[places[first : first + count]])
    assert order.place(first) == places[first]


@given(seed=SEEDS, begin=st.integers(0, 400), first=st.integers(0, 300))
def test_an_order_may_begin_at_any_sample(seed: int, begin: int, first: int) -> None:
    """That of data that another run has not seen. Skipped ranges are counted as ever."""
    weights, skipped = [0.3, 2.0], [(50, 70), (begin + 90, begin + 120)]
    whole = SampleOrder([70, 90], seed, weights)
    order = SampleOrder([70, 90], seed, weights, skipped, begin=begin)
    sequence = [place for place in range(1000) if all(not a <= place < b for a, b in skipped)]
    origin = sequence[begin - 1] + 1 if begin else 0
    wanted = [sequence[begin + sample] - origin for sample in range(first, first + 20)]
    assert order.rows(begin + first, 20).tolist() == [whole.rows(at, 1)[0] for at in wanted]


def test_passes_are_those_over_the_samples_asked_for() -> None:
    order = SampleOrder([70, 90], 0, [1.0, 1.0], begin=40)
    assert order.passes(range(40, 180)) == pytest.approx([1.0, 7 / 9], abs=0.03)
    assert order.passes(range(180, 180)) == [0, 0]


def test_another_global_batch_is_another_training(tmp_path: Path) -> None:
    """A step is a range of samples only as long as the batch is the same: who resumes with another
    one is refused by what changed.
    """
    one, other = (
        training_identity(recipe(tmp_path, "text.jsonl", train__global_batch=size))
        for size in (8, 16)
    )
    assert changes(one, other) == ["train.global_batch 8 -> 16"]


def test_skipping_costs_as_many_steps_as_there_are_ranges() -> None:
    """A billion samples are skipped by arithmetic."""
    skipped = [(2 * number * 10**9, (2 * number + 1) * 10**9) for number in range(1000)]
    began = time.process_time()
    order = SampleOrder([10**7], 0, None, skipped)
    assert np.array_equal(
        order.rows(500 * 10**9 - 5, 10),
        np.concatenate(
            [SampleOrder([10**7], 0).rows(place, 5) for place in (1000 * 10**9 - 5, 1001 * 10**9)]
        ),
    )
    assert time.process_time() - began < 20


@pytest.mark.parametrize("skipped", [(5, 5), (7, 3), (-1, 4)])
def test_what_is_no_range_to_skip(skipped: tuple[int, int]) -> None:
    with pytest.raises(WrongInput, match="is no range of samples to skip"):
        SampleOrder([10], 0, None, [skipped])


@settings(max_examples=examples(15, 40))
@given(
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=3),
    seed=SEEDS,
    first=st.integers(0, 10**12),
    epochs=st.integers(1, 3),
)
def test_passes_follow_each_other_without_a_seam(
    sizes: list[int], seed: int, first: int, epochs: int
) -> None:
    """Begun anywhere in a pass and going on over its end, each row comes once in what is left of
    every pass.
    """
    total = sum(sizes)
    rows = SampleOrder(sizes, seed).rows(first, epochs * total)
    begin = -first % total
    for start in range(begin, epochs * total - total + 1, total):
        assert sorted(rows[start : start + total]) == list(range(total))
    assert len(set(rows[:begin].tolist())) == begin


@settings(max_examples=examples(15, 30))
@given(
    seed=SEEDS,
    weights=st.lists(st.floats(0.05, 20), min_size=2, max_size=4),
    block=st.integers(0, 10**9),
    size=st.sampled_from([64, 256, 1024]),
)
def test_mixtures_hold_within_one_block(
    seed: int, weights: list[float], block: int, size: int
) -> None:
    """In any run of samples each source has its share, to a few samples."""
    sizes = [100] * len(weights)
    source = SampleOrder(sizes, seed, weights).rows(block * size, size) // 100
    for number, weight in enumerate(weights):
        assert abs(int((source == number).sum()) - weight / sum(weights) * size) < WITHIN


def test_this_order_is_never_changed() -> None:
    """A changed order would silently break the resuming of runs under way."""
    assert SampleOrder([10], 0).rows(0, 10).tolist() == [4, 5, 8, 0, 6, 1, 2, 7, 3, 9]
    assert SampleOrder([6, 4], 5, [1.0, 2.0]).rows(10**9, 10).tolist() == [
        7,
        2,
        9,
        4,
        9,
        7,
        5,
        6,
        8,
        1,
    ]


@pytest.mark.parametrize(
    ("sizes", "weights", "message"),
    [
        ([0], None, "0 training rows"),
        ([0, 0], [1.0, 2.0], "0 training rows"),
        ([5, 0], [1.0, 2.0], r"data.train\[1\] has a weight but not one row"),
    ],
)
def test_nothing_to_choose_from(
    sizes: list[int], weights: list[float] | None, message: str
) -> None:
    with pytest.raises(WrongInput, match=message):
        SampleOrder(sizes, 0, weights)


def test_an_empty_source_without_weights() -> None:
    assert sorted(SampleOrder([3, 0, 2], 0).rows(0, 5)) == [0, 1, 2, 3, 4]
