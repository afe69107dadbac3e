"""What machines cost an hour, and how long a run may go on for the money."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import pytest

from ingot.base.errors import WrongInput
from ingot.cloud.machines import ACCELERATORS, MACHINES
from ingot.cloud.prices import (
    hourly_price,
    hourly_price_of_tpu,
    price_table,
    time_limit_s,
    tpu_chips,
)
from ingot.config.sections.deployment import Cloud
from ingot.config.sections.launch import Machine
from tests.small import small_recipe

DAY = 86_400.0


def test_the_table_has_a_price_for_every_machine_and_says_of_what_day_it_is() -> None:
    assert date.fromisoformat(price_table()["date"])
    assert price_table()["approximate"] is True
    for name in MACHINES:
        on_demand, spot = (
            hourly_price(Cloud(), Machine(type=name), 1),
            hourly_price(Cloud(), Machine(type=name, spot=True), 1),
        )
        assert 0 < (spot or 0) < (on_demand or 0), name
    attached = [name for name, accelerator in ACCELERATORS.items() if accelerator.counts]
    assert set(price_table()["accelerators"]) == set(attached)


def test_nodes_accelerators_and_spot_count() -> None:
    each = price_table()["accelerators"]["nvidia-tesla-t4"]
    bare = hourly_price(Cloud(), Machine(), 1)
    assert bare == pytest.approx(8 * price_table()["vcpus"]["n1-standard"][0])
    with_two = Machine(accelerator="NVIDIA_TESLA_T4", accelerators=2)
    assert hourly_price(Cloud(), with_two, 3) == pytest.approx(3 * (bare + 2 * each[0]))
    assert hourly_price(Cloud(), with_two.model_copy(update={"spot": True}), 1) == pytest.approx(
        8 * price_table()["vcpus"]["n1-standard"][1] + 2 * each[1]
    )
    assert (
        hourly_price(Cloud(), Machine(type="a2-highgpu-8g"), 2)
        == 2 * price_table()["machines"]["a2-highgpu-8g"][0]
    )  # its accelerators are in that


def test_a_price_of_ones_own_takes_the_place_of_the_tables() -> None:
    assert (
        hourly_price(
            Cloud(prices={"a2-highgpu-8g": 20.0}), Machine(type="a2-highgpu-8g", spot=True), 2
        )
        == 40.0
    )
    cloud = Cloud(prices={"n1-standard-8": 0.5, "NVIDIA_TESLA_T4": 0.25})
    assert hourly_price(cloud, Machine(accelerator="nvidia-tesla-t4", accelerators=4), 1) == 1.5
    assert hourly_price(Cloud(), Machine(type="n2-custom-8-16384"), 1) is None
    assert (
        hourly_price(Cloud(prices={"n2-custom-8-16384": 0.3}), Machine(type="n2-custom-8-16384"), 1)
        == 0.3
    )


def test_tpus_count_chips_or_cores_by_their_generation() -> None:
    assert [tpu_chips(kind) for kind in ("v5litepod-8", "v6e-4", "v4-8", "v2-8", "v5p", "t4")] == [
        8,
        4,
        4,
        4,
        None,
        None,
    ]
    assert hourly_price_of_tpu(Cloud(), "v5litepod-8") == pytest.approx(
        8 * price_table()["chips"]["v5litepod"][0]
    )
    assert hourly_price_of_tpu(Cloud(prices={"v5litepod-8": 1.0}), "v5litepod-8") == 1.0
    assert hourly_price_of_tpu(Cloud(), "v9-8") is None


@pytest.mark.parametrize(
    ("knobs", "seconds"),
    [
        ({}, 7 * DAY),
        ({"cloud.max_run": "24h"}, DAY),
        ({"cloud.max_cost": 10}, 10 / 2 * 3600),
        ({"cloud.max_cost": 10, "cloud.max_run": "1h"}, 3600.0),
        ({"cloud.max_cost": 10, "launch.nodes": 2}, 10 / 4 * 3600),
        ({"cloud.max_cost": 10_000}, 7 * DAY),
    ],
)
def test_the_shorter_bound_holds(tmp_path: Path, knobs: dict[str, Any], seconds: float) -> None:
    recipe = small_recipe(tmp_path, **{"cloud.prices": {"n1-standard-8": 2.0}, **knobs})
    assert time_limit_s(recipe) == pytest.approx(seconds)


def test_what_earlier_starts_had_is_taken_off(tmp_path: Path) -> None:
    recipe = small_recipe(
        tmp_path,
        **{"cloud.prices": {"n1-standard-8": 2.0}, "cloud.max_cost": 10, "launch.nodes": 2},
    )
    assert time_limit_s(recipe, nodes=1, used=(3600.0, 2.0)) == pytest.approx(4 * 3600)
    assert time_limit_s(recipe, nodes=1, used=(3600.0, 12.0)) < 0
    bounded = small_recipe(tmp_path, **{"cloud.max_run": "1h"})
    assert time_limit_s(bounded, used=(3000.0, 99.0)) == pytest.approx(600)


def test_a_bound_that_cannot_be_kept_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        WrongInput, match=r"price of n2-custom-8-16384 is not known; give it in cloud\.prices"
    ):
        time_limit_s(
            small_recipe(
                tmp_path, **{"cloud.max_cost": 10, "launch.machine.type": "n2-custom-8-16384"}
            )
        )
    with pytest.raises(WrongInput, match=r"too little to start with"):
        time_limit_s(
            small_recipe(tmp_path, **{"cloud.max_cost": 1, "launch.machine.type": "a3-highgpu-8g"})
        )


def test_a_tpu_has_a_bound_too(tmp_path: Path) -> None:
    recipe = small_recipe(
        tmp_path, **{"launch.kind": "tpu", "cloud.max_cost": 96, "launch.tpu.type": "v5litepod-8"}
    )
    assert time_limit_s(recipe) == pytest.approx(
        96 / (8 * price_table()["chips"]["v5litepod"][0]) * 3600
    )
