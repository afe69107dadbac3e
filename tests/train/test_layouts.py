"""`ingot train` on several processes that share a model: samples, tasks and the objective on
held-out rows are those of one process.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from ingot.base.environment import ranks
from ingot.base.errors import Stopped
from ingot.base.runlog import read_lines
from ingot.config.recipe import Recipe
from ingot.evaluate.subject import EvalModel
from ingot.evaluate.validation import TaskEvaluator
from ingot.train.evaluation import EvaluateHook
from ingot.train.trainer import train
from tests import tolerances
from tests.evaluate.small_models import hellaswag_lines, write_lines
from tests.objectives.test_every_way import distance
from tests.patience import PATIENCE_S
from tests.ranks import run_ranks
from tests.small import copy_of, small_recipe

LAYOUTS: dict[str, dict[str, Any]] = {
    "shard": {"parallel__shard": 2},
    "tensor": {"parallel__tensor": 2, "parallel__sequence": False},
    "shard and tensor": {"parallel__shard": 2, "parallel__tensor": 2, "parallel__sequence": False},
}


def recipe_in(root: Path, items: Path, **knobs: Any) -> Recipe:
    return small_recipe(
        root,
        train__steps=4,
        train__evaluate_every=2,
        train__evaluate_rows=5,
        train__sample_every=4,
        evaluate__prompts="[the ingot]",
        evaluate__sample_tokens=6,
        evaluate__tasks=f"[{{kind: loss, name: held}}, {{kind: hellaswag, source: {items}}}]",
        train__evaluate_tasks="[held, hellaswag]",
        train__optimizer="{kind: sgd, lr: 0.5}",
        precision__export="fp32",
        **knobs,
    )


def train_in(root: str, items: str, knobs: dict[str, Any]) -> None:
    train(recipe_in(Path(root), Path(items), **knobs))


def told(recipe: Recipe) -> list[dict[str, Any]]:
    kept = ("train/loss", "train/grad_norm", "validation/", "samples/")
    lines = read_lines(recipe.folder.metrics)
    return [
        {
            key: value
            for key, value in line.items()
            if key.startswith(kept) and key != "validation/seconds"
        }
        for line in lines
    ]


@pytest.mark.drawn
@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_seen_while_training_is_that_of_one_process(
    name: str, prepared_root: Path, tmp_path: Path
) -> None:
    items = write_lines(tmp_path / "items.jsonl", hellaswag_lines(4))
    one, other = (copy_of(prepared_root, tmp_path / each) for each in ("one", "other"))
    alone, shared = recipe_in(one, items), recipe_in(other, items, **LAYOUTS[name])
    train(alone)
    world = 4 if name.count(" ") else 2
    run_ranks(world, train_in, str(other), str(items), LAYOUTS[name], timeout_s=PATIENCE_S)
    found, wanted = told(shared), told(alone)
    assert [line.keys() for line in found] == [line.keys() for line in wanted]
    assert any("samples/0" in line for line in wanted)
    for line, right in zip(found, wanted, strict=True):
        for key, value in right.items():
            assert line[key] == (
                value if isinstance(value, str) else pytest.approx(value, rel=tolerances.SPLIT_LOSS)
            ), key
    weights = [load_file(recipe.folder.model / "model.safetensors") for recipe in (shared, alone)]
    assert distance(*weights) < tolerances.SPLIT_WEIGHTS


def stopped_in_tasks(root: str, items: str) -> list[str]:
    """Rank 0 alone hears of the end, as by a notice, while the items of a task are measured."""
    until_stopped = EvalModel.until_stopped

    def hears(subject: EvalModel, pieces: Iterable[Any]) -> Iterator[Any]:
        for number, piece in enumerate(until_stopped(subject, pieces)):
            if number == 0 and os.environ["RANK"] == "0":
                os.kill(os.getpid(), signal.SIGTERM)
            yield piece

    knobs = {"parallel__tensor": 2, "parallel__sequence": False}
    recipe = recipe_in(Path(root), Path(items), **knobs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EvalModel, "until_stopped", hears)
        with pytest.raises(Stopped):
            train(recipe)
    return sorted(path.name for path in recipe.folder.checkpoints.glob("step-*"))


def test_ranks_that_share_matrices_end_an_evaluation_together(
    prepared_root: Path, tmp_path: Path
) -> None:
    """Each forward pass is computed by both: one that went on alone would wait for the other."""
    items = write_lines(tmp_path / "items.jsonl", hellaswag_lines(40))
    root = copy_of(prepared_root, tmp_path / "root")
    assert run_ranks(2, stopped_in_tasks, str(root), str(items)) == [["step-00000002"]] * 2


def seen_by_a_rank(root: str) -> list[float]:
    """What a rank takes for the value of a task that each has found otherwise."""
    seen: list[float] = []

    class Noted(EvaluateHook):
        def at(self, step: int) -> None:
            measure = self.measure

            def noted() -> Any:
                measured = measure()
                assert measured is not None
                seen.append(measured["held/loss"].value)
                return measured

            self.measure = noted
            super().at(step)
            self.measure = measure

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ingot.train.assembly.EvaluateHook", Noted)
        patch.setattr(
            TaskEvaluator, "__call__", lambda self: {"held/loss": (float(ranks().rank), "lower")}
        )
        train(small_recipe(Path(root), train__steps=1, train__evaluate_every=1, parallel__shard=2))
    return seen


def test_ranks_decide_by_the_same_numbers(root: Path) -> None:
    """Rounding that differs would end one of them, and let the others wait for it."""
    assert run_ranks(2, seen_by_a_rank, str(root), timeout_s=PATIENCE_S) == [[0.0], [0.0]]
