"""Accuracy and F1 against scikit-learn, on numbers that we made up and on a classifier of
transformers.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from ingot.base.errors import Failed, WrongInput
from ingot.config.recipe import Recipe
from ingot.config.sections.evaluation import ClassificationTask
from ingot.data.batches.rows import open_rows
from ingot.data.batches.samples import Samples
from ingot.evaluate.subject import TaskResult
from ingot.evaluate.tasks import check, measure
from ingot.evaluate.tasks.classification import f1_metrics
from ingot.parallel.mesh import running_mesh
from tests import tolerances
from tests.evaluate.small_models import place_model, subject_in
from tests.evaluate.small_runs import LABELS, place, prepared
from tests.ranks import run_ranks

TASK = ClassificationTask(kind="classification")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    return prepared(tmp_path_factory.mktemp("labelled"), "labelled")


def measured(recipe: Recipe, folder: Path | None = None) -> TaskResult:
    with running_mesh() as mesh:
        return measure(TASK, subject_in(folder or recipe.folder.model, recipe, mesh))


@pytest.mark.parametrize("classes", [2, 3, 7])
def test_f1_is_that_of_scikit_learn(classes: int) -> None:
    from sklearn.metrics import f1_score

    generator = np.random.default_rng(classes)
    label, chosen = (
        generator.integers(0, classes, 200),
        np.minimum(generator.integers(0, classes, 200), 4),
    )
    names = [f"c{number}" for number in range(classes)]
    found = f1_metrics("t", names, label, chosen, "set")
    assert found["t/f1"].value == pytest.approx(
        f1_score(label, chosen, average="macro"), rel=tolerances.EXACT
    )
    for name, value in zip(
        names, f1_score(label, chosen, average=None, zero_division=0), strict=True
    ):
        assert found[f"t/f1_{name}"].value == pytest.approx(value, rel=tolerances.EXACT)
    for metric in found.values():
        # A class that never was predicted has an F1 of 0 in every draw, hence no interval.
        assert (metric.interval is None) == (metric.value == 0)
        assert metric.interval is None or metric.ci_low <= metric.value <= metric.ci_high
    assert found["t/f1"].ci_low < found["t/f1"].value < found["t/f1"].ci_high


def test_classes_that_nobody_has_do_not_count() -> None:
    from sklearn.metrics import f1_score

    label, chosen = np.array([0, 0, 2, 2]), np.array([0, 2, 2, 2])
    found = f1_metrics("t", ["a", "b", "c"], label, chosen, "set")
    assert found["t/f1"].value == pytest.approx(
        f1_score(label, chosen, average="macro"), rel=tolerances.EXACT
    )
    assert set(found) == {"t/f1", "t/f1_a", "t/f1_c"}
    many = f1_metrics(
        "t",
        [str(number) for number in range(ClassificationTask.most_classes + 1)],
        label,
        chosen,
        "set",
    )
    assert set(many) == {"t/f1"}


def test_the_interval_of_f1_covers_the_truth_as_often_as_it_says() -> None:
    """Classes and errors with known rates: the F1 of infinitely many documents is known, too."""
    generator, hits = np.random.default_rng(0), 0
    truth = np.mean([2 * 0.63 / (2 * 0.63 + 0.07 + 0.09), 2 * 0.21 / (2 * 0.21 + 0.09 + 0.07)])
    for _ in range(100):
        label = (generator.random(150) < 0.3).astype(np.int64)
        wrong = generator.random(150) < np.where(label == 1, 0.3, 0.1)
        metric = f1_metrics("t", ["a", "b"], label, np.where(wrong, 1 - label, label), "set")[
            "t/f1"
        ]
        hits += metric.ci_low <= truth <= metric.ci_high
    assert 88 <= hits <= 100


@torch.no_grad()
def test_a_classifier_as_transformers_has_it(recipe: Recipe) -> None:
    from sklearn.metrics import accuracy_score, f1_score
    from transformers import AutoModelForSequenceClassification

    rows = open_rows(recipe.folder.columns, "validation", 48, pack="none", pad_last=True)
    assert isinstance(rows, Samples)
    reference = AutoModelForSequenceClassification.from_pretrained(recipe.folder.model)
    label, chosen, log_probability = [], [], []
    for number in range(len(rows)):
        fields = rows.fields([number])
        logits = (
            reference(input_ids=torch.from_numpy(fields.tokens[fields.segments == 1])[None])
            .logits[0]
            .double()
        )
        label.append(int(fields.labels[0]))
        chosen.append(int(logits.argmax()))
        log_probability.append(float(logits.log_softmax(-1)[label[-1]]))
    found = measured(recipe)
    assert [example["label"] for example in found.examples] == [LABELS[number] for number in label]
    assert [example["predicted"] for example in found.examples] == [
        LABELS[number] for number in chosen
    ]
    assert [example["log_probability"] for example in found.examples] == pytest.approx(
        log_probability, abs=tolerances.LOGPROB
    )
    assert found.metrics["classification/accuracy"].value == pytest.approx(
        accuracy_score(label, chosen)
    )
    assert found.metrics["classification/f1"].value == pytest.approx(
        f1_score(label, chosen, average="macro")
    )
    majority = [max(set(label), key=label.count)] * len(label)
    assert found.baselines["classification/accuracy/majority"] == pytest.approx(
        accuracy_score(label, majority)
    )
    assert found.baselines["classification/f1/majority"] == pytest.approx(
        f1_score(label, majority, average="macro")
    )


@pytest.mark.drawn("an evaluation by two ranks")
def test_two_ranks_find_what_one_does(recipe: Recipe, tmp_path: Path) -> None:
    place(recipe, tmp_path / "other", seed=8)
    alone = measured(recipe, tmp_path / "other")
    for other in run_ranks(2, measured, recipe, tmp_path / "other"):
        assert other.metrics == alone.metrics
        assert other.baselines == alone.baselines
        assert [example["predicted"] for example in other.examples] == [
            example["predicted"] for example in alone.examples
        ]


def test_what_is_no_classifier_is_refused(recipe: Recipe, tmp_path: Path) -> None:
    place_model(recipe, tmp_path / "decoder")
    with (
        running_mesh() as mesh,
        pytest.raises(WrongInput, match="classification is for models of kind encoder"),
    ):
        check(TASK, subject_in(tmp_path / "decoder", recipe, mesh))


def test_numbers_that_are_not_finite_are_no_class(recipe: Recipe) -> None:
    with running_mesh() as mesh:
        subject = subject_in(recipe.folder.model, recipe, mesh)
        next(subject.model.parameters()).data.fill_(float("nan"))
        with pytest.raises(Failed, match="not finite"):
            measure(TASK, subject)
