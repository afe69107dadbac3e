"""A wall clock that is set back, again and again: nothing is chosen, ordered or counted by it."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from ingot.base.heartbeat import heartbeat_file, read_beats
from ingot.base.runlog import read_lines
from ingot.checkpoints.store import committed
from ingot.report.goodput import goodput
from ingot.train.trainer import train
from tests.small import copy_of, small_recipe
from tests.train.test_run import metrics, stop_after, weights

KNOBS: dict[str, Any] = {"train__steps": 8, "checkpoint__every": 2, "train__evaluate_every": 3}


@pytest.mark.drawn("a clock that runs backwards")
def test_training_dies_and_goes_on_while_the_clock_runs_backwards(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = small_recipe(copy_of(root, tmp_path / "straight"), **KNOBS)
    train(straight)
    recipe, now = small_recipe(root, **KNOBS), time.time()
    with monkeypatch.context() as patch:
        back = itertools.count()
        patch.setattr(time, "time", lambda: now - 3600.0 * next(back))
        stop_after(recipe, 5, monkeypatch)
        stop_after(recipe, 7, monkeypatch)
        train(recipe)
    assert metrics(recipe) == metrics(straight)
    expected = weights(straight)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(recipe).items())
    assert [found.step for found in committed(recipe.folder.checkpoints)] == [8, 6]
    events = list(read_lines(recipe.folder.events))
    assert any(one["t_wall"] > other["t_wall"] for one, other in itertools.pairwise(events)), (
        "the clock did go back"
    )
    account = goodput(events, read_beats(heartbeat_file(recipe.folder.heartbeats))[0])
    assert account is not None
    assert all(seconds >= 0 for seconds in account.seconds.values())
    assert 0 <= account.share() <= 1
    # The account's clock, which nobody sets, began with this process; the other went back by hours.
    age_s = time.time() - psutil.Process().create_time()
    assert account.wall_s < age_s + 60
