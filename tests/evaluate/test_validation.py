"""Tasks and the objective on a model in training: the same numbers as from a folder, on every rank,
and nothing of the model changed.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot.base.environment import Ranks
from ingot.base.errors import WrongInput
from ingot.config.recipe import Recipe
from ingot.config.sections.layout import Parallel
from ingot.config.sections.training import SGD
from ingot.data.batches.rows import open_rows
from ingot.data.ingest import ingest
from ingot.data.prepare import prepare
from ingot.evaluate.generation import _completions, complete_prompts
from ingot.evaluate.loss import score_rows
from ingot.evaluate.tasks import open_task
from ingot.evaluate.validation import MetricValues, TaskEvaluator, validation_losses
from ingot.models.generation.generator import Generator
from ingot.models.generation.request import Request
from ingot.models.native.config import DecoderConfig
from ingot.models.spec import ModelSpec, create_model, materialize_model
from ingot.objectives.cross_entropy import CrossEntropy
from ingot.parallel.apply import (
    WrapSettings,
    apply_wrappers,
    evaluating,
    finish_wrapping,
    make_masters,
)
from ingot.parallel.mesh import Mesh, running_mesh
from ingot.train.optim.optimizers import make_optimizer
from tests import tolerances
from tests.evaluate.small_models import hellaswag_lines, subject_in, with_model, write_lines
from tests.evaluate.small_runs import place, prepared, recipe_of, records
from tests.parallel.wrapped_run import MODEL
from tests.ranks import run_ranks
from tests.small import small_recipe
from tests.train.stepping import one_step
from tests.train.test_step import global_batch, rows_of


def watched(recipe: Recipe, names: list[str]) -> MetricValues:
    """Measured twice, in the midst of training, where the model is wrapped."""
    with running_mesh() as mesh:
        subject = subject_in(recipe.folder.model, recipe, mesh)
        subject.model.train()
        finish_wrapping(subject.model, mesh)
        watch = TaskEvaluator(subject, names)
        with evaluating(subject.model):
            assert not any(module.training for module in subject.model.modules())
            first, second = watch(), watch()
        assert first == second
        assert subject.model.training
        assert all(parameter.grad is None for parameter in subject.model.parameters())
        return first


def test_why_a_task_does_not_tell_a_tracked_metric_is_told(tmp_path: Path) -> None:
    write_lines(tmp_path / "rated.jsonl", [one | {"label": True} for one in records("rated")])

    def tracking(metric: str) -> Recipe:
        knobs = {"train__evaluate_every": 2, "train__evaluate_tasks": ["loss"]}
        return recipe_of(tmp_path, "rated", **knobs, checkpoint__best=metric)

    recipe = tracking("loss/perplexity")
    ingest(recipe)
    prepare(recipe)
    place(recipe, recipe.folder.model)
    assert "loss/perplexity" in watched(recipe, ["loss"])
    with pytest.raises(WrongInput, match=r"best loss/accuracy is not measured: all of the .* good"):
        watched(tracking("loss/accuracy"), ["loss"])


def test_named_tasks_on_the_first_rows(root: Path, tmp_path: Path) -> None:
    items = write_lines(tmp_path / "items.jsonl", hellaswag_lines(4))
    tasks = (
        f"[{{kind: loss, name: held}}, {{kind: hellaswag, source: {items}}}, {{kind: loss, name:"
        " other}]"
    )
    recipe = with_model(
        root,
        evaluate__tasks=tasks,
        train__evaluate_every=2,
        train__evaluate_rows=4,
        train__evaluate_tasks="[held, hellaswag]",
    )
    found = watched(recipe, recipe.train.evaluate_tasks)
    assert set(found) == {
        "held/loss",
        "held/perplexity",
        "held/bits_per_byte",
        "hellaswag/accuracy",
        "hellaswag/accuracy_norm",
    }
    assert found["held/bits_per_byte"][1] == "lower"
    assert found["hellaswag/accuracy_norm"][1] == "higher"
    with running_mesh() as mesh:
        subject = subject_in(recipe.folder.model, recipe, mesh)
        alone = open_task(recipe.tasks[0], subject.info, 4).measure(subject).metrics
        everything = open_task(recipe.tasks[0], subject.info).measure(subject).metrics
    assert found["held/loss"][0] == alone["held/loss"].value != everything["held/loss"].value
    for other in run_ranks(2, watched, recipe, ["held", "hellaswag"]):
        assert {key: value for key, (value, _) in other.items()} == pytest.approx(
            {key: value for key, (value, _) in found.items()}, rel=tolerances.SPLIT_LOSS
        )


def test_what_cannot_be_measured_is_refused_before_the_first_step(
    root: Path, tmp_path: Path
) -> None:
    recipe = with_model(
        root,
        evaluate__tasks=f"[{{kind: loss}}, {{kind: hellaswag, source: {tmp_path / 'none.jsonl'}}}]",
    )
    with pytest.raises(WrongInput, match="no such file"):
        watched(recipe, ["hellaswag"])
    assert "loss/loss" in watched(recipe, ["loss"])


def steps_beside_one_without_memory(recipe: Recipe) -> int:
    """The decoding steps of a rank, of two that work in step, and of which the second has no memory
    left for a long prompt beside a short one.
    """
    steps = 0

    class Counted(Generator):
        def step(self) -> Any:
            nonlocal steps
            steps += 1
            return super().step()

    with running_mesh() as mesh, pytest.MonkeyPatch.context() as patch:
        patch.setattr("ingot.evaluate.generation.Generator", Counted)
        patch.setattr("ingot.models.generation.generator.SMALL_GROWTH", 0)
        patch.setattr("ingot.models.generation.cache.SHORT_LENGTH", 32)
        patch.setattr(
            "ingot.models.generation.generator.free_memory", lambda device: (2**60, 0)[mesh.rank]
        )
        subject = subject_in(recipe.folder.model, recipe, Mesh(Ranks(), mesh.device))
        subject = replace(subject, eos=frozenset(), job=mesh, in_step=True)
        _completions(subject, [Request([3], 6), Request([4], 2), Request([5] * 40, 4)])
    return steps


def test_ranks_in_step_take_a_prompt_when_all_have_room(root: Path) -> None:
    """Else one would wait in a forward pass that the other never comes to."""
    recipe = with_model(root, evaluate__micro_batch=2)
    assert run_ranks(2, steps_beside_one_without_memory, recipe) == [8, 8]


def objective_of(recipe: Recipe, count: int) -> dict[str, float]:
    rows = open_rows(
        recipe.folder.columns,
        "validation",
        recipe.data.seq_len,
        pack=recipe.held_out_row_plan,
        pad_last=True,
        target_len=recipe.data.target_len,
    )
    with running_mesh() as mesh:
        model = subject_in(recipe.folder.model, recipe, mesh).model
        return validation_losses(model, CrossEntropy(), rows, count, 2, "fp32", mesh)


def test_the_objective_on_held_out_rows(root: Path) -> None:
    recipe = with_model(root)
    found = objective_of(recipe, 5)
    with running_mesh() as mesh:
        rows = open_rows(recipe.folder.columns, "validation", recipe.data.seq_len, pad_last=True)
        scored = score_rows(
            subject_in(recipe.folder.model, recipe, mesh).model, rows, 5, 3, "fp32", mesh
        )
    expected = scored.nll.sum() / scored.targets.sum()
    assert found == {"loss": pytest.approx(expected, rel=tolerances.LOSS_FP32)}
    for other in run_ranks(2, objective_of, recipe, 5):
        assert other == pytest.approx(found, rel=tolerances.SPLIT_LOSS)
    # Of two rows, one of three ranks has nothing, and adds nothing.
    two = objective_of(recipe, 2)
    assert (
        run_ranks(3, objective_of, recipe, 2) == [pytest.approx(two, rel=tolerances.SPLIT_LOSS)] * 3
    )


@pytest.mark.parametrize("documents", ["chat", "pair"])
def test_samples_of_a_model_in_training(documents: str, tmp_path: Path) -> None:
    recipe = prepared(tmp_path, documents, evaluate__sample_tokens=4)
    with (
        running_mesh() as mesh,
        evaluating((subject := subject_in(recipe.folder.model, recipe, mesh)).model),
    ):
        found: list[dict[str, Any]] = complete_prompts(subject, ["the ingot", "copper"])
        with torch.no_grad():
            assert complete_prompts(subject, []) == []
    assert [sample["prompt"] for sample in found] == ["the ingot", "copper"]
    assert all(isinstance(sample["completion"], str) for sample in found)
    assert found[0]["completion"]


def test_samples_are_drawn_from_the_seed(root: Path) -> None:
    """The same ones each time; other ones with another seed, and the likeliest tokens at 0."""

    def drawn(**knobs: Any) -> str:
        recipe = with_model(root, evaluate__sample_tokens=24, **knobs)
        with running_mesh() as mesh:
            subject = subject_in(recipe.folder.model, recipe, mesh)
            return complete_prompts(subject, ["the ingot"])[0]["completion"]

    greedy, once = drawn(seed=1), drawn(seed=1, evaluate__temperature=1.5)
    assert drawn(seed=1, evaluate__temperature=1.5) == once
    assert drawn(seed=2, evaluate__temperature=1.5) != once
    assert drawn(seed=2) == greedy != once


def judged(recipe: Recipe, axes: dict[str, Any], count: int) -> list[float]:
    """The loss on held-out rows before and after a step of training."""
    parallel, config = Parallel(**axes), {**MODEL, "vocab_size": 320}
    with running_mesh(parallel) as mesh:
        model_spec, how = (
            ModelSpec("decoder", DecoderConfig.from_hf(config), None, True),
            WrapSettings(parallel),
        )
        model = apply_wrappers(create_model(model_spec, 0), mesh, how)
        materialize_model(model, model_spec, 0, mesh.device, filled=True)
        masters = make_masters(model, mesh, how)
        module, optimizer = (
            finish_wrapping(model.train(), mesh),
            make_optimizer(SGD(kind="sgd", lr=1.0), masters),
        )
        rows = open_rows(
            recipe.folder.columns,
            "validation",
            recipe.data.seq_len,
            pack=recipe.held_out_row_plan,
            pad_last=True,
        )
        whole, share, losses = global_batch(0), 8 // mesh.data.world, []
        for _ in range(2):
            with evaluating(model):
                losses.append(
                    validation_losses(model, CrossEntropy(), rows, count, 2, "fp32", mesh)["loss"]
                )
            batches = rows_of(whole, mesh.data.rank * share, share, 2)
            one_step(module, CrossEntropy(), batches, masters, optimizer, mesh)
        return losses


def judged_in(recipe: Recipe, layouts: list[dict[str, Any]], count: int) -> list[list[float]]:
    with running_mesh():
        return [judged(recipe, axes, count) for axes in layouts]


LOOPED = {"pipeline": 2, "virtual": 2}
ZERO_BUBBLE = {**LOOPED, "schedule": "zero_bubble"}


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("world", "layouts"),
    [
        (2, [{"pipeline": 2}, LOOPED, ZERO_BUBBLE]),
        (
            4,
            [
                {"pipeline": 4},
                {**ZERO_BUBBLE, "shard": 2, "reshard": False},
                *({"pipeline": 2, axis: 2} for axis in ("shard", "tensor", "context")),
            ],
        ),
    ],
)
def test_evaluation_goes_through_the_same_stages(
    world: int, layouts: list[dict[str, Any]], root: Path
) -> None:
    """Of a few rows, which do not fill the pipeline, and of more than go through it at once."""
    recipe = small_recipe(root)
    for count in (5, 19) if world == 2 else (5,):
        before, after = judged(recipe, {}, count)
        assert abs(before - after) > 100 * tolerances.SPLIT_LOSS
        for losses in run_ranks(world, judged_in, recipe, layouts, count):
            assert losses == [pytest.approx([before, after], rel=tolerances.SPLIT_LOSS)] * len(
                layouts
            )
