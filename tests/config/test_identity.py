"""What a training is told by, and what its values are measured on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ingot.config.identity import changes, content_identity, measured_with, stops_by_held_out
from ingot.config.recipe import Recipe
from ingot.pipeline.incremental import step_inputs
from ingot.pipeline.steps import step_named
from tests.small import small_recipe


@pytest.fixture
def items(tmp_path: Path) -> Path:
    path = tmp_path / "items.jsonl"
    write(path, answer=0)
    return path


def write(path: Path, answer: int) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"question": "a", "choices": ["b", "c"], "answer": answer}) + "\n")


def quizzed(root: Path, items: Path | str, **knobs: Any) -> Recipe:
    tasks = [{"kind": "choice", "name": "quiz", "source": str(items)}, {"kind": "loss"}]
    return small_recipe(root, evaluate__tasks=tasks, **knobs)


def stopped_by(metric: str) -> dict[str, Any]:
    return {
        "train__early_stop": f"{{metric: {metric}}}",
        "train__evaluate_every": 2,
        "train__evaluate_tasks": ["quiz"],
    }


def test_values_on_other_items_do_not_compare(tmp_path: Path, items: Path) -> None:
    """Held-out documents are no part of a task with items of its own."""
    recipe = quizzed(tmp_path, items)
    before = measured_with(recipe, "quiz/accuracy", "held out")
    assert measured_with(recipe, "quiz/accuracy", "others") == before
    for metric in ("loss", "loss/perplexity"):
        documents = (measured_with(recipe, metric, name) for name in ("these", "those"))
        assert changes(*documents) == ["the held-out data these -> those"]
    write(items, answer=1)
    (told,) = changes(before, measured_with(recipe, "quiz/accuracy", "held out"))
    assert told.startswith(f"evaluate.quiz: what stands in {items} ")


def test_what_is_hidden_beside_items_is_none_of_them(tmp_path: Path) -> None:
    """Finder and Jupyter leave it there, and no task reads it."""
    write(shown := tmp_path / "items" / "a.jsonl", answer=0)
    recipes = [quizzed(tmp_path, source) for source in (shown.parent, shown.parent / "*", shown)]
    for number, recipe in enumerate(recipes):
        before = measured_with(recipe, "quiz/accuracy", "held out")
        assert f"evaluate.quiz: what stands in {shown}" in before
        for name in (".DS_Store", ".ipynb_checkpoints/a.jsonl"):
            write(shown.parent / name, answer=number)
        assert measured_with(recipe, "quiz/accuracy", "held out") == before


@pytest.mark.parametrize("source", ["{}", "file://{}"])
def test_items_that_are_named_are_fingerprinted(source: str, tmp_path: Path) -> None:
    write(hidden := tmp_path / ".items.jsonl", answer=0)
    recipe = quizzed(tmp_path, source.format(hidden))
    before = measured_with(recipe, "quiz/accuracy", "held out")
    write(hidden, answer=1)
    assert changes(before, measured_with(recipe, "quiz/accuracy", "held out"))


def test_values_of_an_edited_judge_do_not_compare(tmp_path: Path) -> None:
    judge = tmp_path / "judge.py"
    reward = {"kind": "python", "function": f"{judge}:score"}
    objective = {"kind": "grpo", "group": 4, "rewards": [reward]}
    recipe = small_recipe(tmp_path, objective=objective)
    found = []
    for text in ("score = len", "score = abs"):
        judge.write_text(text)
        found.append(measured_with(recipe, "reward/mean", "held out"))
    assert found[0]["held_out"] == "held out"
    (told,) = changes(*found)
    assert told.startswith(f"evaluate.reward.rewards: what stands in {judge} ")


def test_no_secret_of_a_reward_stands_in_what_a_training_is_told_by(tmp_path: Path) -> None:
    """Neither of the objective nor of a task; another secret is another training all the same."""

    def told(key: str, verb: str) -> tuple[str, Any]:
        reward = {"kind": "python", "function": "a:b", "arguments": {"api_key": key}}
        objective = {"kind": "grpo", "group": 4, "rewards": [reward]}
        recipe = small_recipe(tmp_path, objective=objective)
        stored = step_inputs(step_named(verb), recipe, {})["knobs"]
        training = content_identity(recipe), measured_with(recipe, "reward/reward", None)
        return json.dumps([stored, training]), (stored, training)

    for verb in ("train", "evaluate"):
        text, first = told("s3cr3t", verb)
        assert "(hidden:" in text
        assert "s3cr3t" not in text
        assert told("s3cr3t", verb)[1] == first
        assert all(now != before for now, before in zip(told("0ther", verb)[1], first, strict=True))


def test_what_can_end_a_training_is_a_part_of_it(tmp_path: Path, items: Path) -> None:
    """Its step of the pipeline runs again for the same, and for nothing else."""
    plain = quizzed(tmp_path, items)
    by_items, by_documents = (
        quizzed(tmp_path, items, **stopped_by(metric)) for metric in ("quiz/accuracy", "loss")
    )
    recipes = (plain, by_items, by_documents)
    assert [stops_by_held_out(recipe) for recipe in recipes] == [False, False, True]
    step = step_named("train")
    assert ["validation" in step.parts(recipe)["prepare"] for recipe in recipes] == [
        *(False, False, True)
    ]
    assert [str(items) in step.folders(recipe) for recipe in recipes] == [False, True, False]
    before = [content_identity(recipe) for recipe in recipes]
    write(items, answer=1)
    after = [content_identity(recipe) for recipe in recipes]
    assert [bool(changes(*pair)) for pair in zip(before, after, strict=True)] == [
        *(False, True, False)
    ]
