"""The tasks of `evaluate.tasks`: each is opened once, which checks everything possible, and then
measured as often as needed. The kinds are registered in `ingot.config.doors`.
"""

from __future__ import annotations

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
