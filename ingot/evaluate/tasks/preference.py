"""Accuracy of a reward model: how often it scores the preferred answer of a held-out preference
higher.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ingot.base.errors import WrongInput
from ingot.config.sections.evaluation import PreferenceTask
from ingot.config.sections.objective import RewardModelSettings
from ingot.data.batches.rows import Rows
from ingot.data.batches.samples import Samples
from ingot.data.columns.manifest import PreparedData
from ingot.evaluate.distribute import sum_over_ranks
from ingot.evaluate.loss import score_samples
from ingot.evaluate.metrics import mean_metric
from ingot.evaluate.subject import EvalModel, EvalModelInfo, TaskResult
from ingot.evaluate.tasks.loss import comparison_set, open_held_out
from ingot.models.hf.config import HFConfig
from ingot.objectives.protocol import ObjectiveInputs
from ingot.objectives.reward import RewardModel


@dataclass(frozen=True)
class OpenPreferenceTask:
    """The task with its opened rows."""

    name: str
    rows: Samples
    prepared: PreparedData
    count: int

    def measure(self, subject: EvalModel) -> TaskResult:
        """Raises WrongInput where the model has several outputs, Failed where its scores are not
        finite.
        """
        config = subject.model.config
        if not (isinstance(config, HFConfig) and config.scores):
            raise WrongInput(
                f"evaluate.tasks, {self.name}: {subject.where} tells classes apart; preference is"
                " for models that give one score"
            )
        objective = RewardModel(RewardModelSettings(kind="reward"), ObjectiveInputs())
        table = np.zeros((self.count, 4), np.float64)
        found = score_samples(subject, self.rows, self.count, self.name, objective.token)
        for batch, values in found:
            live = batch.rows >= 0
            scores = values.cpu().double().view(-1, 2)
            tokens = batch.segments.sum(dim=1).view(-1, 2)
            table[batch.rows[live].numpy(), :2] = scores[live].numpy()
            table[batch.rows[live].numpy(), 2:] = tokens[live].numpy()
        chosen, rejected, length, other = sum_over_ranks(table, subject.mesh).T
        margin = chosen - rejected
        if not np.isfinite(margin).all():
            raise subject.not_finite(self.name)
        on = comparison_set(self.prepared.sets["validation"], self.rows, subject.recipe, self.count)
        metrics = {
            f"{self.name}/accuracy": mean_metric(
                (margin > 0).astype(np.float64), direction="higher", on=on
            ),
            f"{self.name}/margin": mean_metric(margin, direction="higher", on=on),
            f"{self.name}/loss": mean_metric(np.logaddexp(0.0, -margin), direction="lower", on=on),
        }
        examples = [
            {"document": number, "chosen": one, "rejected": two, "correct": one > two}
            for number, (one, two) in enumerate(
                zip(chosen.tolist(), rejected.tolist(), strict=True)
            )
        ]
        # What a model would reach that knows nothing but length; ties count half.
        longer = float(((length > other) + 0.5 * (length == other)).mean())
        return TaskResult(metrics, examples, {f"{self.name}/accuracy/longer": longer})


def open_preference(
    task: PreferenceTask, info: EvalModelInfo, max_documents: int | None = None
) -> OpenPreferenceTask:
    """Raises WrongInput when the model is no classifier, or there are no rows of preferences."""
    what = f"evaluate.tasks, {task.name}: preference"
    info.require_kind(what, *task.model_kinds)
    if info.recipe.documents != "preference":
        raise WrongInput(
            f"{what} is measured on preferences, and objective.kind {info.recipe.objective.kind}"
            f" reads {info.recipe.documents} documents; remove the task"
        )
    prepared, rows = open_held_out(info.recipe, info.where, info.positions)
    assert not isinstance(rows, Rows)
    return OpenPreferenceTask(task.name, rows, prepared, min(len(rows), max_documents or len(rows)))
