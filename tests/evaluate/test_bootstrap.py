"""The interval of a ratio of sums: right about as often as it says, the same every time, in bounded
memory.
"""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from ingot.evaluate import bootstrap
from ingot.evaluate.bootstrap import ratio_interval
from tests import tolerances


def lengths_and_losses(generator: np.random.Generator, units: int) -> tuple[np.ndarray, np.ndarray]:
    """Documents of very unequal length, whose loss per token varies; the true ratio is E[length *
    loss] / E[length].
    """
    length = np.ceil(generator.lognormal(4, 0.7, units))
    loss = 3.0 + generator.normal(0, 0.5, units)
    return length * loss, length


def test_covers_the_truth_as_often_as_it_says() -> None:
    generator = np.random.default_rng(1)
    hits = 0
    for trial in range(200):
        low, high = ratio_interval(*lengths_and_losses(generator, 40), seed=trial)
        assert low < high
        hits += low <= 3.0 <= high
    assert 0.88 <= hits / 200 <= 0.99


def test_widths_follow_the_number_of_units() -> None:
    generator = np.random.default_rng(2)
    above, below = lengths_and_losses(generator, 6400)
    few = ratio_interval(above[:100], below[:100])
    many = ratio_interval(above, below)
    assert (few[1] - few[0]) / (many[1] - many[0]) == pytest.approx(8, rel=0.35)


def test_same_seed_same_interval() -> None:
    above, below = lengths_and_losses(np.random.default_rng(3), 50)
    assert ratio_interval(above, below, seed=7) == ratio_interval(above, below, seed=7)
    assert ratio_interval(above, below, seed=7) != ratio_interval(above, below, seed=8)


def test_scaling_numbers_scales_the_interval() -> None:
    above, below = lengths_and_losses(np.random.default_rng(4), 50)
    low, high = ratio_interval(above, below)
    assert ratio_interval(above * 4, below * 2) == pytest.approx(
        (2 * low, 2 * high), rel=tolerances.EXACT
    )


@pytest.mark.parametrize(("above", "below"), [([6.0], [2.0]), ([6.0, 3.0, 9.0], [2.0, 1.0, 3.0])])
def test_no_spread_is_no_width(above: list[float], below: list[float]) -> None:
    assert ratio_interval(above, below) == pytest.approx((3.0, 3.0))


def test_units_without_weight_are_borne() -> None:
    low, high = ratio_interval([5.0, 0.0, 0.0, 4.0], [2.0, 0.0, 0.0, 2.0])
    assert 2.0 <= low <= 2.25 <= high <= 2.5


@pytest.mark.parametrize(("above", "below"), [([], []), ([1.0], [0.0])])
def test_nothing_to_resample_is_an_error(above: list[float], below: list[float]) -> None:
    with pytest.raises(ValueError, match="positive sum"):
        ratio_interval(above, below)


def test_very_many_units_keep_their_width_in_bounded_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    above, below = lengths_and_losses(np.random.default_rng(5), 40_000)
    monkeypatch.setattr(bootstrap, "RESAMPLES", 500)
    tracemalloc.start()
    grouped = ratio_interval(above, below)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100e6
    monkeypatch.setattr(bootstrap, "MAX_UNITS", 40_000)
    whole = ratio_interval(above, below)
    assert grouped[1] - grouped[0] == pytest.approx(whole[1] - whole[0], rel=0.15)
