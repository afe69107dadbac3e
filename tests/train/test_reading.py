"""How much one has to open to follow a training: the files of ingot that are entered on the way from
a recipe to `train()`, and those that one plain step enters.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import ingot
import ingot.cli.verbs  # loaded here, so that no import is counted
from ingot.cli.app import app
from ingot.config.load import dump_recipe
from ingot.config.recipe import Recipe
from ingot.train import trainer
from ingot.train.hooks import TrainingControl
from ingot.train.trainer import train
from tests.small import small_recipe

HERE = f"{Path(ingot.__file__).parent}/"
MOST_BEFORE, MOST_IN_A_STEP = 18, 19


class Reached(Exception):
    """`train()` was called."""


def files_before_training(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Files of ingot whose functions `ingot train RECIPE` calls before `train()`. The sections of
    the recipe count as one: it is read with the section at hand, which is nothing but its knobs.
    """
    files = set[str]()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(HERE):
            name = name.removeprefix(HERE)
            files.add("config/sections/" if name.startswith("config/sections/") else name)

    def reached(*arguments: Any, **options: Any) -> None:
        sys.setprofile(None)
        raise Reached

    monkeypatch.setattr(trainer, "train", reached)
    sys.setprofile(note)
    try:
        with pytest.raises(Reached):
            app(["train", str(recipe)], standalone_mode=False)
    finally:
        sys.setprofile(None)
    return files


def test_few_files_lie_between_a_recipe_and_training(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process, everything prepared."""
    path = root / "recipe.yaml"
    path.write_text(dump_recipe(small_recipe(root)), encoding="utf-8")
    entered = files_before_training(path, monkeypatch)
    assert {"cli/verbs.py", "config/load.py", "pipeline/incremental.py"} <= entered
    assert len(entered) <= MOST_BEFORE, " ".join(sorted(entered))


def files_of_a_step(recipe: Recipe, chosen: int, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Files of ingot whose functions the training thread calls from the fetch of step `chosen` to
    that of the next.
    """
    files, fetch = set[str](), TrainingControl.fetch

    def note(frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(HERE):
            files.add(name.removeprefix(HERE))

    def fetch_and_note(self: TrainingControl, step: int) -> Any:
        sys.setprofile(note if step == chosen else None)
        return fetch(self, step)

    monkeypatch.setattr(TrainingControl, "fetch", fetch_and_note)
    try:
        train(recipe)
    finally:
        sys.setprofile(None)
    return files


def test_a_plain_step_enters_few_files(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process, a decoder, nothing logged, measured or saved in that step."""
    plain = files_of_a_step(small_recipe(root, train__steps=4, track__every=100), 2, monkeypatch)
    assert {"train/step.py", "train/hooks.py", "models/native/decoder.py"} <= plain
    assert len(plain) <= MOST_IN_A_STEP, " ".join(sorted(plain))
