"""Several tasks on one model: each metric is of one of them."""

from __future__ import annotations

from typing import Any, cast

import pytest

from ingot.base.errors import WrongInput
from ingot.base.reports import Metric
from ingot.evaluate.subject import EvalModel, TaskResult
from ingot.evaluate.tasks import measure_all


class Fixed:
    """A task that always finds the same."""

    def __init__(self, *keys: str, value: float = 0.5) -> None:
        self._keys, self._value, self.times = keys, value, 0

    def measure(self, subject: EvalModel) -> TaskResult:
        self.times += 1
        metric = Metric(self._value, self._value, self._value, "higher", 3, "items")
        return TaskResult(dict.fromkeys(self._keys, metric), [])


def test_a_metric_that_two_tasks_give_is_refused_before_more_is_measured() -> None:
    subject = cast("Any", None)
    whole, own = Fixed("loss/loss", value=4.0), Fixed("own/accuracy")
    found = measure_all({"loss": whole, "own": own}, subject)
    assert {name: [*item.metrics] for name, item in found.items()} == {
        "loss": ["loss/loss"],
        "own": ["own/accuracy"],
    }
    same, later = Fixed("own/accuracy", "loss/loss"), Fixed("later/accuracy")
    words = r"evaluate\.tasks loss and own both have a metric loss/loss; .* called own/"
    with pytest.raises(WrongInput, match=words):
        measure_all({"loss": whole, "own": same, "later": later}, subject)
    assert later.times == 0
