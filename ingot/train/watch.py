"""Which evaluation was the best so far, and whether it is time to stop: the one place that compares
measurements while training.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ingot.base.errors import WrongInput


@dataclass(frozen=True)
class Measured:
    """A number that was measured while training, and which way is better."""

    value: float
    direction: Literal["lower", "higher"] = "lower"


class Tracker:
    """Follows one metric: its best value, the step of that, and how many measurements in a row were
    no better.
    """

    def __init__(self, metric: str, min_delta: float = 0.0) -> None:
        self.metric, self.min_delta = metric, min_delta
        self.best: float | None = None
        self.best_step: int | None = None
        self.worse_in_row = 0

    def see(self, step: int, measured: Mapping[str, Measured]) -> bool:
        """Take in what was measured at a step; True where it is an improvement.

        Raises:
            WrongInput: the metric is not among what was measured.
        """
        if self.metric not in measured:
            raise WrongInput(
                f"the metric {self.metric} is not measured while training; known are"
                f" {', '.join(sorted(measured))}"
            )
        found = measured[self.metric]
        gain = (
            math.inf
            if self.best is None
            else (self.best - found.value) * (1 if found.direction == "lower" else -1)
        )
        improved = math.isfinite(found.value) and gain > self.min_delta
        self.worse_in_row = 0 if improved else self.worse_in_row + 1
        if math.isfinite(found.value) and gain > 0:
            self.best = found.value
            self.best_step = step
        return improved

    def state(self) -> dict[str, Any]:
        """What a resumed run must know to decide alike."""
        return {
            "metric": self.metric,
            "best": self.best,
            "best_step": self.best_step,
            "worse_in_row": self.worse_in_row,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.best, self.best_step, self.worse_in_row = (
            state["best"],
            state.get("best_step"),
            state["worse_in_row"],
        )
