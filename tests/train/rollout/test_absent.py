"""Rewards that judge nothing: a few prompts may be to blame and are counted; else the training ends,
and keeps its steps.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch

from ingot.checkpoints.store import committed
from ingot.config.recipe import Recipe
from ingot.data.batches.prompts import PromptReader
from ingot.data.batches.rows import Rows
from ingot.parallel.mesh import running_mesh
from ingot.train.rollout import sampling
from ingot.train.rollout.sampling import RewardAbsent
from ingot.train.setup import make_setup
from ingot.train.trainer import train
from tests.ranks import run_ranks
from tests.train.rollout.digits import OBJECTIVE, Odd, apart, digits_recipe, odd_known
from tests.train.rollout.test_rollout import logged, told, weights

EVERY = {f"{one} {other}" for one in range(10) for other in range(10)}
"""All prompts."""


@pytest.mark.drawn("an absent reward", keep=3)
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_reward_whose_server_is_gone_ends_the_attempt(
    staleness: int, ready: Path, tmp_path: Path
) -> None:
    """Others would be trained on without it."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and does not listen
        gone = {"kind": "http", "url": f"http://127.0.0.1:{bound.getsockname()[1]}", "retries": 0}
        rewards = [*OBJECTIVE["rewards"], gone]
        recipe = apart(ready, tmp_path, {"rewards": rewards, "staleness": staleness})
        for _ in range(2):  # no attempt goes further than the one before, or all would to the end
            with pytest.raises(RewardAbsent, match=r"http judged .* \(.*not answer") as absent:
                train(recipe)
            assert absent.value.step == 1
            assert [one.step for one in committed(recipe.folder.checkpoints)] == [1]
    assert not recipe.folder.model.exists()


