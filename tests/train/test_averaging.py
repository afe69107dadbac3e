"""Averages of the weights: the formula, what is measured and exported, resumed and sharded; and
groups and schedules through a whole training.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from ingot.base.errors import Stopped, WrongInput
from ingot.base.runlog import read_lines
from ingot.checkpoints.reader import StoredTensors, WholeWeights
from ingot.checkpoints.store import committed, step_folder
from ingot.config.models.lineage import read_lineage
from ingot.config.recipe import Recipe
from ingot.config.sections.loop import Average
from ingot.config.sections.training import SGD, AdamW
from ingot.train.hooks import SkipHook
from ingot.train.optim.averaging import (
    AVERAGE,
    COUNT,
    AveragedWeights,
    averaged_steps,
    stored_average,
)
from ingot.train.optim.optimizers import make_optimizer
from ingot.train.setup import make_setup
from ingot.train.step import StepInfo
from ingot.train.trainer import train
from tests import tolerances
from tests.objectives.ways import make_ready, recipe_of
from tests.ranks import run_ranks
from tests.small import copy_of, small_recipe
from tests.train.stopping import train_until
from tests.train.test_muon import ALONE, built, step

EVERY = {"checkpoint__every": 1, "checkpoint__keep": 99, "precision__export": "fp32"}


def exported(recipe: Recipe) -> dict[str, Tensor]:
    return load_file(recipe.folder.model / "model.safetensors")


def logged(recipe: Recipe, key: str = "validation/loss") -> dict[int, float]:
    lines = read_lines(recipe.folder.metrics)
    return {line["step"]: line[key] for line in lines if key in line}


def test_the_mean_is_its_formula_and_a_step_that_is_not_taken_is_not_in_it() -> None:
    _, masters = built({}, ALONE)
    optimizer = make_optimizer(AdamW(lr=0.05), masters, 0, Average(decay=0.25))
    expected: dict[str, Tensor] = {}
    taken = 0
    for number, skipped in enumerate((0.0, 0.0, 1.0, 0.0, 0.0, 0.0)):
        step(masters, optimizer, number, skipped)
        for master in masters:
            now = master.tensor.detach().double()
            # Of few steps it keeps less: 1/10, 2/11, 3/12, then the 0.25 that is asked for.
            kept = min(0.25, (taken + 1) / (taken + 10))
            before = expected.get(master.name, now)
            expected[master.name] = before if skipped else kept * before + (1 - kept) * now
        taken += not skipped
    for master in masters:
        found = optimizer.state[master.tensor][AVERAGE]
        torch.testing.assert_close(found.double(), expected[master.name], rtol=1e-6, atol=1e-7)
        assert not torch.equal(found, master.tensor)


@pytest.mark.parametrize(
    "settings", [AdamW(lr=0.05), SGD(kind="sgd"), SGD(kind="sgd", momentum=0.9)]
)
def test_a_weight_without_a_gradient_in_its_first_steps_joins_later(settings: Any) -> None:
    """As layers do that are left out at random; the others' mean is what it is without that."""
    (_, masters), (_, others) = built({}, ALONE), built({}, ALONE)
    optimizer = make_optimizer(settings, masters, 0, Average(decay=0.25))
    other = make_optimizer(settings, others, 0, Average(decay=0.25))
    late = next(iter(masters))
    for number in range(4):
        step(masters, optimizer, number, left_out=late.name if number < 2 else None)
        step(others, other, number)
        assert (AVERAGE in optimizer.state.get(late.tensor, {})) == (number >= 2)
    for one, two in zip(masters, others, strict=True):
        mean, theirs = optimizer.state[one.tensor][AVERAGE], other.state[two.tensor][AVERAGE]
        assert torch.equal(mean, theirs) == (one is not late), one.name
        assert optimizer.state[one.tensor][COUNT] == 4


@pytest.mark.parametrize("settings", [AdamW(lr=0.05), SGD(kind="sgd", momentum=0.9)])
def test_training_itself_does_not_change(settings: Any) -> None:
    (_, masters), (_, others) = built({}, ALONE), built({}, ALONE)
    optimizer = make_optimizer(settings, masters, 0, Average())
    other = make_optimizer(settings, others)
    for number in range(2):
        step(masters, optimizer, number)
        step(others, other, number)
    for one, two in zip(masters, others, strict=True):
        assert torch.equal(one.tensor, two.tensor)


