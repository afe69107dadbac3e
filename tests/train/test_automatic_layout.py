"""`parallel: auto` at the start of a training: one rank decides for all, the result is that of any
other layout, and what was decided is kept.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ingot.base.environment import ranks
from ingot.base.errors import WrongInput
from ingot.config.automatic import ChosenLayout, StartDevices, with_degrees
from ingot.config.degrees import Degrees
from ingot.config.recipe import Recipe
from ingot.plan.automatic import SearchingPlanner
from ingot.train import automatic_layout
from ingot.train.automatic_layout import _decide, read_layout
from ingot.train.trainer import train
from tests import tolerances
from tests.ranks import run_ranks
from tests.small import copy_of, small_recipe
from tests.train.test_run import losses

DEVICES = StartDevices(8, 8, "cuda", "NVIDIA H100 80GB HBM3", 85 * 10**9)
SHARD = ChosenLayout(Degrees(shard=8), "the fastest of 3 that fit")


class Noting:
    """A planner that notes what it was asked for."""

    def __init__(self, layout: ChosenLayout = SHARD) -> None:
        self.chosen, self.asked = layout, list[StartDevices]()

    def layout(self, recipe: Recipe, devices: StartDevices) -> ChosenLayout:
        self.asked.append(devices)
        return self.chosen

    def micro_batch(self, recipe: Recipe, devices: StartDevices) -> int | None:
        return None


def train_with(root: str, knobs: dict[str, Any]) -> None:
    """Rank 0 would share each matrix, the other would share nothing."""
    mine = Degrees(tensor=2) if ranks().is_main else Degrees(replicate=2)
    train(small_recipe(Path(root), **knobs), planner=Noting(ChosenLayout(mine, "so it is")))


def train_searching(root: str, knobs: dict[str, Any]) -> None:
    train(small_recipe(Path(root), **knobs), planner=SearchingPlanner())


def test_all_ranks_take_the_word_of_the_first(prepared_root: Path, tmp_path: Path) -> None:
    one, two = (copy_of(prepared_root, tmp_path / name) for name in ("one", "two"))
    alone = small_recipe(one, train__steps=3)
    train(alone)
    knobs = {"train__steps": 3, "parallel": "auto"}
    run_ranks(2, train_with, str(two), knobs)
    recipe = small_recipe(two, **knobs)
    kept = read_layout(recipe.folder)
    assert kept is not None
    assert kept["degrees"] == {**dict.fromkeys(kept["degrees"], 1), "tensor": 2}
    assert (kept["devices"]["world"], kept["devices"]["per_node"]) == (2, 2)
    assert losses(recipe) == pytest.approx(losses(alone), abs=tolerances.SPLIT_LOSS)


def test_a_device_of_which_nothing_is_known_shares_the_weights(root: Path) -> None:
    knobs = {"train__steps": 2, "parallel": "auto", "train__micro_batch": "auto"}
    run_ranks(2, train_searching, str(root), knobs)
    kept = read_layout(small_recipe(root).folder)
    assert kept is not None
    assert (kept["degrees"]["shard"], kept["searched"]) == (2, False)
    assert "ingot bench --calibrate" in kept["why"]


def decide(recipe: Recipe, planner: Noting, devices: StartDevices = DEVICES) -> Degrees:
    recipe.folder.reports.mkdir(parents=True, exist_ok=True)
    return _decide(recipe, devices, planner)


def test_what_was_decided_is_kept_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, planner = small_recipe(tmp_path, parallel="auto"), Noting()
    assert decide(recipe, planner) == Degrees(shard=8)
    assert "parallel: auto is shard 8: the fastest of 3 that fit" in capsys.readouterr().err
    planner.chosen = ChosenLayout(Degrees(tensor=8), "another mood")
    longer = small_recipe(tmp_path, parallel="auto", train__steps=99)
    nearly = replace(DEVICES, memory=DEVICES.memory - 10**9)
    assert decide(longer, planner, nearly) == Degrees(shard=8)
    assert len(planner.asked) == 1
    assert "parallel: auto is shard 8, as it was decided before" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("knobs", "devices", "told"),
    [
        ({}, replace(DEVICES, world=16), "world 8 -> 16"),
        ({}, replace(DEVICES, name="NVIDIA L4"), "name NVIDIA H100 80GB HBM3 -> NVIDIA L4"),
        ({}, replace(DEVICES, memory=40 * 10**9), "memory 85000000000 -> 40000000000"),
        ({"memory__recompute__kind": "full"}, DEVICES, "memory.recompute.kind none -> full"),
    ],
)
def test_other_devices_and_settings_are_searched_anew_and_told(
    knobs: dict[str, Any],
    devices: StartDevices,
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    planner = Noting()
    decide(small_recipe(tmp_path, parallel="auto"), planner)
    planner.chosen = ChosenLayout(Degrees(tensor=8, expert=8), "another mood")
    changed = small_recipe(tmp_path, parallel="auto", **knobs)
    assert decide(changed, planner, devices) == Degrees(tensor=8, expert=8)
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if "anew" in line and told in line]
    assert decide(changed, planner, devices) == Degrees(tensor=8, expert=8)
    assert len(planner.asked) == 2
    assert with_degrees(changed, Degrees(tensor=8, expert=8)).parallel.expert == 8


@pytest.mark.parametrize("text", ["{", "{}", '{"schema": 2}', "[]"])
def test_a_damaged_record_is_made_anew(text: str, tmp_path: Path) -> None:
    recipe, planner = small_recipe(tmp_path, parallel="auto"), Noting()
    decide(recipe, planner)
    recipe.folder.layout.write_text(text)
    assert decide(recipe, planner) == Degrees(shard=8)
    assert len(planner.asked) == 2
    assert json.loads(recipe.folder.layout.read_bytes())["schema"] == automatic_layout.SCHEMA


def test_nobody_to_decide_is_told(root: Path) -> None:
    with pytest.raises(WrongInput, match="parallel: auto needs a planner"):
        train(small_recipe(root, parallel="auto"))
