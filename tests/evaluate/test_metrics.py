"""The interval of a ratio of sums: right about as often as it says, the same every time, in bounded
memory.
"""

from __future__ import annotations

import math
import tracemalloc
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from scipy import stats

from ingot.base.errors import WrongInput
from ingot.evaluate import metrics as bootstrap
from ingot.evaluate.loss import SegmentLosses
from ingot.evaluate.metrics import (
    bootstrap_interval,
    likelier_metric,
    loss_metrics,
    mean_metric,
    ratio_interval,
)
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


@pytest.mark.parametrize(("good", "bad"), [(300, 30), (30, 300), (50, 50)])
@pytest.mark.parametrize("apart", [0.8, 2.0])
def test_the_area_under_the_curve_is_as_sure_as_both_sides_are(
    good: int, bad: int, apart: float
) -> None:
    generator = np.random.default_rng(3)
    truth = NormalDist().cdf(apart / math.sqrt(2))
    hits = 0
    for _ in range(300):
        above, below = generator.normal(apart, 1, good), generator.normal(0, 1, bad)
        metric = likelier_metric(above, below, on="set")
        assert metric.n == good + bad
        hits += metric.interval[0] <= truth <= metric.interval[1]
    assert 0.88 <= hits / 300 <= 0.99


def test_the_area_of_few_or_of_those_that_are_all_apart_has_no_interval() -> None:
    many, few = np.arange(8.0), np.arange(3.0)
    assert likelier_metric(many + 0.5, few, on="set").interval is None
    assert likelier_metric(few, many + 0.5, on="set").interval is None
    apart = likelier_metric(many + 8, many, on="set")
    assert (apart.value, apart.interval) == (1.0, None)
    assert likelier_metric(np.array([1.0, 2.0]), np.array([1.0, 0.0]), on="set").value == 0.875


def mean_of(sums: np.ndarray) -> np.ndarray:
    return np.asarray(sums[..., 0] / sums[..., 2])


def variance_of(sums: np.ndarray) -> np.ndarray:
    return np.asarray(sums[..., 1] / sums[..., 2] - mean_of(sums) ** 2)


