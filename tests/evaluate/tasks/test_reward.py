"""Rewards of a model's answers to held-out prompts, against its own greedy completions."""

from __future__ import annotations

from typing import Any

import pytest

from ingot.base.errors import WrongInput
from ingot.config.recipe import Recipe
from ingot.config.sections.evaluation import RewardTask
from ingot.evaluate.subject import TaskResult
from ingot.evaluate.tasks import measure
from ingot.models.generation.generator import Generator
from ingot.models.generation.request import Request
from ingot.parallel.mesh import running_mesh
from ingot.tokenizers.load import load_tokenizer
from tests.evaluate.small_models import subject_in
from tests.evaluate.small_runs import prepared


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    return prepared(tmp_path_factory.mktemp("chat"), "chat")


def measured(recipe: Recipe, **knobs: Any) -> TaskResult:
    task = RewardTask.model_validate({"kind": "reward", **knobs})
    with running_mesh() as mesh:
        return measure(task, subject_in(recipe.folder.model, recipe, mesh))


def test_the_answers_are_the_models_own_and_judged(recipe: Recipe) -> None:
    """The most likely answer to each prompt, and whether it ended by itself."""
    found = measured(
        recipe,
        rewards=[{"kind": "exact"}, {"kind": "numeric", "name": "number", "weight": 2.0}],
        max_tokens=6,
        limit=3,
    )
    assert {"reward/mean", "reward/exact", "reward/number", "reward/finished"} == set(found.metrics)
    assert found.metrics["reward/mean"].direction == "higher"
    tokenizer = load_tokenizer(recipe.folder.tokenizer)
    assert len(found.examples) == 3
    with running_mesh() as mesh:
        subject = subject_in(recipe.folder.model, recipe, mesh)
        generator = Generator(subject.decoder, eos=subject.eos, decode=tokenizer.decode)
        for example in found.examples:
            prompt = tokenizer.encode_chat([{"role": "user", "content": example["prompt"]}])
            (own,) = generator.run([Request(prompt, 6)])
            assert example["answer"] == own.text
            assert example["finished"] == (own.finish == "stop")


def test_a_recipe_without_rewards_must_name_them(recipe: Recipe) -> None:
    with pytest.raises(WrongInput, match="there is no reward"):
        measured(recipe)


def test_a_prompt_must_leave_room(recipe: Recipe) -> None:
    with pytest.raises(WrongInput, match="positions"):
        measured(recipe, rewards=[{"kind": "exact"}], max_tokens=100_000)
