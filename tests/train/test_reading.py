"""How much one has to open to follow a training: the files of ingot that one plain step enters."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import ingot
from ingot.config.recipe import Recipe
from ingot.train.hooks import TrainingControl
from ingot.train.trainer import train
from tests.small import small_recipe

HERE = f"{Path(ingot.__file__).parent}/"
MOST_FILES = 15


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
    assert len(plain) <= MOST_FILES, sorted(plain)
