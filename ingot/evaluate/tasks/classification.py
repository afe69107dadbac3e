"""Accuracy and F1 of a classifier on labelled documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ingot.base.reports import Metric
from ingot.config.sections.evaluation import ClassificationTask
from ingot.data.batches.rows import Rows
from ingot.data.batches.samples import Samples
from ingot.data.columns.manifest import PreparedData
from ingot.evaluate.distribute import Floats, sum_over_ranks
from ingot.evaluate.loss import score_samples
from ingot.evaluate.metrics import Statistic, bootstrap_interval, mean_metric
from ingot.evaluate.subject import EvalModel, EvalModelInfo, TaskResult
from ingot.evaluate.tasks.loss import comparison_set, open_held_out
from ingot.models.native.head import LogitsView

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class OpenClassificationTask:
    """The task with its opened rows."""

    name: str
    labels: Sequence[str]
    rows: Samples
    prepared: PreparedData
    count: int

    def measure(self, subject: EvalModel) -> TaskResult:
        """Raises Failed if the model gives numbers that are not finite."""
        table = np.zeros((self.count, 3), np.float64)
        reader = _ClassScorer()
        for batch, values in score_samples(subject, self.rows, self.count, self.name, reader.token):
            live = batch.rows >= 0
            found = torch.stack(
                (batch.labels, reader.chosen.cpu(), values.detach().cpu()), dim=1
            ).double()
            table[batch.rows[live].numpy()] = found[live].numpy()
        label, chosen, log_probability = sum_over_ranks(table, subject.mesh).T
        if np.isnan(log_probability).any():
            raise subject.not_finite(self.name)
        return self._report(
            label.astype(np.int64),
            chosen.astype(np.int64),
            log_probability,
            comparison_set(self.prepared.sets["validation"], self.rows, subject.recipe, self.count),
        )

    def _report(
        self, label: Numbers, chosen: Numbers, log_probability: Floats, on: str
    ) -> TaskResult:
        classes = len(self.labels)
        majority = np.full_like(label, np.bincount(label, minlength=classes).argmax())
        accuracy = mean_metric((label == chosen).astype(np.float64), direction="higher", on=on)
        metrics = {
            f"{self.name}/accuracy": accuracy,
            **f1_metrics(self.name, self.labels, label, chosen, on),
        }
        simple = {
            f"{self.name}/accuracy/majority": float((label == majority).mean()),
            f"{self.name}/f1/majority": float(
                macro_f1(counts(label, majority, classes).sum(axis=0))
            ),
        }
        return TaskResult(metrics, self._examples(label, chosen, log_probability), simple)

    def _examples(
        self, label: Numbers, chosen: Numbers, log_probability: Floats
    ) -> list[dict[str, Any]]:
        return [
            {
                "document": number,
                "label": self.labels[right],
                "predicted": self.labels[predicted],
                "log_probability": float(value),
                "correct": bool(right == predicted),
            }
            for number, (right, predicted, value) in enumerate(
                zip(label, chosen, log_probability, strict=True)
            )
        ]


class _ClassScorer:
    """Per-token function of the head: the log-probability of each row's label; keeps the predicted
    class.
    """

    chosen: Tensor

    def token(self, view: LogitsView, labels: Tensor, extras: Tensor | None) -> Tensor:
        self.chosen = view.logits().argmax(-1)
        return view.log_probability(labels)


def open_classification(
    task: ClassificationTask, info: EvalModelInfo, max_documents: int | None = None
) -> OpenClassificationTask:
    """Raises WrongInput when the model is no classifier, or there are no labelled rows."""
    info.require_kind(f"evaluate.tasks, {task.name}: classification", *task.model_kinds)
    prepared, rows = open_held_out(info.recipe, info.where, info.positions)
    assert not isinstance(rows, Rows)
    return OpenClassificationTask(
        task.name, info.recipe.labels, rows, prepared, min(len(rows), max_documents or len(rows))
    )


def counts(label: Numbers, chosen: Numbers, classes: int) -> Floats:
    """True positives, false positives and false negatives of each class for each document, [N, 3 *
    classes].
    """
    right, predicted = (np.eye(classes)[numbers] for numbers in (label, chosen))
    return np.concatenate(
        (right * predicted, predicted * (1 - right), right * (1 - predicted)), axis=1
    )


def class_f1(sums: Floats) -> Floats:
    """F1 of each class `[..., classes]` from sums of `counts`; NaN for a class that neither occurs
    nor was predicted.
    """
    hits, wrong, missed = np.split(sums, 3, axis=-1)
    both = 2 * hits + wrong + missed
    return np.divide(2 * hits, both, out=np.full_like(both, np.nan), where=both > 0)


def macro_f1(sums: Floats) -> Floats:
    """The unweighted mean over the classes that occur or were predicted, as scikit-learn's
    `f1_score(average="macro")`.
    """
    scores = class_f1(sums)
    occurring = ~np.isnan(scores)
    mean: Floats = np.where(occurring, scores, 0.0).sum(axis=-1) / occurring.sum(axis=-1)
    return mean


def f1_metrics(
    task: str, labels: Sequence[str], label: Numbers, chosen: Numbers, on: str
) -> dict[str, Metric]:
    """`TASK/f1`, the mean over classes, and if there are few classes `TASK/f1_LABEL` for each that
    occurs or was predicted; intervals resample documents.
    """
    units = counts(label, chosen, len(labels))

    def metric(statistic: Statistic) -> Metric:
        return Metric(
            float(statistic(units.sum(axis=0))),
            *bootstrap_interval(units, statistic),
            direction="higher",
            n=len(label),
            set_fingerprint=on,
        )

    found = {f"{task}/f1": metric(macro_f1)}
    if len(labels) <= ClassificationTask.most_classes:
        for number in np.flatnonzero(~np.isnan(class_f1(units.sum(axis=0)))).tolist():
            found[f"{task}/f1_{labels[number]}"] = metric(partial(_one_f1, number))
    return found


def _one_f1(number: int, sums: Floats) -> Floats:
    score: Floats = class_f1(sums)[..., number]
    return score
