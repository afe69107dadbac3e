"""Some of the recipe's tasks while training runs: opened once, measured again and again on the
model as it is then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ingot.evaluate.subject import Subject
from ingot.evaluate.tasks import open_task

Found = dict[str, tuple[float, Literal["lower", "higher"]]]
"""Metric key -> value, and which is better."""


class Watch:
    """The tasks `names` of a subject in training.

    What goes by the validation documents takes the first `train.evaluate_rows` of them, always the
    same; other tasks have limits of their own.

    Raises:
        WrongInput: as `open_task`: whatever can be refused is refused here, before the first step.
    """

    def __init__(self, subject: Subject, names: Sequence[str]) -> None:
        self._subject = subject
        wanted = [task for task in subject.recipe.tasks if task.name in names]
        self._opened = [
            open_task(task, subject.about, subject.recipe.train.evaluate_rows) for task in wanted
        ]

    def __call__(self) -> Found:
        """What the model reaches now; it must be in evaluation mode. Collective: every rank calls
        it, and all get the same.
        """
        found: Found = {}
        for opened in self._opened:
            for key, metric in opened.measure(self._subject).metrics.items():
                found[key] = metric.value, metric.direction
        return found