@pytest.mark.drawn("averages of weights")
def test_the_average_is_measured_and_exported_and_resumed(
    prepared_root: Path, tmp_path: Path
) -> None:
    knobs = {"train__steps": 6, "train__evaluate_every": 3, **EVERY}
    average = {"train__average": "{decay: 0.5, evaluate: true}"}
    plain, whole, broken = (
        small_recipe(copy_of(prepared_root, tmp_path / name), **knobs, **more)
        for name, more in (("plain", {}), ("whole", average), ("broken", average))
    )
    train(plain)
    train(whole)
    assert logged(whole, "train/loss") == logged(plain, "train/loss"), "training is the same"
    assert logged(whole).keys() == logged(plain).keys() == {3, 6}
    assert all(logged(whole)[at] != logged(plain)[at] for at in (3, 6))
    ours, theirs = exported(whole), exported(plain)
    mean = AveragedWeights(step_folder(whole.folder.checkpoints, 6))
    for name in theirs:
        assert torch.equal(ours[name], mean[name]), name
        assert not torch.equal(ours[name], theirs[name]), name
    assert (read_lineage(whole.folder.model) or {})["average"] == {"kind": "ema", "decay": 0.5}
    assert "average" not in (read_lineage(plain.folder.model) or {})
    train_until(4, broken)
    train(broken)
    assert logged(broken) == logged(whole)
    assert all(torch.equal(weight, ours[name]) for name, weight in exported(broken).items())


