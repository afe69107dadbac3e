"""`ingot verify resume`: it holds on what resumes exactly, and a fault planted in the training
command turns it red, naming what differs first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from ingot.base.errors import Failed, WrongInput
from ingot.cli.app import app
from ingot.config.load import dump_recipe, load_recipe
from ingot.config.recipe import Recipe
from ingot.verify import resume
from ingot.verify.proof import Proof
from ingot.verify.resume import run_ingot, verify_resume
from tests.objectives.test_every_way import apart
from tests.objectives.ways import make_ready
from tests.small import small_recipe
from tests.train.rollout.digits import digits_recipe, made_ready, odd_known
from tests.verify.faulty_training import (
    forget_generator,
    forget_optimizer,
    restart_schedule,
    run_forked,
    run_with,
    shift_position,
)


def details(proof: Proof) -> dict[str, tuple[bool | None, str]]:
    return {check.what: (check.passed, check.detail) for check in proof.checks}


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("kind", "state"), [("adamw", "equal bit for bit"), ("sgd", "there is none")]
)
def test_what_resumes_exactly_is_proved(
    kind: str,
    state: str,
    root: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the environment says of steps and checkpoints."""
    monkeypatch.setattr(resume, "run_ingot", run_forked)
    monkeypatch.setenv("INGOT_TRAIN__STEPS", "6")
    monkeypatch.setenv("INGOT_CHECKPOINT__EVERY", "100")
    knobs = {"train__optimizer__kind": kind, "checkpoint__best": "loss"}
    recipe = small_recipe(root, train__evaluate_every=3, **knobs)
    file = root / "recipe.yaml"
    file.write_text(dump_recipe(recipe))
    assert app(["verify", "resume", str(file)], standalone_mode=False) == 0
    shown = capsys.readouterr().out
    tried = 4 if state == "there is none" else 5
    assert f"all {tried} checks hold" in shown
    lines = shown.splitlines()
    assert any("optimizer state" in line and state in line for line in lines)
    assert "steps were lost and done again" in " ".join(shown.split())
    assert not (recipe.folder.root / "verify-resume").exists()
    assert not recipe.folder.checkpoints.exists()
    assert not recipe.folder.metrics.exists()


@pytest.mark.drawn("a planted fault of resuming")
@pytest.mark.parametrize(
    ("fault", "first"),
    [
        (shift_position, "first at step "),
        (forget_optimizer, "first at step "),
        (restart_schedule, "first at step "),
    ],
)
def test_a_planted_fault_is_seen(fault: Callable[[], None], first: str, root: Path) -> None:
    """How early it shows depends on which of the checkpoints, written meanwhile, were committed
    before the kills.
    """
    found = details(verify_resume(small_recipe(root), run_with(fault)))
    assert found["metrics"][0] is False
    assert found["metrics"][1].startswith(first), found
    assert found["model state"][0] is False
    assert found["exported model"][0] is False
    assert found["steps lost"][0]


@pytest.mark.drawn("a planted fault of resuming")
def test_a_generator_that_is_not_restored_is_seen(tmp_path: Path) -> None:
    recipe = apart(
        make_ready(tmp_path / "ready"),
        tmp_path / "run",
        "classify",
        model__config={"hidden_dropout_prob": 0.2},
    )
    found = details(verify_resume(recipe, run_with(forget_generator)))
    assert found["metrics"][0] is False
    assert found["optimizer state"][0] is False


@pytest.mark.drawn("a planted fault of resuming")
def test_answers_are_sampled_again_exactly(tmp_path: Path) -> None:
    """Steps that take as long as they take."""
    with odd_known():
        made_ready(tmp_path / "root")
    recipe = digits_recipe(tmp_path / "root", {"rewards": [{"kind": "exact"}]})
    proof = verify_resume(recipe, run_forked)
    assert proof.holds, details(proof)


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
        verify_resume(small_recipe(root, **knobs), run_forked)


def test_no_run_is_stopped_before_it_is_killed(root: Path) -> None:
    """By a loss that does not fall in the few steps of the proof."""
    made = small_recipe(root, train__evaluate_every=2, train__early_stop="{patience: 1}")
    asked: list[Recipe] = []

    def run(arguments: Sequence[str]) -> tuple[int, str]:
        asked.append(load_recipe([Path(arguments[1])], arguments[2:]))
        return 1, "no more"

    with pytest.raises(Failed, match="no more"):
        verify_resume(made, run)
    assert made.train.early_stop is not None
    assert asked[0].train.early_stop is None


def test_a_second_proof_of_one_run_takes_nothing_from_the_first(root: Path) -> None:
    made = small_recipe(root)

    def run(arguments: Sequence[str]) -> tuple[int, str]:
        with pytest.raises(Failed, match="in use by process"):
            verify_resume(made, lambda _: (1, "the second"))
        assert load_recipe([Path(arguments[1])], arguments[2:]).folder.columns.exists()
        return 1, "no more"

    with pytest.raises(Failed, match="no more"):
        verify_resume(made, run)


@pytest.mark.parametrize(
    "begun", [{"train__start_from": "earlier"}, {"train__start_step": 30}], ids=str
)
def test_a_training_that_begins_late_is_proved_from_its_beginning(
    begun: dict[str, Any], root: Path
) -> None:
    """Its first step may lie behind the few that are proved."""
    asked: list[Recipe] = []

    def run(arguments: Sequence[str]) -> tuple[int, str]:
        asked.append(load_recipe([Path(arguments[1])], arguments[2:]))
        return 1, "no more"

    with pytest.raises(Failed, match="no more"):
        verify_resume(small_recipe(root, train__steps=40, **begun), run)
    assert asked[0].train.start_step == 0
    assert asked[0].train.start_from == begun.get("train__start_from")


def test_on_a_gpu_both_add_up_in_a_fixed_order(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Sequence[str]] = []
    monkeypatch.setattr(resume, "adds_in_any_order", lambda: True)

    def run(arguments: Sequence[str]) -> tuple[int, str]:
        asked.append(arguments)
        return 1, "no GPU"

    with pytest.raises(Failed, match="no GPU"):
        verify_resume(small_recipe(root), run)
    assert "train.deterministic=true" in asked[0]


def test_trainings_are_processes_of_their_own_and_take_the_recipe_as_it_was_resolved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INGOT_TRAIN__STEPS", "none")
    (tmp_path / "recipe.yaml").write_text("name: without data\n")
    code, messages = run_ingot(["train", str(tmp_path / "recipe.yaml")])
    assert code == 2
    assert "recipe.yaml" in messages
    assert "INGOT" not in messages
