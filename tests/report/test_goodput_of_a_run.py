"""Goodput of real trainings that die: its parts are the wall time, measured from outside."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ingot.base.runlog import read_lines
from ingot.config.load import dump_recipe
from ingot.config.recipe import Recipe
from ingot.report.goodput import Goodput
from ingot.report.run_view import read_run
from ingot.train.trainer import train
from tests import tolerances
from tests.cli.commands import clean_environment
from tests.patience import PATIENCE_S
from tests.small import small_recipe
from tests.train.test_run import stop_after


def account_of(recipe: Recipe) -> Goodput:
    found = read_run(recipe.folder).goodput
    assert found is not None
    return found


def check_attempts(found: Goodput) -> None:
    """Killed when 30 steps were done; the checkpoint of step 28 may have been written by then."""
    one, two = found.attempts
    assert (one.end, one.first, one.last, two.end, two.last) == ("died", 0, 30, "finished", 40)
    assert two.first in (24, 28)
    assert [loss.steps for loss in found.incidents] == [30 - two.first]


@pytest.mark.drawn("a crash or a kill in training")
def test_the_parts_of_a_training_that_died_are_its_wall_time(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, which was made long before; so the second start seems to take all of the
    time since the death.
    """
    recipe = small_recipe(root, train__steps=40, checkpoint__every=4, train__evaluate_every=10)
    stop_after(recipe, 30, monkeypatch)
    dead = account_of(recipe)
    assert [span.end for span in dead.attempts] == ["died"]
    time.sleep(0.3)
    train(recipe)
    found = account_of(recipe)
    (finish,) = [event for event in read_lines(recipe.folder.events) if event["kind"] == "finish"]
    assert found.wall_s == pytest.approx(
        finish["t_wall"] - psutil.Process().create_time(), abs=tolerances.WALL_S
    )
    check_attempts(found)
    (loss,) = found.incidents
    assert (loss.step, loss.cause) == (30, "attempt 1 ended in phase step")
    assert 0 < loss.lost_s == pytest.approx(found.seconds["lost"])
    assert loss.starting_s > 0.3
    assert all(
        found.seconds[part] > 0
        for part in ("productive", "waiting", "evaluating", "saving", "starting")
    )
    assert found.seconds["productive"] < sum(span.ended - span.began for span in found.attempts)


@pytest.mark.slow
def test_a_killed_process_is_down_until_the_next_is_made(root: Path) -> None:
    recipe = small_recipe(root, train__steps=40, checkpoint__every=4)
    file = root / "recipe.yaml"
    file.write_text(dump_recipe(recipe))
    began = time.time()
    for knobs, code in ((["chaos.kill_at=30"], -signal.SIGKILL), ([], 0)):
        command = [sys.executable, "-m", "ingot", "train", str(file), *knobs]
        done = subprocess.run(
            command,
            env=clean_environment(OMP_NUM_THREADS="1"),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == code, done.stderr
        time.sleep(1.5)
    found = account_of(recipe)
    (finish,) = [event for event in read_lines(recipe.folder.events) if event["kind"] == "finish"]
    # A process is made a little after it is asked for, and its age is known to a second.
    assert found.wall_s == pytest.approx(finish["t_wall"] - began, abs=tolerances.AGE_S)
    check_attempts(found)
    assert found.seconds["down"] == pytest.approx(1.5, abs=tolerances.AGE_S)
