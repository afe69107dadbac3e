"""From the knob `objective.kind` to the objective."""

from __future__ import annotations

from ingot.config.recipe import Recipe
from ingot.objectives.pretrain import Pretrain
from ingot.objectives.sft import SFT


def objective_of(recipe: Recipe) -> Pretrain:
    return SFT() if recipe.objective.kind == "sft" else Pretrain()
