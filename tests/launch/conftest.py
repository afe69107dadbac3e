"""Trainings that only stand in for real ones, made by a plan and supervised."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ingot.config.recipe import Recipe
from ingot.launch.job import Job
from ingot.launch.places.local import JobExit
from ingot.launch.supervisor.supervise import supervise
from tests.launch import stand_in
from tests.small import small_recipe

Made = Callable[..., Recipe]
Supervised = Callable[..., JobExit]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """A recipe with these knobs, and the plan of its stand-in."""

    def make(
        *attempts: Any, steps: int = 30, every: int = 10, step_s: float = 0.01, **knobs: Any
    ) -> Recipe:
        recipe = small_recipe(tmp_path, **knobs)
        recipe.folder.root.mkdir(parents=True, exist_ok=True)
        (recipe.folder.root / "plan.json").write_text(
            json.dumps({"steps": steps, "every": every, "step_s": step_s, "attempts": attempts})
        )
        return recipe

    return make


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Supervised:
    """Supervise the stand-in as if it were `ingot train`."""

    def supervised(recipe: Recipe, *options: str, processes: int = 1) -> JobExit:
        monkeypatch.setattr(
            "ingot.launch.node.ranks.rank_command",
            lambda job: [sys.executable, stand_in.__file__, str(recipe.folder.root), *job.argv],
        )
        return supervise(Job("train", ("train", "r.yaml", *options), processes), recipe)

    return supervised
