"""The arithmetic of a whole run: each figure beside one worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ingot.config.degrees import Degrees
from ingot.config.models.presets import preset
from ingot.config.recipe import Recipe
from ingot.config.shape import parameter_count
from ingot.plan.place import PlacePrice, PlannedPlace, place_of
from ingot.plan.ranges import GIB, Range
from ingot.plan.run_cost import ON_DEMAND, SPOT, RunCost, RunInputs, cost_of
from ingot.plan.storage import (
    ModelSize,
    checkpoint_bytes,
    formula_memory,
    host_copy,
    model_size,
    rank_costs,
    saving,
    spaces,
    state_bytes,
)
from ingot.plan.unknown import Unknown
from tests.small import small_recipe

SMALL = ModelSize(1_000_000, 1_000_000)
PLACE = PlannedPlace(
    about="one GPU",
    kind="gce",
    nodes=1,
    processes=1,
    type="cuda",
    device=None,
    device_name="a GPU",
    machine=None,
    devices=1,
    device_bytes=Range.exactly(80 * GIB),
    host_bytes=100 * GIB,
    disk_bytes=1e12,
    cores=8,
    price=PlacePrice(10.0, 4.0, "2026-11-01", uses_spot=False),
)
STEP = Range(1.0, 2.0, 4.0, "modelled")


def cost(recipe: Recipe, place: PlannedPlace = PLACE, **changed: Any) -> RunCost:
    inputs = RunInputs(recipe, place, SMALL, None, STEP, Range.exactly(0.0))
    return cost_of(replace(inputs, **changed))


def likely(number: Range | Unknown) -> float:
    assert isinstance(number, Range), number
    return number.likely


def test_steps_saves_and_evaluations_are_counted(tmp_path: Path) -> None:
    recipe = small_recipe(
        tmp_path, train__steps=100, checkpoint__every=30, train__evaluate_every=40
    )
    found = cost(recipe)
    assert (likely(found.steps), likely(found.saves), likely(found.evaluations)) == (100, 3 + 1, 2)
    assert likely(found.tokens) == 100 * 4 * 32
    assert likely(found.tokens_per_s) == 4 * 32 / 2.0


def test_a_model_that_is_not_known_is_why_its_share_of_the_peak_is_not(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path)
    assert cost(recipe, size=None).share_of_peak == Unknown("the model's configuration")
    assert "formula" in str(cost(recipe).share_of_peak)


@pytest.mark.parametrize(("every", "count"), [("epoch", 9), ("1m", 200 / 60), (7, 14), (25, 3)])
def test_what_is_due_by_epoch_or_time_follows_rows_and_seconds(
    tmp_path: Path, every: str | int, count: float
) -> None:
    recipe = small_recipe(tmp_path, train__steps=100, checkpoint__every=every)
    found = cost(recipe, rows=Range.exactly(40.0))
    assert likely(found.epochs) == 10
    assert likely(found.saves) == pytest.approx(count + 1)


def test_epochs_lead_to_steps_once_the_rows_are_known(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path, train__steps=None, train__epochs=3)
    unknown = cost(recipe)
    assert isinstance(unknown.steps, Unknown)
    assert "prepare" in unknown.steps.needs
    assert isinstance(unknown.total_s, Unknown)
    found = cost(recipe, rows=Range(80.0, 100.0, 130.0, "guessed"))
    assert found.steps == Range(60.0, 75.0, 97.0, "guessed")
    assert isinstance(found.epochs, Range)
    assert found.epochs.low == pytest.approx(3.0, abs=0.02)


def test_the_total_has_starts_pauses_and_expected_restarts(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path, train__steps=100, checkpoint__every=50)
    found = cost(recipe)
    work = 100 * 2.0 + likely(found.saves) * likely(found.save_waits_s)
    rate = likely(found.restarts) / likely(found.total_s)
    assert rate == pytest.approx(4.7e-4 / 86_400)
    expected = work + likely(found.start_s) + likely(found.restarts) * likely(found.restart_s)
    assert likely(found.total_s) == pytest.approx(expected)
    assert isinstance(found.total_s, Range)
    assert 100 * 1.0 < found.total_s.low < likely(found.total_s) < found.total_s.high
    assert found.total_s.high > 100 * 4.0
    gap = 100 * 2.0 / 2
    assert likely(found.restart_s) > gap / 2 + likely(found.start_s)


def test_no_rank_evaluates_less_than_a_row(tmp_path: Path) -> None:
    knobs: dict[str, Any] = {"train__evaluate_every": 1, "train__evaluate_rows": 8}
    alone = small_recipe(tmp_path, train__global_batch=64, **knobs)
    assert likely(cost(alone).evaluation_s) == pytest.approx(2.0 * 0.34 * 8 / 64)
    many = replace(PLACE, nodes=8, processes=8)
    shared = small_recipe(tmp_path, train__global_batch=64, parallel__shard=64, **knobs)
    assert likely(cost(shared, many).evaluation_s) == pytest.approx(2.0 * 0.34)


def test_a_task_of_unknown_length_widens_the_range(tmp_path: Path) -> None:
    knobs: dict[str, Any] = {"train__evaluate_every": 1}
    plain = cost(small_recipe(tmp_path, **knobs)).total_s
    tasks = cost(small_recipe(tmp_path, train__evaluate_tasks=["loss"], **knobs)).total_s
    assert isinstance(plain, Range)
    assert isinstance(tasks, Range)
    assert tasks.high - tasks.low > 2 * (plain.high - plain.low)
    assert tasks.origin == "guessed"


def test_machines_that_are_taken_away_make_the_run_longer(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path, train__steps=100_000, checkpoint__every=10_000)
    asks = replace(PLACE, price=PlacePrice(10.0, 4.0, "2026-11-01", uses_spot=True))
    steady, spare = cost(recipe), cost(recipe, asks)
    assert likely(spare.total_s) > likely(steady.total_s)
    assert likely(spare.restarts) > 100 * likely(steady.restarts)
    assert isinstance(spare.total_s, Range)
    assert math.isfinite(spare.total_s.high)


def test_money_is_price_by_hours_each_way_with_its_own_restarts(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path, train__steps=100_000, checkpoint__every=10_000)
    found = cost(recipe, replace(PLACE, nodes=2))
    assert likely(found.money[ON_DEMAND]) == pytest.approx(likely(found.total_s) / 3600 * 10.0)
    assert likely(found.money[SPOT]) > likely(found.total_s) / 3600 * 4.0
    assert likely(found.machine_hours) == pytest.approx(2 * likely(found.total_s) / 3600)


def test_without_a_step_time_space_is_told_and_money_says_what_would_tell_it(
    tmp_path: Path,
) -> None:
    found = cost(small_recipe(tmp_path), step_s=Unknown("`ingot bench --calibrate`"))
    for number in (found.total_s, found.machine_hours, found.money[SPOT], found.restarts):
        assert number == Unknown("`ingot bench --calibrate`")
    assert likely(found.checkpoint_bytes) == 12e6


def test_a_price_of_the_recipe_is_that_of_its_own_choice(tmp_path: Path) -> None:
    def place(**knobs: Any) -> PlannedPlace:
        machine = {"type": "a3-highgpu-8g", **knobs}
        recipe = small_recipe(tmp_path, launch__kind="gce", launch__machine=machine)
        cloud = recipe.cloud.model_copy(update={"prices": {"a3-highgpu-8g": 50.0}})
        return place_of(recipe.model_copy(update={"cloud": cloud}))

    assert place().price == PlacePrice(50.0, None, "", uses_spot=False)
    assert place(spot=True).price == PlacePrice(None, 50.0, "", uses_spot=True)
    listed = small_recipe(
        tmp_path, launch__kind="gce", launch__machine={"type": "a3-highgpu-8g"}, launch__nodes=3
    )
    found = place_of(listed)
    assert found.price == PlacePrice(3 * 88.49, 3 * 36.0, "2026-11-01", uses_spot=False)
    assert found.device is not None
    assert (found.device.name, found.devices) == ("h100", 8)


def test_places_that_nobody_described_have_neither_device_nor_price(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path, launch__kind="ssh", launch__ssh__hosts=["a", "b"])
    place = place_of(recipe)
    assert (place.device, place.device_bytes, place.price, place.type) == (None, None, None, "cuda")
    named = place_of(recipe, "h100")
    assert named.device_bytes is not None
    assert named.device_bytes.likely == pytest.approx(79.2 * GIB, rel=0.01)
    assert isinstance(cost(recipe, place).money[ON_DEMAND], Unknown)


@pytest.mark.parametrize(
    ("knobs", "each"),
    [
        ({}, 12),
        ({"precision__master": "stochastic"}, 10),
        ({"train__optimizer": {"kind": "sgd", "lr": 0.1}}, 4),
        ({"train__optimizer": {"kind": "sgd", "lr": 0.1, "momentum": 0.9}}, 8),
    ],
)
def test_bytes_of_a_checkpoint_by_optimizer(
    tmp_path: Path, knobs: dict[str, Any], each: int
) -> None:
    if "train__optimizer" in knobs:
        knobs = {**knobs, "train__optimizer__lr": None, "train__optimizer.lr": None}
    recipe = small_recipe(tmp_path, **knobs)
    assert state_bytes(recipe).likely == each
    assert likely(checkpoint_bytes(recipe, SMALL)) == each * 1e6


def test_an_adapter_is_all_that_a_checkpoint_holds(tmp_path: Path) -> None:
    config = preset("llama-1b")
    whole = model_size(small_recipe(tmp_path), config)
    adapted = model_size(small_recipe(tmp_path, model__lora={"rank": 8}), config)
    assert whole is not None
    assert adapted is not None
    assert whole.weights == whole.trained == adapted.weights == parameter_count(config)
    assert adapted.trained < whole.trained / 100
    assert model_size(small_recipe(tmp_path), {}) is None


def test_replicas_hold_the_state_again_and_shards_divide_it(tmp_path: Path) -> None:
    place, state = replace(PLACE, processes=8, type="cpu"), Range.exactly(12e12)
    copies = small_recipe(tmp_path, parallel__replicate=8)
    shards = small_recipe(tmp_path, parallel__shard=8)
    some = Range(0.0, 0.5, 1.0)
    assert likely(host_copy(copies, place, state, some)) == 8 * 12e12
    assert likely(host_copy(shards, place, state, some)) == 12e12
    best = small_recipe(
        tmp_path, parallel__shard=8, checkpoint__best="loss", train__evaluate_every=2
    )
    none = Range.exactly(0.0)
    assert likely(host_copy(shards, place, state, none)) == 0.0, "the last save copies nothing"
    assert likely(host_copy(best, place, state, none)) == 12e12
    waits = [saving(one, place, state, Range.exactly(1e9))[0] for one in (copies, shards)]
    assert likely(waits[0]) == pytest.approx(8 * likely(waits[1]), rel=0.01)


def test_training_waits_for_a_save_that_the_next_one_overtakes(tmp_path: Path) -> None:
    recipe, state = small_recipe(tmp_path), Range.exactly(1e12)
    rare, _ = saving(recipe, PLACE, state, Range.exactly(1e6))
    often, whole = saving(recipe, PLACE, state, Range.exactly(60.0))
    assert likely(often) == pytest.approx(likely(rare) + likely(whole) - 60.0)
    at_once, _ = saving(
        small_recipe(tmp_path, checkpoint__asynchronous=False), PLACE, state, Range.exactly(1e6)
    )
    assert likely(at_once) > 10 * likely(rare)


def test_room_for_one_checkpoint_more_than_is_kept(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path, checkpoint__keep=2)
    found = spaces(recipe, PLACE, SMALL, Range.exactly(5.0), Range.exactly(100.0))
    sizes = [likely(each.bytes) for each in found]
    assert sizes == [5, 300, 2e6, 5 + 300 + 2e6, 5 + 300 + 2e6]
    here = spaces(
        recipe, replace(PLACE, kind="local"), SMALL, Range.exactly(5.0), Range.exactly(1.0)
    )
    assert [each.what for each in here if "bucket" in each.what] == []


def test_the_disk_has_an_adapters_checkpoints_and_the_merged_model(tmp_path: Path) -> None:
    """Of a 70B: twice as many bytes as weights, as the model is exported, and little beside it."""
    config = preset("llama-8b") | {"num_hidden_layers": 80, "hidden_size": 8192}
    for export, each in (("bf16", 2), ("fp32", 4)):
        knobs: dict[str, Any] = {"model__lora": {"rank": 8}, "precision__export": export}
        recipe = small_recipe(tmp_path, checkpoint__keep=2, **knobs)
        size = model_size(recipe, config)
        assert size is not None
        found = spaces(recipe, PLACE, size, Range.exactly(0.0), checkpoint_bytes(recipe, size))
        together = next(one.bytes for one in found if one.what == "together on the disk")
        assert likely(together) == size.weights * each + 3 * 12 * size.trained
    named = small_recipe(tmp_path, model__lora={"rank": 8, "targets": ["q_proj"]})
    some = checkpoint_bytes(named, size)
    assert isinstance(some, Range)
    assert (some.low, some.high) == (0, 12 * size.trained)


def test_what_grows_with_ranks_grows_with_ranks() -> None:
    def seconds(nodes: int) -> list[float]:
        place = replace(PLACE, nodes=nodes, processes=8)
        return [each.seconds.likely for each in rank_costs(place, Range.exactly(1e12))]

    few, many = seconds(2), seconds(1250)
    assert many[0] == pytest.approx(625 * few[0])
    assert many[1] == pytest.approx(625 * few[1])
    assert many[2] == few[2]  # rank 0 verifies the same bytes, eight files at a time


def test_a_restart_waits_for_all_that_grows_with_ranks(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path, train__steps=100, checkpoint__every=50)
    found = cost(recipe, replace(PLACE, nodes=1250, processes=8))
    grows = [likely(each.seconds) for each in found.per_rank]
    assert len(grows) == 3
    gap = 100 * 2.0 / 2
    apart = likely(found.start_s) - grows[0]
    assert likely(found.restart_s) == pytest.approx(sum(grows) + apart + gap / 2)


def test_memory_by_formula_has_the_weights_in_it(tmp_path: Path) -> None:
    config, one = preset("llama-1b"), Degrees()
    recipe = small_recipe(tmp_path, parallel__replicate=1)
    size = model_size(recipe, config)
    assert size is not None
    whole = formula_memory(recipe, config, size, one, half=True)
    assert whole.low > 16 * size.weights
    assert whole.origin == "guessed"
    shared = formula_memory(
        small_recipe(tmp_path, parallel__shard=4), config, size, Degrees(shard=4), half=True
    )
    assert shared.likely < whole.likely / 2


def test_energy_is_the_power_of_the_devices_for_as_long(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path, launch__kind="ssh", launch__ssh__hosts=["a"])
    found = cost(recipe, place_of(recipe, "h100"))
    assert likely(found.energy_kwh) == pytest.approx(
        0.75 * 700 / 1000 * likely(found.total_s) / 3600
    )
    assert isinstance(cost(recipe).energy_kwh, Unknown)
