"""Every recipe that is shipped loads, and says in its head what it is and how to run it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ingot.config.load import dump_recipe, load_recipe
from ingot.config.recipe import Recipe
from tests.house.source import PROJECT

RECIPES = sorted((PROJECT / "recipes").glob("*.yaml"))


def test_there_are_recipes() -> None:
    assert {path.name for path in RECIPES} >= {"quickstart.yaml", "adapt_smollm2.yaml"}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_it_loads_and_survives_a_round_trip(path: Path, tmp_path: Path) -> None:
    recipe = load_recipe([path], environ={}, dotenv=None)
    assert isinstance(recipe, Recipe)
    resolved = tmp_path / "recipe.yaml"
    resolved.write_text(dump_recipe(recipe), encoding="utf-8")
    assert load_recipe([resolved], environ={}, dotenv=None) == recipe


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_its_head_says_how_to_run_it_and_on_what(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    head = text[: text.index("\nname:")]
    assert all(line.startswith("#") for line in head.strip().splitlines())
    for word in (f"ingot run recipes/{path.name}", "Hardware:"):
        assert word in head
