"""Loading beside computing: what a rank's thread has to make for a step, and which of the two
bounds it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ingot.config.recipe import Recipe
from ingot.plan.assemble import data_sample
from ingot.plan.data_sample import LengthSample
from ingot.plan.devices.coefficients import Coefficients, Curve
from ingot.plan.devices.timed import loading_curves
from ingot.plan.loading import DOCUMENT, judge_loading, loading_seconds
from ingot.plan.place import PlannedPlace, place_of
from ingot.plan.ranges import Range
from ingot.plan.seconds import StepLayout, StepSeconds, step_seconds
from ingot.plan.unknown import Unknown
from tests.plan.test_seconds import PRODUCT, bounds, device, trace
from tests.small import small_recipe, write_documents

ROW, EACH_DOCUMENT = (0.5, 1.0, 2.0), (0.1, 0.1, 0.1)


def flat(seconds: tuple[float, float, float]) -> Curve:
    return Curve(((0.0, seconds), (1e9, seconds)), "measured")


def coefficients() -> Coefficients:
    curves = {"loading text": flat(ROW), DOCUMENT: flat(EACH_DOCUMENT)}
    return replace(device(), curves={**device().curves, **curves})


def loaded(recipe: Recipe, world: int = 1) -> Range:
    place = replace(place_of(recipe, "cpu"), nodes=1, processes=world)
    sample = data_sample(recipe, quick=True)
    assert isinstance(sample, LengthSample)
    return loading_seconds(recipe, place, coefficients(), sample)


def recipe_of(root: Path, **knobs: Any) -> Recipe:
    if not (root / "text").exists():
        write_documents(root / "text", 20)
    return small_recipe(root, train__global_batch=8, train__micro_batch=2, **knobs)


def test_each_rank_makes_its_own_rows_with_all_documents_in_them(tmp_path: Path) -> None:
    alone = recipe_of(tmp_path, data__pack="none")
    assert bounds(loaded(alone)) == (4, 8, 16)
    shared = recipe_of(tmp_path, data__pack="none", parallel__shard=4)
    assert bounds(loaded(shared, 4)) == (1, 2, 4)
    replicas = recipe_of(tmp_path, data__pack="none", parallel__tensor=2, parallel__replicate=2)
    assert bounds(loaded(replicas, 4)) == (2, 4, 8), "tensor ranks make the same rows"
    long = recipe_of(tmp_path, data__seq_len=1024)
    sample = data_sample(long, quick=True)
    assert isinstance(sample, LengthSample)
    further = 1024 / sample.columns["tokens"].mean - 1
    assert further > 1
    assert loaded(long).likely == pytest.approx(8 * (1 + 0.1 * further))


def test_columns_beyond_memory_are_read_from_the_disk(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, data__pack="none")
    sample = data_sample(recipe, quick=True)
    assert isinstance(sample, LengthSample)
    sample = replace(sample, tokens=Range.exactly(1e12))
    place = place_of(recipe, "cpu")

    def seconds(place: PlannedPlace) -> Range:
        return loading_seconds(recipe, place, coefficients(), sample)

    small, large = (seconds(replace(place, host_bytes=size)) for size in (1e9, 1e15))
    assert large.origin == "measured"
    assert small.origin == "guessed"
    # 8 rows of 32 tokens of two bytes from a disk of at least 0.15 GB/s.
    assert small.high - large.high == pytest.approx(8 * 32 * 2 / 0.15e9)


def test_guesses_are_said_to_be_such(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    took = loading_seconds(recipe, place_of(recipe, "cpu"), device(), Unknown("lengths"))
    assert took.origin == "guessed"
    assert 0 < took.low < took.likely < took.high


@pytest.mark.parametrize(
    ("loading", "total", "told"),
    [
        (Range(0.1, 0.2, 0.3, "measured"), (1, 1, 1.3), []),
        (Range(0.5, 0.9, 1.5, "measured"), (1, 1, 2.5), ["known"]),
        (Range(2, 3, 4, "guessed"), (2, 3, 5), ["warning"]),
    ],
)
def test_what_takes_longer_bounds_the_step(
    loading: Range, total: tuple[float, ...], told: list[str]
) -> None:
    layout = StepLayout(loading=loading)
    took: StepSeconds = step_seconds([trace({PRODUCT: 1})], device(), layout)
    assert bounds(took.total) == total
    assert took.loading == loading
    assert took.total.origin == ("guessed" if told == ["warning"] else "measured")
    assert [finding.kind for finding in judge_loading(took)] == told


def test_the_real_loader_is_timed() -> None:
    curves = loading_curves(2)
    assert set(curves) == {"loading text", "loading chat", "loading samples", DOCUMENT}
    for name, curve in curves.items():
        few, many = curve.seconds(128), curve.seconds(16_384)
        assert 0 < few.likely < 0.01, name
        assert few.likely <= many.likely, name
        assert curve.origin == "measured"
