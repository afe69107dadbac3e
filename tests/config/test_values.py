from __future__ import annotations

import os
from pathlib import Path

import pytest

from ingot.base.environment import LOADED_VARIABLE, RESOLVED_VARIABLE
from ingot.base.errors import Failed, WrongInput
from ingot.config.load import load_recipe, read_recipe, read_values
from ingot.config.values import RecipeInputs, own_inputs

RECIPE = "name: small\ndata: {train: [{source: text}]}\n"


def test_a_process_reads_its_recipe_as_it_was_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the names and lines of the files, which errors tell; even where they are gone."""
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text(f"{RECIPE}seed: no\n", encoding="utf-8")
    Path(".env").write_text("INGOT_TRAIN__STEPS=5\nOTHER=1\n", encoding="utf-8")
    inputs = RecipeInputs.of({"INGOT_NAME": "grüße", "PATH": "x"}, Path(".env"))
    read_values(["r.yaml"], [], inputs, verb=None)
    assert inputs.changed(tmp_path) == ["$INGOT_NAME"]
    with Path("loaded").open("w", encoding="utf-8") as file:
        inputs.write(file)
    Path("r.yaml").unlink()
    Path(".env").write_text("set INGOT_SEED=9\n", encoding="utf-8")
    assert inputs.changed(tmp_path) == [os.path.abspath("r.yaml"), ".env"]
    monkeypatch.setenv(LOADED_VARIABLE, "loaded")
    assert own_inputs(Path(".env")) == inputs
    with pytest.raises(WrongInput) as wrong:
        read_recipe(["r.yaml"])
    told = str(wrong.value)
    assert "r.yaml:3: `seed`" in told
    assert "$INGOT_NAME: `name`" in told
    assert read_recipe(["r.yaml", "seed=1", "name=mine"]).train.steps == 5
    monkeypatch.setenv(RESOLVED_VARIABLE, "1")
    Path("r.yaml").write_text(RECIPE, encoding="utf-8")
    assert load_recipe(["r.yaml"]).name == "small", "a resolved recipe is read as it is"
    monkeypatch.delenv(RESOLVED_VARIABLE)
    monkeypatch.setenv(LOADED_VARIABLE, "gone")
    with pytest.raises(Failed, match="gone, which holds the recipe as it was loaded"):
        read_recipe(["r.yaml"])
