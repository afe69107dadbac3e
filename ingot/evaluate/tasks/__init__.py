"""The tasks of `evaluate.tasks`: each is opened once, which checks everything possible, and then
measured as often as needed. The kinds are registered in `ingot.config.doors`.
"""

from __future__ import annotations

from collections.abc import Mapping

from ingot.base.errors import WrongInput
from ingot.config.sections.evaluation import TaskSettings
from ingot.evaluate.subject import EvalModel, EvalModelInfo, OpenTask, TaskResult


def open_task(
    task: TaskSettings, info: EvalModelInfo, max_documents: int | None = None
) -> OpenTask:
    """Read and check everything that the task needs beside the model.

    Args:
        max_documents: use only the first so many validation documents, if the task uses those.

    Raises:
        WrongInput: a package, a file or a column is missing, the model is of another kind, or an
            item is too long for it.
        Failed: data on the hub cannot be reached.
    """
    opened: OpenTask = task.load_implementation()(task, info, max_documents)
    return opened


def check(task: TaskSettings, model: EvalModelInfo | EvalModel) -> None:
    """Refuse a task that cannot be measured, before the first forward pass; raises as `open_task`
    does.
    """
    open_task(task, model.info if isinstance(model, EvalModel) else model)


def measure(task: TaskSettings, subject: EvalModel) -> TaskResult:
    """Open the task and measure it. Collective: every rank calls it, all get the same result."""
    return open_task(task, subject.info).measure(subject)


def measure_all(opened: Mapping[str, OpenTask], subject: EvalModel) -> dict[str, TaskResult]:
    """Measure tasks by name, one after the other. Collective as `measure`.

    Raises:
        WrongInput: two tasks have a metric of one key; told before more tasks are measured.
    """
    found: dict[str, TaskResult] = {}
    task_of: dict[str, str] = {}
    for name, item in opened.items():
        found[name] = item.measure(subject)
        for key in found[name].metrics:
            if (other := task_of.setdefault(key, name)) != name:
                raise WrongInput(
                    f"evaluate.tasks {other} and {name} both have a metric {key}; a task's metrics"
                    f" are to be called {name}/..., as it is itself"
                )
    return found
