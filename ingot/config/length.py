"""How many steps a recipe makes of its rows. No torch."""

from __future__ import annotations

import math
from fractions import Fraction

from ingot.base.errors import WrongInput
from ingot.config.recipe import Recipe
from ingot.config.shape import total_steps


def steps_of(recipe: Recipe, rows: int, begin: int = 0) -> int:
    """The number of optimizer steps that the recipe makes of so many training rows. Epochs are
    shorter by what its `data.skip` leaves out of them: rows that are left out on purpose are not
    replaced by those of another pass. `begin`: the place in the data's order of the first sample.

    Raises:
        WrongInput: `data.skip` leaves not one step of the epochs.
    """
    train, per_row = recipe.train, recipe.objective.samples_per_row
    if train.steps is not None or train.tokens is not None:
        return total_steps(train, rows * per_row, recipe.data.seq_len)
    passed = Fraction(str(train.epochs or 1.0)) * rows
    skipped = _left_out(recipe.data.skip, begin, begin + passed)
    if skipped and (passed - skipped) * per_row < train.global_batch:
        raise WrongInput(
            f"data.skip leaves out {float(skipped):,g} of the {float(passed):,g} samples of"
            f" train.epochs={train.epochs or 1:g}, and what is left is less than one"
            f" train.global_batch={train.global_batch}; skip fewer, or train more epochs"
        )
    return total_steps(train, rows * per_row, recipe.data.seq_len, skipped * per_row)


def rows_come_to(recipe: Recipe, steps: int, rollouts: int = 0) -> int:
    """How many rows of the data's order a training has come to after so many steps (from 1). Where
    it samples answers, the rollout that it lies inside of counts as a whole, and so do those that
    are sampled ahead; `rollouts`: those that are known to be begun, one more than that where a
    signal came before a step.
    """
    objective = recipe.objective
    updates, ahead = getattr(objective, "updates", 1), getattr(objective, "staleness", 0)
    begun = max(math.ceil(steps / updates) + ahead, rollouts) * updates
    return math.ceil(begun * recipe.train.global_batch / objective.samples_per_row)


def _left_out(ranges: list[tuple[int, int]], first: int, after: Fraction) -> Fraction:
    """How many places between `first` and `after` lie in one of the ranges."""
    end, found = Fraction(first), Fraction(0)
    for begin, behind in sorted(ranges):
        begins, ends = max(end, Fraction(begin)), min(after, Fraction(behind))
        found += max(Fraction(0), ends - begins)
        end = max(end, ends)
    return found