@pytest.mark.parametrize(
    ("statistic", "theirs", "values"),
    [
        (variance_of, np.var, np.random.default_rng(1).lognormal(0, 0.7, 8)),
        (mean_of, np.mean, np.repeat([1.0, 0.0], [9, 3])),
    ],
    ids=["skewed and biased", "draws as good as the value"],
)
def test_the_ends_are_those_of_scipy(
    statistic: Any, theirs: Any, values: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is corrected is a tenth of the width and more; chance is a hundredth of it."""
    monkeypatch.setattr(bootstrap, "RESAMPLES", 10_000)
    found = stats.bootstrap(
        (values,), theirs, n_resamples=10_000, random_state=np.random.default_rng(1)
    )
    low, high = found.confidence_interval
    units = np.stack((values, values**2, np.ones(len(values))), axis=1)
    assert bootstrap_interval(units, statistic) == pytest.approx(
        (low, high), abs=0.03 * (high - low)
    )


def test_what_is_no_number_has_an_interval_of_none() -> None:
    low, high = ratio_interval([1.0, math.nan, 3.0, 4.0, 5.0], [1.0] * 5)
    assert math.isnan(low)
    assert math.isnan(high)


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


@pytest.mark.parametrize(
    ("above", "below"),
    [
        ([6.0], [2.0]),
        ([6.0, 3.5, 9.0], [2.0, 1.0, 3.0]),
        ([6.0, 3.0, 9.0, 12.0], [2.0, 1.0, 3.0, 4.0]),
        ([0.1 * length for length in range(1, 40)], list(range(1, 40))),
    ],
    ids=["one", "too few", "all alike", "alike but for rounding"],
)
def test_where_nothing_is_known_of_the_spread_there_is_no_interval(
    above: list[float], below: list[float]
) -> None:
    assert ratio_interval(above, below) == (None, None)


def test_one_held_out_document_has_a_loss_and_no_interval() -> None:
    """A report that gave the value as its own interval looked certain."""
    for metric in metrics(stretches(1), np.full(1, 100.0)).values():
        assert metric.value > 0
        assert metric.interval is None
    assert mean_metric([0.5], direction="higher", on="d").interval is None


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
    """Neighbours are alike, as documents of one source are, and yet none of them is a group."""
    above, below = lengths_and_losses(np.random.default_rng(5), 40_000)
    order = np.argsort(above / below)
    above, below = above[order], below[order]
    monkeypatch.setattr(bootstrap, "RESAMPLES", 500)
    tracemalloc.start()
    grouped = ratio_interval(above, below)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100e6
    monkeypatch.setattr(bootstrap, "MAX_UNITS", 40_000)
    whole = ratio_interval(above, below)
    assert grouped[1] - grouped[0] == pytest.approx(whole[1] - whole[0], rel=0.15)


def stretches(documents: int, per_document: int = 3) -> SegmentLosses:
    """Each document goes over `per_document` rows of one stretch each, 10 tokens a stretch, the
    last one ends it.
    """
    generator = np.random.default_rng(0)
    count = documents * per_document
    ends = np.arange(count) % per_document == per_document - 1
    level = np.repeat(generator.uniform(1, 5, documents), per_document)
    return SegmentLosses(
        level * (10 - ends),
        10 - ends.astype(np.int64),
        np.full(count, 10),
        ends,
    )


def metrics(
    losses: SegmentLosses, sizes: np.ndarray, documents: str = "d", tokenizer: str = "t"
) -> dict[str, object]:
    return loss_metrics("held", losses, sizes, documents=documents, tokenizer=tokenizer)


def test_values_are_the_ratios() -> None:
    losses, sizes = stretches(40), np.linspace(50, 150, 40)
    found = loss_metrics("held", losses, sizes, documents="d", tokenizer="t")
    nll, targets = losses.nll.sum(), losses.targets.sum()
    assert targets == 40 * 29
    assert found["held/loss"].value == pytest.approx(nll / targets)
    assert found["held/perplexity"].value == pytest.approx(math.exp(nll / targets))
    assert found["held/bits_per_byte"].value == pytest.approx(nll / math.log(2) / sizes.sum())
    for metric in found.values():
        assert metric.ci_low < metric.value < metric.ci_high
        assert (metric.direction, metric.n) == ("lower", 40)
    assert found["held/perplexity"].ci_high == pytest.approx(math.exp(found["held/loss"].ci_high))


def test_documents_are_the_units_not_their_rows() -> None:
    """Rows of one document are alike here, so that resampling rows would claim too much."""
    many = loss_metrics("x", stretches(40, 30), np.full(40, 100.0), documents="d", tokenizer="t")[
        "x/loss"
    ]
    few = loss_metrics("x", stretches(40, 3), np.full(40, 100.0), documents="d", tokenizer="t")[
        "x/loss"
    ]
    assert many.ci_high - many.ci_low == pytest.approx(few.ci_high - few.ci_low, rel=0.1)


def test_few_documents_are_the_units_too() -> None:
    """Their rows are many and alike; an interval of these would claim what nobody knows."""
    few, fewer = (
        loss_metrics("x", stretches(count, 20), np.full(count, 100.0), documents="d", tokenizer="t")
        for count in (4, 3)
    )
    assert few["x/loss"].n == 4
    assert few["x/loss"].ci_low < few["x/loss"].value < few["x/loss"].ci_high
    assert (fewer["x/loss"].n, fewer["x/loss"].ci_low, fewer["x/loss"].ci_high) == (3, None, None)


def test_bytes_can_be_compared_across_tokenizers_and_tokens_cannot() -> None:
    def prints(documents: str, tokenizer: str) -> list[str]:
        found = loss_metrics(
            "x", stretches(12), np.full(12, 100.0), documents=documents, tokenizer=tokenizer
        )
        return [
            found[f"x/{name}"].set_fingerprint for name in ("loss", "perplexity", "bits_per_byte")
        ]

    one, tokenizer, documents = prints("d", "t"), prints("d", "u"), prints("e", "t")
    assert one[0] == one[1] != one[2]
    assert tokenizer[2] == one[2]
    assert tokenizer[0] != one[0]
    assert not set(documents) & set(one)


def test_rows_and_documents_must_be_of_one_data() -> None:
    with pytest.raises(WrongInput, match="end 12 documents of 11"):
        metrics(stretches(12), np.full(11, 100.0))


def test_nothing_to_predict_is_not_a_loss_of_zero() -> None:
    losses = stretches(12)
    with pytest.raises(WrongInput, match="nothing to predict"):
        metrics(
            SegmentLosses(
                losses.nll * 0,
                losses.targets * 0,
                losses.tokens,
                losses.ends_document,
            ),
            np.full(12, 100.0),
        )


def test_ends_of_texts_alone_have_a_loss_and_no_bytes() -> None:
    """Such as of texts of one token, with a tokenizer that puts none before it."""
    found = metrics(stretches(12), np.zeros(12))
    assert {name.partition("/")[2] for name in found} == {"loss", "perplexity"}


def test_a_loss_beyond_numbers_stays_infinite() -> None:
    losses = stretches(12)
    huge = SegmentLosses(losses.nll * 1e6, losses.targets, losses.tokens, losses.ends_document)
    assert (
        loss_metrics("x", huge, np.full(12, 100.0), documents="d", tokenizer="t")[
            "x/perplexity"
        ].value
        == math.inf
    )


@pytest.mark.parametrize("measured", ["ratio", "bootstrap", "mean"])
def test_what_is_said_without_a_level_is_a_95_percent_interval(measured: str) -> None:
    """Of a plain mean of many units it is known how wide that is."""
    values = np.random.default_rng(3).normal(10.0, 2.0, 4000)
    ones = np.ones(len(values))
    if measured == "ratio":
        low, high = ratio_interval(values, ones)
    elif measured == "bootstrap":
        low, high = bootstrap_interval(
            np.stack((values, ones), axis=1), lambda sums: sums[..., 0] / sums[..., 1]
        )
    else:
        metric = mean_metric(values, direction="higher", on="here")
        low, high = metric.ci_low, metric.ci_high
    error = values.std() / len(values) ** 0.5
    assert (high - low) / (2 * 1.96 * error) == pytest.approx(1.0, abs=0.06)
    assert (low + high) / 2 == pytest.approx(values.mean(), abs=0.1 * error)
