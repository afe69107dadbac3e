"""`ingot verify resume`: it holds on what resumes exactly, and a fault planted in the training
command turns it red, naming what differs first.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from ingot.base.errors import Failed, WrongInput
from ingot.cli.app import app
from ingot.config.load import dump_recipe
from ingot.verify.proof import Proof
from ingot.verify.resume import verify_resume
from tests.objectives.test_every_way import apart
from tests.objectives.ways import make_ready
from tests.small import small_recipe

# `ingot` with a fault: each of these breaks a resumed run alone, one that goes through is as it
# should be.
FAULTY = """
import sys
{fault}
from ingot.cli.app import main
sys.argv = ["ingot", *sys.argv[1:]]
main()
"""
POSITION = """
from ingot.data.batches.loader import Loader
from ingot.train import run
original, began = Loader.step, []
def step(self, i, *more):
    began.append(i)
    return original(self, i + 1 if began[0] else i)
Loader.step = step
"""
GENERATOR = """
import torch
from ingot.train import run
seeded = []
def seed_once(*arguments):
    if not seeded:
        torch.manual_seed(5)
        seeded.append(True)
run.seed_dropout = seed_once
"""
OPTIMIZER = """
from ingot.train import build
original = build.load_checkpoint
build.load_checkpoint = lambda found, masters, optimizer, mesh: original(found, masters, None, mesh)
"""
RATE = """
from ingot.train import run
original, began = run.learning_rate, []
def learning_rate(schedule, lr, step, last):
    began.append(step)
    return original(schedule, lr, step - began[0], last)
run.learning_rate = learning_rate
"""


def with_fault(fault: str) -> tuple[str, ...]:
    return (sys.executable, "-c", FAULTY.format(fault=fault))


def details(proof: Proof) -> dict[str, tuple[bool | None, str]]:
    return {check.what: (check.passed, check.detail) for check in proof.checks}


def test_what_resumes_exactly_is_proved(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the environment says of steps and checkpoints."""
    monkeypatch.setenv("INGOT_TRAIN__STEPS", "6")
    monkeypatch.setenv("INGOT_CHECKPOINT__EVERY", "100")
    recipe = small_recipe(root, train__evaluate_every=3, checkpoint__best="loss")
    file = root / "recipe.yaml"
    file.write_text(dump_recipe(recipe))
    assert app(["verify", "resume", str(file)], standalone_mode=False) == 0
    shown = capsys.readouterr().out
    assert "all 5 checks hold" in shown
    assert "steps were lost and done again" in " ".join(shown.split())
    assert not (recipe.folder.root / "verify-resume").exists()
    assert not recipe.folder.checkpoints.exists()
    assert not recipe.folder.metrics.exists()


@pytest.mark.parametrize(
    ("fault", "first"),
    [
        (POSITION, "first at step "),
        pytest.param(OPTIMIZER, "first at step ", marks=pytest.mark.slow),
        pytest.param(RATE, "first at step ", marks=pytest.mark.slow),
    ],
)
def test_a_planted_fault_is_seen(fault: str, first: str, root: Path) -> None:
    """How early it shows depends on which of the checkpoints, written meanwhile, were committed
    before the kills.
    """
    found = details(verify_resume(small_recipe(root), with_fault(fault)))
    assert found["metrics"][0] is False
    assert found["metrics"][1].startswith(first), found
    assert found["model state"][0] is False
    assert found["exported model"][0] is False
    assert found["steps lost"][0]


def test_a_generator_that_is_not_restored_is_seen(tmp_path: Path) -> None:
    recipe = apart(
        make_ready(tmp_path / "ready"),
        tmp_path / "run",
        "classify",
        model__config={"hidden_dropout_prob": 0.2},
    )
    found = details(verify_resume(recipe, with_fault(GENERATOR)))
    assert found["metrics"][0] is False
    assert found["optimizer state"][0] is False


def test_without_prepared_data_the_next_step_is_named(tmp_path: Path) -> None:
    with pytest.raises(WrongInput, match=r"holds no prepared data; run `ingot prepare`"):
        verify_resume(small_recipe(tmp_path))


def test_a_training_that_cannot_be_is_told_in_its_own_words(root: Path) -> None:
    knobs: dict[str, Any] = {"data__seq_len": 2048}
    with pytest.raises(
        Failed,
        match=(
            r"training ended with 2: error: data\.seq_len 2048 exceeds the model's 1024 positions"
        ),
    ):
        verify_resume(small_recipe(root, **knobs))