@pytest.mark.drawn("an absent reward", keep=3)
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_reward_that_judged_nothing_ends_a_training_of_few_prompts(
    staleness: int, ready: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has fewer than are counted before a reward is absent."""
    knobs = {"train__steps": 3, "train__global_batch": 4, "checkpoint__every": 1}
    recipe = apart(ready, tmp_path, {"staleness": staleness}, **knobs)
    with monkeypatch.context() as patch:
        patch.setattr(Odd, "unjudged", EVERY)
        for _ in range(2):
            with pytest.raises(RewardAbsent, match="other judged no answer of the whole") as absent:
                train(recipe)
            assert absent.value.step == 2
    assert not recipe.folder.model.exists()
    train(recipe)
    assert recipe.folder.model.exists()


@pytest.mark.drawn("an absent reward", keep=3)
@pytest.mark.parametrize("staleness", [0, 1])
def test_early_stopping_waits_for_a_reward_that_judged_nothing(
    staleness: int, ready: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would end the training at its second step, with answers to two prompts."""
    knobs = {"train__steps": 6, "train__global_batch": 4, "train__evaluate_every": 1}
    stop = {"metric": "loss", "patience": 1, "min_delta": 1e9}
    recipe = apart(ready, tmp_path, {"staleness": staleness}, train__early_stop=stop, **knobs)
    with monkeypatch.context() as patch:
        patch.setattr(Odd, "unjudged", EVERY)
        for _ in range(2):
            with pytest.raises(RewardAbsent, match="other judged no answer of the whole") as absent:
                train(recipe)
            assert absent.value.step == 5
        (saved,) = committed(recipe.folder.checkpoints)
        assert (saved.step, saved.commit["finished"]) == (5, False)
    train(recipe)
    assert recipe.folder.model.exists()
    early = apart(ready, tmp_path / "early", train__early_stop=stop, **knobs)
    train(early)
    assert committed(early.folder.checkpoints)[0].step == 2


@pytest.mark.drawn("an absent reward", keep=3)
def test_a_training_that_waited_for_a_reward_ends_by_an_evaluation_after_it(
    ready: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not between two: a checkpoint there would say that it is finished, and who goes on from that
    would end it earlier than who was not interrupted.
    """
    knobs = {"train__steps": 8, "train__global_batch": 4, "train__evaluate_every": 2}
    knobs |= {"checkpoint__every": 1, "checkpoint__keep": 8}
    stop = {"metric": "loss", "patience": 1, "min_delta": 1e9}
    recipe = apart(ready, tmp_path, train__early_stop=stop, **knobs)
    monkeypatch.setattr(Odd, "unjudged", set(prompts_of(recipe, 4)))
    train(recipe)
    finished = {one.step: one.commit["finished"] for one in committed(recipe.folder.checkpoints)}
    assert finished == {1: False, 2: False, 3: False, 4: False, 5: False, 6: True}


def test_the_last_prompts_of_a_training_may_be_to_blame(
    ready: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = apart(ready, tmp_path, train__steps=2)
    monkeypatch.setattr(Odd, "unjudged", set(prompts_of(recipe, 8)[4:]))
    train(recipe)
    assert recipe.folder.model.exists()


def test_prompts_that_a_reward_cannot_judge_end_nothing(
    ready: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step has answers to one prompt alone, and each second one is such a prompt."""
    recipe = apart(ready, tmp_path, train__global_batch=4, train__steps=20, track__every=1)
    monkeypatch.setattr(Odd, "unjudged", set(prompts_of(recipe, 20)[1::2]))
    train(recipe)
    assert logged(recipe, "reward/failed") == [0, 1] * 10


@pytest.mark.drawn("an absent reward", keep=3)
@pytest.mark.parametrize("staleness", [0, 1])
def test_steps_before_a_reward_was_absent_are_kept(
    staleness: int, ready: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command samples the answers that it did not judge anew."""
    monkeypatch.setattr(sampling, "MOST_UNJUDGED", 4)
    given = {"staleness": staleness}
    whole = apart(ready, tmp_path / "whole", given)
    train(whole)
    recipe = apart(ready, tmp_path / "broken", given)
    with monkeypatch.context() as patch:
        patch.setattr(Odd, "unjudged", set(prompts_of(recipe, 16)[8:]))
        with pytest.raises(RewardAbsent):
            train(recipe)
    newest = committed(recipe.folder.checkpoints)[0]
    assert newest.step == 2
    assert not newest.commit["rollout"].get("ahead", {}).get("answers")
    train(recipe)
    assert [line["step"] for line in told(recipe)] == [line["step"] for line in told(whole)]
    if not staleness:  # sampled ahead of older weights, which are gone
        assert all(torch.equal(one, weights(whole)[name]) for name, one in weights(recipe).items())


def prompts_of(recipe: Recipe, count: int) -> list[str]:
    """The texts of the first prompts of a training."""
    with running_mesh(recipe.parallel) as mesh:
        setup = make_setup(recipe, mesh)
    assert isinstance(setup.rows, Rows)
    reader = PromptReader(setup.rows, setup.tokenizer)
    return [one.text for one in reader.prompts(setup.order.rows(0, count).tolist())]


def without_a_reward_on_one_rank(ready: str, target: str) -> int:
    """The step at which it ends when it was started for the second time."""
    with odd_known(), pytest.MonkeyPatch.context() as patch:
        recipe = apart(Path(ready), Path(target))
        if os.environ["RANK"] == "1":
            patch.setattr(Odd, "unjudged", EVERY)
        for _ in range(2):
            with pytest.raises(RewardAbsent) as absent:
                train(recipe)
    return absent.value.step


def test_all_ranks_keep_their_steps_where_a_reward_is_absent_on_one(
    ready: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each set has two prompts for either. In another layout every rank is the one."""
    steps = run_ranks(2, without_a_reward_on_one_rank, str(ready), str(tmp_path))
    assert steps == [3, 3]
    recipe = digits_recipe(tmp_path)
    assert [one.step for one in committed(recipe.folder.checkpoints)] == [3]
    monkeypatch.setattr(Odd, "unjudged", EVERY)
    with pytest.raises(RewardAbsent) as absent:
        train(recipe)
    assert absent.value.step == 3