@pytest.mark.drawn("averages of weights")
def test_the_mean_of_the_newest_checkpoints_is_exported(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = small_recipe(root, train__average="{kind: last, checkpoints: 3}", **EVERY)
    train(recipe)
    told = capsys.readouterr().err
    assert "train: the mean of 3 of 3 checkpoints is exported, steps 4 to 6" in told
    assert "warning: train.average" not in told
    last = [WholeWeights(step_folder(recipe.folder.checkpoints, at)) for at in (4, 5, 6)]
    for name, weight in exported(recipe).items():
        mean = torch.stack([one[name].double() for one in last]).mean(0)
        torch.testing.assert_close(weight.double(), mean, rtol=1e-6, atol=1e-8)
        assert not torch.equal(weight, last[-1][name])


def test_a_mean_of_fewer_checkpoints_is_told(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before and after a training that makes one alone, whose weights are the last ones."""
    train(small_recipe(root, train__average="{kind: last}", train__steps=3, checkpoint__keep=5))
    told = capsys.readouterr().err
    assert "warning: train.average: of the 5 checkpoints that it asks for there will be 1" in told
    assert "train: the mean of 1 of 5 checkpoints is exported, steps 3 to 3" in told


@pytest.mark.drawn("averages of weights")
def test_what_a_signal_had_saved_is_not_in_the_mean(
    prepared_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it take the place of one that is."""
    knobs = {
        "train__steps": 9,
        "train__average": "{kind: last, checkpoints: 3}",
        **EVERY,
        "checkpoint__every": 2,
        "checkpoint__keep": 3,
    }
    whole, broken = (
        small_recipe(copy_of(prepared_root, tmp_path / name), **knobs) for name in ("one", "two")
    )
    train(whole)
    original = SkipHook.after_step

    def after_step(hook: SkipHook, info: StepInfo) -> bool:
        if info.step == 7:
            signal.raise_signal(signal.SIGTERM)
        return original(hook, info)

    with monkeypatch.context() as patch:
        patch.setattr(SkipHook, "after_step", after_step)
        with pytest.raises(Stopped):
            train(broken)
    assert [found.step for found in committed(broken.folder.checkpoints)] == [7, 6, 4, 2]
    train(broken)
    assert averaged_steps(broken.train.average, broken.folder.checkpoints, 9) == [9, 8, 6]
    ours = exported(whole)
    assert all(torch.equal(weight, ours[name]) for name, weight in exported(broken).items())


@pytest.mark.drawn
@pytest.mark.parametrize("kind", ["{decay: 0.5}", "{kind: last, checkpoints: 3}"])
def test_an_average_of_bf16_weights_is_exported_in_float32(kind: str, root: Path) -> None:
    recipe = small_recipe(
        root,
        precision__master="stochastic",
        precision__compute="bf16",
        train__average=kind,
        train__steps=4,
        **EVERY,
    )
    train(recipe)
    assert recipe.train.average is not None
    mean, ours = (
        stored_average(recipe.train.average, recipe.folder.checkpoints, 4),
        exported(recipe),
    )
    assert all(torch.equal(weight, mean[name]) for name, weight in ours.items())
    assert not all(torch.equal(weight, weight.bfloat16().float()) for weight in ours.values())


def test_a_model_that_is_built_to_be_exported_has_its_average(tmp_path: Path) -> None:
    """One of transformers, which knows its tensors' names only when it is whole."""
    root = make_ready(tmp_path / "root", ["classify"])
    recipe = recipe_of(
        root,
        "classify",
        precision__master="stochastic",
        precision__compute="bf16",
        train__average="{decay: 0.5}",
        train__steps=3,
        **EVERY,
    )
    train(recipe)
    mean = AveragedWeights(step_folder(recipe.folder.checkpoints, 3))
    ours, name = exported(recipe), "bert.encoder.layer.0.attention.self.query.weight"
    (stored,) = [one for one in mean.names if one.endswith(f"{name}.{AVERAGE}")]
    assert torch.equal(ours[name], StoredTensors.__getitem__(mean, stored))


def on_ranks(root: Path, knobs: dict[str, Any]) -> None:
    train(small_recipe(root, parallel__shard=2, **knobs))


@pytest.mark.drawn
@pytest.mark.parametrize("kind", ["{decay: 0.5}", "{kind: last, checkpoints: 3}"])
def test_shards_average_to_what_one_process_does(
    kind: str, prepared_root: Path, tmp_path: Path
) -> None:
    sgd = {"train__optimizer": "{kind: sgd, lr: 0.2}", "train__average": kind, **EVERY}
    alone = small_recipe(copy_of(prepared_root, tmp_path / "alone"), **sgd)
    shared = small_recipe(copy_of(prepared_root, tmp_path / "shared"), **sgd)
    train(alone)
    run_ranks(2, on_ranks, tmp_path / "shared", sgd)
    ours, theirs = exported(shared), exported(alone)
    for name in theirs:
        difference = (ours[name] - theirs[name]).norm() / theirs[name].norm()
        assert difference < tolerances.SPLIT_WEIGHTS, name


@pytest.mark.drawn("averages of weights")
def test_an_average_that_nobody_asks_for_any_more_is_forgotten(root: Path) -> None:
    """Else it would be saved as it stands, and be taken for the average later."""
    train(small_recipe(root, train__steps=2, train__average="{}", **EVERY))
    onward = small_recipe(
        root, train__steps=4, resume__allow=["train.steps", "train.average"], **EVERY
    )
    train(onward)
    stored = WholeWeights(step_folder(onward.folder.checkpoints, 4)).names
    assert not [name for name in stored if AVERAGE in name]


def test_what_cannot_be_averaged_is_refused(tmp_path: Path) -> None:
    last = {"train__average": "{kind: last}"}
    with pytest.raises(WrongInput, match=r"newest 5 checkpoints, and checkpoint\.keep keeps 2"):
        small_recipe(tmp_path, **last)
    with pytest.raises(WrongInput, match=r"kind last exports the mean .* checkpoint\.best"):
        small_recipe(
            tmp_path,
            **last,
            checkpoint__keep=5,
            checkpoint__best="loss",
            train__evaluate_every=2,
        )
    with pytest.raises(WrongInput, match=r"train\.average\.evaluate .* set kind to ema"):
        small_recipe(tmp_path, train__average="{kind: last, evaluate: true}")


@pytest.mark.drawn("averages of weights")
def test_a_stable_phase_is_decayed_from_any_of_its_checkpoints(
    prepared_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schedule = "{kind: wsd, warmup: 2, decay: 2, min_ratio: 0.5}"
    stable = small_recipe(
        copy_of(prepared_root, tmp_path / "stable"), train__schedule=schedule, **EVERY
    )
    train(stable)
    assert list(logged(stable, "train/lr").values()) == pytest.approx(
        [0.005, 0.01, 0.01, 0.01, 0.0075, 0.005]
    )
    start = str(step_folder(stable.folder.checkpoints, 3))
    short = small_recipe(
        copy_of(prepared_root, tmp_path / "short"),
        train__schedule=schedule,
        train__steps=5,
        train__start_from=start,
        train__optimizer__groups="[{match: '*norm*', lr_factor: 0.5}]",
    )
    capsys.readouterr()
    train(short)
    assert list(logged(short, "train/lr").items()) == [(4, 0.0075), (5, 0.005)]
    told = capsys.readouterr()
    assert "is 0.01 until step 3, then falls to 0.005 at step 5" in told.out + told.err
    with pytest.raises(WrongInput, match=r"groups\.0\.match \*nrom\* matches no trained parameter"):
        make_setup(
            small_recipe(
                tmp_path / "short", train__optimizer__groups="[{match: '*nrom*', lr_factor: 0}]"
            ),
            ALONE,
        )
