from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from ingot.config.identity import changes, training_identity
from ingot.config.recipe import Recipe


def recipe(**sections: object) -> Recipe:
    return Recipe.model_validate({"name": "a", "data": {"train": [{"source": "x"}]}, **sections})


def test_a_recipe_knows_its_places() -> None:
    assert recipe().folder.root == Path("runs/a")
    assert recipe(output="/o").folder.model == Path("/o/a/model")
    assert recipe(output="/o").registry_path == Path("/o/registry.sqlite")
    assert recipe(registry={"path": "/r.db", "name": "b"}).registry_path == Path("/r.db")
    assert recipe(registry={"name": "b"}).registry_name == "b"
    assert recipe().registry_name == "a"


def test_a_preset_trains_its_tokenizer_and_a_model_with_weights_brings_its_own() -> None:
    assert recipe().trains_tokenizer
    assert not recipe(model={"source": "hf:a/b"}).trains_tokenizer
    assert recipe(model={"source": "hf:a/b"}, tokenizer={"source": "train"}).trains_tokenizer
    assert not recipe(tokenizer={"source": "some/folder"}).trains_tokenizer


def test_a_recipe_cannot_be_changed_once_it_is_checked() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        recipe().train.steps = 3  # type: ignore[misc]


def test_knobs_are_selected_by_their_paths() -> None:
    chosen = recipe(seed=3).select(("seed", "train.optimizer.lr", "data.train"))
    assert chosen["seed"] == 3
    assert chosen["train.optimizer.lr"] == 3e-4
    assert chosen["data.train"][0]["source"] == "x"


def test_what_decides_the_numbers_is_told_apart_from_what_does_not() -> None:
    base = training_identity(recipe())
    same = recipe(
        train={"micro_batch": 2},
        checkpoint={"every": 3},
        track={"every": 1},
        evaluate={"micro_batch": 1},
    )
    assert changes(base, training_identity(same)) == []
    assert changes(base, training_identity(recipe(train={"optimizer": {"lr": 1e-3}}))) == [
        "train.optimizer.lr 0.0003 -> 0.001"
    ]
    assert changes(base, training_identity(recipe(seed=1))) == ["seed 0 -> 1"]
    early = {"early_stop": {}, "evaluate_every": 5}
    assert changes(
        training_identity(recipe(train=early)),
        training_identity(recipe(train={**early, "evaluate_every": 6})),
    ) == ["train.evaluate_every 5 -> 6"]
