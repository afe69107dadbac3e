"""Rewards of a model's answers to held-out prompts, against its own greedy completions."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ingot.base.environment import Ranks
from ingot.base.errors import WrongInput
from ingot.base.reports import Metric
from ingot.config.recipe import Recipe
from ingot.config.sections.reward_task import RewardTask
from ingot.evaluate.subject import NotJudged, TaskResult
from ingot.evaluate.tasks import measure, open_task
from ingot.evaluate.tasks.reward import OpenRewardTask
from ingot.models.generation.generator import Generator
from ingot.models.generation.request import Request
from ingot.parallel.mesh import Mesh, running_mesh
from ingot.tokenizers.load import load_tokenizer
from tests.evaluate.small_models import subject_in
from tests.evaluate.small_runs import prepared
from tests.ranks import run_ranks


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


def judged_in_step(recipe: Recipe, function: str) -> float:
    """The mean where every rank does all items, as those do that share the weights of a model in
    training.
    """
    with running_mesh() as mesh:
        subject = subject_in(recipe.folder.model, recipe, Mesh(Ranks(), mesh.device))
        reward = {"kind": "python", "function": function}
        task = RewardTask.model_validate(
            {"kind": "reward", "rewards": [reward], "max_tokens": 2, "limit": 1}
        )
        return measure(task, replace(subject, job=mesh)).metrics["reward/mean"].value


def test_ranks_that_all_answer_have_it_judged_once(recipe: Recipe, tmp_path: Path) -> None:
    """A judge is paid for each time, and may change its mind."""
    file, calls = tmp_path / "reward.py", tmp_path / "calls"
    file.write_text(
        "def score(sample):\n"
        f"    with open({str(calls)!r}, 'a+') as calls:\n"
        "        return calls.write('x') * calls.tell()\n",
        encoding="utf-8",
    )
    assert run_ranks(2, judged_in_step, recipe, f"{file}:score") == [1.0, 1.0]
    assert calls.read_text() == "x"


def test_a_recipe_without_rewards_must_name_them(recipe: Recipe) -> None:
    with pytest.raises(WrongInput, match="there is no reward"):
        measured(recipe)


def test_a_prompt_must_leave_room(recipe: Recipe) -> None:
    with pytest.raises(WrongInput, match="positions"):
        measured(recipe, rewards=[{"kind": "exact"}], max_tokens=100_000)


def test_a_function_that_was_edited_judges_another_set(recipe: Recipe, tmp_path: Path) -> None:
    """Else a gate compares the values of two functions."""
    file = tmp_path / "reward.py"
    reward = {"kind": "python", "function": f"{file}:score"}

    def found(value: int) -> Metric:
        file.write_text(f"def score(sample):\n    return {value}\n", encoding="utf-8")
        measured_now = measured(recipe, rewards=[reward], max_tokens=2, limit=1)
        return measured_now.metrics["reward/mean"]

    one, other, again = found(1), found(-5), found(1)
    assert (one.value, other.value) == (1, -5)
    assert one.set_fingerprint != other.set_fingerprint
    assert one.set_fingerprint == again.set_fingerprint


# In the answers of these chats there is no number, so that this reward fails on each.
ON_NUMBERS = {"kind": "numeric", "name": "number", "tolerance": 0.0, "on_failure": 1.0}


def measured_where_numbers_are(
    recipe: Recipe,
    numbers: int,
    capsys: pytest.CaptureFixture[str],
    *others: dict[str, Any],
) -> tuple[TaskResult, str]:
    """Of six answers so many have a number as their reference; and what was said of the rest."""
    rewards = [ON_NUMBERS, {"kind": "exact"}, *others]
    task = RewardTask.model_validate(
        {"kind": "reward", "rewards": rewards, "max_tokens": 4, "limit": 6}
    )
    with running_mesh() as mesh:
        subject = subject_in(recipe.folder.model, recipe, mesh)
        opened = open_task(task, subject.info)
        assert isinstance(opened, OpenRewardTask)
        items = [
            replace(item, reference=str(place) if place < numbers else "copper")
            for place, item in enumerate(opened.items)
        ]
        return replace(opened, items=items).measure(subject), capsys.readouterr().err


def test_a_reward_that_fails_on_most_answers_gives_no_figure(
    recipe: Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else a server that is down is a mean of 0, by which a gate decides."""
    with pytest.raises(NotJudged, match=re.escape("number failed on 4 of 6 answers: the referen")):
        measured_where_numbers_are(recipe, 2, capsys)


def test_rewards_may_each_judge_a_part_of_a_mixture(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that judges nothing, such as a server that is down, is no part of it."""
    file = tmp_path / "part.py"
    file.write_text(
        "from ingot.rewards.protocol import RewardFailed\n"
        "def words(sample):\n"
        "    if sample.reference.isdigit():\n"
        "        raise RewardFailed('a number')\n"
        "    return 1.0\n"
        "def nothing(sample):\n"
        "    raise RewardFailed('down')\n",
        encoding="utf-8",
    )
    words, nothing = (
        {"kind": "python", "function": f"{file}:{name}", "name": name}
        for name in ("words", "nothing")
    )
    found, said = measured_where_numbers_are(recipe, 2, capsys, words)
    assert "number failed on 4 of 6" in said
    assert "words failed on 2 of 6" in said
    assert found.metrics["reward/words"].n == 4
    with pytest.raises(NotJudged, match=re.escape("nothing failed on 6 of 6 answers: ")):
        measured_where_numbers_are(recipe, 2, capsys, words, nothing)


def test_where_a_reward_fails_on_some_answers_that_is_told(
    recipe: Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    found, said = measured_where_numbers_are(recipe, 4, capsys)
    assert "warning: reward: reward number failed on 2 of 6 answers: the reference" in said
    assert [example.get("failed") for example in found.examples] == [None] * 4 + ["number"] * 2
    metrics = found.metrics
    assert metrics["reward/failed"].value == pytest.approx(2 / 6)
    assert metrics["reward/mean"].value == pytest.approx(2 / 6), "its on_failure counts"
    assert (metrics["reward/number"].value, metrics["reward/number"].n) == (0, 4)
    whole = metrics["reward/mean"].set_fingerprint
    assert metrics["reward/exact"].set_fingerprint == whole
    assert metrics["reward/number"].set_fingerprint != whole, "it is a mean of fewer answers"
