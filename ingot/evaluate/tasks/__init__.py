"""Every task of `evaluate.tasks` behind one face: opened once, which refuses what can be refused,
then measured as often as wanted.
"""

from __future__ import annotations

from ingot.config.sections.evaluation import (
    ChoiceTask,
    ClassificationTask,
    HellaSwagTask,
    LMEvalTask,
    LossTask,
    RougeTask,
    Task,
)
from ingot.evaluate.subject import EvalModel, EvalModelInfo, OpenTask, TaskResult
from ingot.evaluate.tasks.choice import open_choice
from ingot.evaluate.tasks.classification import open_classification
from ingot.evaluate.tasks.lm_eval import open_lm_eval
from ingot.evaluate.tasks.loss import open_loss
from ingot.evaluate.tasks.rouge import open_rouge


def open_task(task: Task, about: EvalModelInfo, most: int | None = None) -> OpenTask:
    """Read and check all that the task needs beside the model.

    Args:
        most: take the first so many validation documents, where it goes by those.

    Raises:
        WrongInput: a package, a file or a column is missing, the model is of another kind, or an
            item is too long for it.
        Failed: data on the hub cannot be reached.
    """
    match task:
        case LossTask():
            return open_loss(task, about, most)
        case HellaSwagTask() | ChoiceTask():
            return open_choice(task, about)
        case RougeTask():
            return open_rouge(task, about, most if task.source is None else None)
        case ClassificationTask():
            return open_classification(task, about, most)
        case LMEvalTask():
            return open_lm_eval(task, about)
        case _:
            raise AssertionError(f"no evaluation is made of {task.kind}")


def check(task: Task, model: EvalModelInfo | EvalModel) -> None:
    """Refuse a task that cannot be measured, before the first forward; raises as `open_task`
    does.
    """
    open_task(task, model.info if isinstance(model, EvalModel) else model)


def measure(task: Task, subject: EvalModel) -> TaskResult:
    """Open the task and measure it. Collective: every rank calls it, and all get the same."""
    return open_task(task, subject.info).measure(subject)


def needs_rows(task: Task) -> bool:
    """Whether a task goes by the prepared validation rows."""
    return isinstance(task, LossTask | ClassificationTask)
