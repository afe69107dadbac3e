"""The door of evaluation tasks: every built-in kind opens, and a new kind is one class and one row."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from ingot.base.reports import Metric
from ingot.config.doors import BUILT_IN, TASKS
from ingot.config.load import load_recipe
from ingot.config.sections.evaluation import TaskSettings
from ingot.evaluate.subject import TaskResult
from ingot.evaluate.tasks import open_task


class _OpenCount:
    def __init__(self, task: CountTask, info: Any, max_documents: int | None) -> None:
        self.opened = task, info, max_documents

    def measure(self, subject: Any) -> TaskResult:
        task = self.opened[0]
        metric = Metric(task.start, task.start, task.start, "higher", 1, "none")
        return TaskResult({f"{task.name}/count": metric}, [])


class CountTask(TaskSettings):
    """Gives the number that it is told."""

    implementation = "_OpenCount"
    needs_rows = True

    kind: Literal["count"]
    """Which evaluation."""
    name: str = "count"
    """The name that its metrics carry in the report."""
    start: float = 3.0
    """The number."""


@pytest.mark.parametrize("kind", BUILT_IN["task"])
def test_every_built_in_kind_has_an_implementation(kind: str) -> None:
    settings = TASKS.find(kind)
    assert issubclass(settings, TaskSettings)
    assert callable(settings.load_implementation())


def test_a_new_kind_is_a_class_and_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BUILT_IN["task"], "count", "tests.evaluate.tasks.test_door:CountTask")
    file = tmp_path / "recipe.yaml"
    file.write_text(
        "name: a\ndata: {train: [{source: x.jsonl}]}\n"
        "evaluate: {tasks: [{kind: count, start: 5}, {kind: loss, baselines: [gzip]}]}\n"
    )
    recipe = load_recipe([file], environ={}, dotenv=None)
    task, loss = recipe.evaluate.tasks
    assert (task.needs_rows, task.baseline_names, loss.baseline_names) == (True, [], ["gzip"])
    opened: Any = open_task(task, "info", 7)  # type: ignore[arg-type]
    assert opened.opened == (task, "info", 7)
    assert opened.measure(None).metrics["count/count"].value == 5.0
