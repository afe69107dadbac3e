"""Old log-probabilities that the trainer computes itself: what they hide is measured, they survive a
kill, and every layout has the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ingot.base.environment import Ranks
from ingot.config.recipe import Recipe
from ingot.config.sections.grpo import GRPOSettings
from ingot.models.native.config import DecoderConfig
from ingot.models.native.decoder import Decoder
from ingot.objectives.grpo import GRPO
from ingot.objectives.protocol import ObjectiveInputs
from ingot.parallel.mesh import Mesh
from ingot.train.rollout import sampling
from ingot.train.rollout.answers import RolloutAnswers, make_batches
from ingot.train.rollout.scored import mismatch, with_recomputed
from ingot.train.trainer import train
from tests import tolerances
from tests.patience import PATIENCE_S
from tests.ranks import run_ranks
from tests.train.rollout.digits import apart, digits_recipe, odd_known
from tests.train.rollout.test_batches import of_rewards, prompts
from tests.train.rollout.test_layouts import KL, LAYOUTS, UNEVEN, on_ranks, same_as
from tests.train.rollout.test_rollout import logged, weights
from tests.train.stopping import train_until
from tests.train.test_step import CONFIG

RECOMPUTED = {"old_logprobs": "recomputed"}


def sampler_of_temperature(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sampler that does not do as it is told."""
    original = sampling.PolicySampler

    def sampler(model: Any, **given: Any) -> Any:
        return original(model, **{**given, "temperature": temperature})

    monkeypatch.setattr(sampling, "PolicySampler", sampler)


def test_the_mismatch_is_that_of_the_tokens_that_are_trained() -> None:
    """Ratios 1, 4 and 1/2; neither what stands behind an answer counts, nor an answer left out."""
    ratios = np.array([[1.0, 4.0, 1e9], [0.5, 1e9, 1e9], [1e9, 1e9, 1e9]])
    some = np.zeros(3, np.float32)
    answers = RolloutAnswers(
        prompts=np.zeros(1, np.int64),
        ids=np.zeros((3, 3), np.int64),
        lengths=np.array([2, 1, 3]),
        logprobs=np.zeros((3, 3), np.float32),
        old=np.log(ratios).astype(np.float32),
        finished=some > 0,
        rewards=some.astype(np.float64),
        each=some[:, None].astype(np.float64),
    )
    found = mismatch(answers, np.array([0, 1]), cap=2.0)
    assert found == {
        "sampler/ratio": pytest.approx(5.5 / 3),
        "sampler/ratio_error": pytest.approx(3.5 / 3),
        "sampler/ratio_error_max": pytest.approx(3),
        "sampler/truncated": pytest.approx(1 / 3),
        "sampler/kl": pytest.approx((0 + 3 - np.log(4) - 0.5 + np.log(2)) / 3),
    }
    assert mismatch(answers, np.array([], np.int64), cap=2.0) == {}


def test_they_are_computed_in_evaluation_mode_and_training_goes_on_in_its_own() -> None:
    """In the other one a mixture would balance the load of its experts no more."""
    settings = GRPOSettings(kind="grpo", group=2, max_answer_tokens=1, rewards=[{"kind": "exact"}])
    model, modes = Decoder(DecoderConfig.from_hf(CONFIG)).train(), list[bool]()
    model.register_forward_pre_hook(lambda module, _: modes.append(module.training))
    alone, answers = Mesh(Ranks(), torch.device("cpu")), of_rewards(np.array([[0.0, 1.0]]))
    batches = make_batches(answers, settings, prompts, 16, 2, alone)
    with_recomputed(answers, batches, model, GRPO(settings, ObjectiveInputs()), "fp32", alone)
    assert modes == [False]
    assert model.training


def test_what_was_killed_goes_on_with_the_trainers_own(
    ready: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint of step 2 lies inside of a rollout, and the weights that its old
    log-probabilities come from are gone. The sampler has another temperature, so that its own are
    none that could stand in for them; the trainer's is part of what is recomputed.
    """
    sampler_of_temperature(0.5, monkeypatch)
    given = {**RECOMPUTED, "updates": 3, "temperature": 0.7}
    knobs: dict[str, Any] = {"train__steps": 4, "checkpoint__every": 2, "track__every": 1}
    whole, broken = (apart(ready, tmp_path / name, given, **knobs) for name in ("whole", "broken"))
    train(whole)
    errors = logged(whole, "train/policy/ratio_error")
    assert max(errors[::3]) < tolerances.FIRST_RATIO < 0.01 * min(errors[1:3])
    assert min(logged(whole, "sampler/ratio_error")) > 0.02
    train_until(3, broken)
    train(broken)
    found, wanted = weights(broken), weights(whole)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    for key in ("train/policy/ratio_error", "sampler/kl"):
        assert logged(broken, key) == logged(whole, key)


@pytest.mark.parametrize("old", ["sampler", "recomputed"])
def test_a_sampler_of_another_temperature_is_seen(
    old: str, ready: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ratio sees it, but where old log-probabilities are recomputed: there it is measured
    apart.
    """
    sampler_of_temperature(0.5, monkeypatch)
    recipe = apart(ready, tmp_path, {"old_logprobs": old}, train__steps=1, track__every=1)
    train(recipe)
    (error,) = logged(recipe, "train/policy/ratio_error")
    assert (error > 0.02) == (old == "sampler")
    assert [one > 0.02 for one in logged(recipe, "sampler/ratio_error")] == [True] * (
        old == "recomputed"
    )


@pytest.fixture(scope="module")
def alone(ready: Path, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    with odd_known():
        root = tmp_path_factory.mktemp("alone") / "root"
        recipe = apart(ready, root, {**KL, **RECOMPUTED}, **UNEVEN)
        train(recipe)
    return recipe


@pytest.mark.drawn("layouts of a training on rewards")
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_recomputes_the_same(
    name: str, ready: Path, alone: Recipe, tmp_path: Path
) -> None:
    count, layout = LAYOUTS[name]
    knobs = {**UNEVEN, **layout}
    given = {**KL, **RECOMPUTED}
    run_ranks(count, on_ranks, str(ready), str(tmp_path), given, knobs, timeout_s=PATIENCE_S)
    found = digits_recipe(tmp_path, given, **UNEVEN)
    same_as(found, alone)
    assert max(logged(found, "sampler/ratio_error_max")) < 10 * tolerances.FIRST_RATIO
