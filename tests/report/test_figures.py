from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.report.formatting import (
    SORTED_AT_ONCE,
    count,
    downsample,
    median,
    rounded,
    short,
    smooth,
    ticks,
)

FINITE = st.floats(-1e12, 1e12)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "0"),
        (950, "950"),
        (999.6, "1 k"),
        (1000, "1 k"),
        (2_459_328, "2.46 M"),
        (614_400, "614 k"),
        (999_600, "1 M"),
        (8.03e9, "8.03 B"),
        (1.5e13, "15 T"),
        (5e15, "5,000 T"),
    ],
)
def test_counts_are_short(number: float, words: str) -> None:
    assert count(number) == words


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "0"),
        (2.25831, "2.258"),
        (0.0002, "0.0002000"),
        (42.148, "42.15"),
        (6123.4, "6,123"),
        (123456.7, "123,457"),
        (3e-7, "3e-07"),
        (1.5e9, "1.5e+09"),
        (-2.5, "-2.500"),
    ],
)
def test_numbers_have_as_many_digits_as_they_need(number: float, words: str) -> None:
    assert short(number) == words


def test_labels_of_an_axis_have_no_more_decimals_than_tell_them_apart() -> None:
    assert [rounded(value, 0.5) for value in (0, 0.5, 1.0)] == ["0", "0.5", "1.0"]
    assert rounded(4.0, 2.0) == "4"
    assert rounded(0.002, 0.001) == "0.002"
    assert [rounded(value * 1e-5, 5e-6) for value in (-10, -0.5, 0, 1.5)] == [
        "-0.0001",
        "-5e-6",
        "0",
        "1.5e-5",
    ]
    assert rounded(3.00001, 1e-5) == "3.00001"


@given(low=FINITE, high=FINITE, wanted=st.integers(2, 10))
def test_ticks_are_round_within_and_about_as_many_as_asked_for(
    low: float, high: float, wanted: int
) -> None:
    places = ticks(low, high, wanted)
    if high <= low:
        assert places == [low]
        return
    room = (high - low) * 1e-6 + abs(high) * 1e-12 + abs(low) * 1e-12
    assert all(low - room <= place <= high + room for place in places)
    assert places == sorted(places)
    if (high - low) > 1e-9 * max(abs(low), abs(high)):
        assert wanted // 3 <= len(places) <= wanted + 1


def test_ticks_of_a_known_axis() -> None:
    assert ticks(0, 300, 6) == [0, 50, 100, 150, 200, 250, 300]
    assert ticks(3.4, 9.2, 5) == [4, 6, 8]


@given(values=st.lists(FINITE, min_size=1, max_size=400), most=st.integers(2, 60))
def test_thinned_points_keep_both_ends_the_lowest_and_the_highest(
    values: list[float], most: int
) -> None:
    steps = [float(index) for index in range(len(values))]
    xs, ys = downsample(steps, values, most)
    assert len(xs) <= max(most + 2, 4)
    assert (xs[0], xs[-1]) == (steps[0], steps[-1])
    assert (min(ys), max(ys)) == (min(values), max(values))
    assert xs == sorted(set(xs))
    assert all(values[int(x)] == y for x, y in zip(xs, ys, strict=True))
    if len(values) <= most:
        assert ys == values


@pytest.mark.parametrize("kinds", [1, 2, 3, 10**9])
@pytest.mark.parametrize("size", [1, 2, SORTED_AT_ONCE, SORTED_AT_ONCE + 1, 30_000, 30_001])
def test_the_median_of_many_is_that_of_all(size: int, kinds: int) -> None:
    values = [float(number * 7919**2 % 1_000_003 % kinds) for number in range(size)]
    for each in (values, sorted(values), sorted(values, reverse=True)):
        assert median(each) == sorted(values)[size // 2]


def test_smoothing_calms_and_lags_behind_nothing() -> None:
    falling = [100.0 - index for index in range(101)]
    calm = smooth(falling, 10)
    assert calm[10:-10].tolist() == falling[10:-10]
    zigzag = [math.copysign(1.0, index % 2 - 0.5) for index in range(100)]
    assert max(abs(value) for value in smooth(zigzag, 10)) < 0.4
    assert smooth([3.0], 10).tolist() == [3.0]
    assert smooth([], 10).tolist() == []
    assert smooth([1.0, 2.0, 4.0], 0).tolist() == [1.0, 2.0, 4.0]
