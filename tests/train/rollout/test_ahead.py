"""Answers that are sampled ahead, in a thread: from the weights that the schedule says, whatever is
faster; and what was killed goes on with the same answers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot.base.errors import Stopped
from ingot.checkpoints.store import committed
from ingot.config.recipe import Recipe
from ingot.models.native.decoder import Decoder
from ingot.train.resume import come_to
from ingot.train.rollout.policy import own_checksum
from ingot.train.rollout.rollout import Rollout
from ingot.train.rollout.sampling import AnswerSampler, SampleTask
from ingot.train.trainer import train
from tests import tolerances
from tests.patience import PATIENCE_S
from tests.ranks import run_ranks
from tests.train.rollout.digits import apart, digits_recipe, odd_known
from tests.train.rollout.test_layouts import KL, UNEVEN, on_ranks, same_as
from tests.train.rollout.test_rollout import logged, told, weights
from tests.train.stopping import asked_to_stop_in, train_until

FAST = {"train__optimizer": "{kind: sgd, lr: 0.5}", "train__schedule": "{kind: constant}"}
AHEAD = {"staleness": 2, "updates": 2}
LONG: dict[str, Any] = {"train__steps": 9, "checkpoint__every": 9, "track__every": 1}


@pytest.fixture(scope="module")
def whole(ready: Path, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    with odd_known():
        recipe = apart(ready, tmp_path_factory.mktemp("whole") / "root", AHEAD, **LONG)
        train(recipe)
    return recipe


@pytest.mark.parametrize("staleness", [1, 2])
def test_answers_are_of_the_weights_that_many_rollouts_before(
    staleness: int, ready: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a checksum of the weights themselves, when a step begins and where answers are sampled.
    Within the first rollouts all are those of the beginning. Training has the kernels of sampling,
    whether anything is sampled at that moment or not.
    """
    begun: list[int] = []
    kernels: list[bool] = []
    before = torch.backends.cuda.cudnn_sdp_enabled()
    sampled: dict[int, int] = {}
    step, sample = Rollout.step, AnswerSampler.sample

    def stepping(self: Rollout, i: int, *given: Any) -> Any:
        assert isinstance(self._state.model, Decoder)
        begun.append(own_checksum(self._state.model))
        kernels.append(torch.backends.cuda.cudnn_sdp_enabled())
        return step(self, i, *given)

    def sampling(
        self: AnswerSampler, model: Decoder, task: SampleTask, meanwhile: Callable[[], bool]
    ) -> Any:
        sampled[task.numbers[0][0] // 4] = own_checksum(model)
        return sample(self, model, task, meanwhile)

    monkeypatch.setattr(Rollout, "step", stepping)
    monkeypatch.setattr(AnswerSampler, "sample", sampling)
    recipe = apart(
        ready, tmp_path, {"staleness": staleness}, train__steps=5, track__every=1, **FAST
    )
    train(recipe)
    assert len(set(begun)) == 5
    assert kernels == [False] * 5
    assert torch.backends.cuda.cudnn_sdp_enabled() == before
    wanted = [max(0, number - staleness) for number in range(5)]
    assert [begun.index(sampled[number]) for number in sorted(sampled)] == wanted
    behind = [number - one for number, one in enumerate(wanted)]
    assert logged(recipe, "rollout/behind") == behind
    moved = logged(recipe, "train/policy/ratio_error")
    assert moved[0] < tolerances.FIRST_RATIO < 0.01 * min(moved[1:])


@pytest.mark.drawn
@pytest.mark.parametrize("every", [3, 4])
def test_what_was_killed_goes_on_with_the_answers_that_were_under_way(
    every: int, ready: Path, whole: Recipe, tmp_path: Path
) -> None:
    """The checkpoint lies inside of a rollout, or between two; two more are ahead, of weights that
    nothing holds any more.
    """
    broken = apart(ready, tmp_path, AHEAD, **{**LONG, "checkpoint__every": every})
    train_until(every + 1, broken)
    newest = next(iter(committed(broken.folder.checkpoints)))
    assert newest.step == every
    waiting = newest.commit["rollout"]["ahead"]
    assert waiting["weights"] == {"2": 0, "3": 1}
    assert set(waiting["answers"]) == set(waiting["weights"])
    train(broken)
    found, wanted = weights(broken), weights(whole)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    for key in ("train/loss", "train/policy/moved", "reward/mean", "rollout/behind"):
        assert logged(broken, key) == logged(whole, key)
    assert told(broken) == told(whole)
    assert logged(whole, "rollout/behind") == [0, 0, 1, 1, 2, 2, 2, 2, 2]
    # Nothing is sampled that nobody would train on.
    last = next(iter(committed(whole.folder.checkpoints)))
    assert last.commit["rollout"]["ahead"] == {"answers": {}, "weights": {}}


def test_a_signal_before_a_rollout_leaves_its_answers(
    ready: Path, whole: Recipe, tmp_path: Path
) -> None:
    """They are there when the ranks agree to stop, and the weights that they come from are gone.
    Rows whose answers are sampled can be left out no more.
    """
    broken = apart(ready, tmp_path, AHEAD, **LONG)
    with pytest.MonkeyPatch.context() as patch:
        asked_to_stop_in(6, patch)
        with pytest.raises(Stopped):
            train(broken)
    newest = committed(broken.folder.checkpoints)[0]
    held = newest.commit["rollout"]
    assert (newest.step, held["number"], sorted(held["ahead"]["answers"])) == (6, 3, ["4"])
    assert come_to(broken, newest) == 5 * 4
    train(broken)
    found, wanted = weights(broken), weights(whole)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert logged(broken, "rollout/behind") == logged(whole, "rollout/behind")
    assert told(broken) == told(whole)


@pytest.mark.drawn("layouts of a training on rewards")
@pytest.mark.parametrize("layout", ["shard", "pipeline", "replicate"])
def test_ranks_sample_ahead_what_one_process_does(layout: str, ready: Path, tmp_path: Path) -> None:
    given = {**KL, "staleness": 1, "old_logprobs": "recomputed"}
    wanted = apart(ready, tmp_path / "one", given, **UNEVEN)
    train(wanted)
    knobs = {**UNEVEN, f"parallel__{layout}": 2}
    run_ranks(2, on_ranks, str(ready), str(tmp_path / "two"), given, knobs, timeout_s=PATIENCE_S)
    found = digits_recipe(tmp_path / "two", given, **UNEVEN)
    same_as(found, wanted)
    errors = logged(found, "sampler/ratio_error")
    assert errors[0] < tolerances.FIRST_RATIO < 0.01 * min(errors[1:])
