"""Evaluations and checkpoints once an epoch, and by the clock: deterministic, agreed by all ranks,
and without a part in what is trained.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partialmethod
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ingot.base.environment import Ranks
from ingot.base.errors import WrongInput
from ingot.base.runlog import read_lines
from ingot.checkpoints.state import Staging
from ingot.checkpoints.store import committed
from ingot.config.recipe import Recipe
from ingot.config.sections.training import Train
from ingot.config.shape import total_steps
from ingot.parallel.mesh import Mesh
from ingot.train import assembly
from ingot.train.optim.schedules import Recurrence, too_short
from ingot.train.setup import make_setup
from ingot.train.trainer import train
from tests import tolerances
from tests.patience import PATIENCE_S
from tests.ranks import run_ranks
from tests.small import copy_of, small_recipe
from tests.train.stopping import train_until


def test_steps_epochs_and_times() -> None:
    steps = [step for step in range(1, 13) if Recurrence(4, 10, 4).is_due(step)]
    assert steps == [4, 8, 12]
    for rows, batch in ((10, 4), (8, 4), (225, 32), (4, 4), (97, 7)):
        ends = {total_steps(Train(epochs=k, global_batch=batch), rows, 8) for k in range(1, 30)}
        found = {
            step
            for step in range(1, max(ends) + 1)
            if Recurrence("epoch", rows, batch).is_due(step)
        }
        assert found == ends, "where a training of so many epochs ends"
    assert [step for step in range(1, 9) if Recurrence("epoch", 10, 4).is_due(step)] == [2, 5, 7]
    assert [step for step in range(1, 9) if Recurrence("epoch", 8, 4).is_due(step)] == [2, 4, 6, 8]
    assert [step for step in range(1, 4) if Recurrence("epoch", 2, 4).is_due(step)] == [1, 2, 3]
    late = Recurrence("epoch", 10, 4, begin=3)
    assert [step for step in range(4, 12) if late.is_due(step)] == [5, 8, 10], "of other data"
    assert not any(Recurrence(None, 10, 4).is_due(step) for step in range(1, 9))
    now = 100.0
    timed = Recurrence("2m", 10, 4, lambda: now)
    for passed, due in ((100.0, False), (219.0, False), (220.0, True)):
        now = passed
        assert timed.vote() is due
        assert not timed.is_due(7), "only what all ranks were told counts"
    timed.set_due(True)
    assert timed.is_due(7)
    timed.restart()
    assert not timed.is_due(8)
    assert not timed.vote()
    assert not Recurrence("epoch", 10, 4, lambda: 1e9).vote()


def test_a_pass_ends_earlier_by_what_is_left_out_of_it() -> None:
    skipped = [(0, 60), (70, 71), (95, 99)]
    ends = Recurrence("epoch", 91, 4, skipped=skipped)
    found = [step for step in range(1, 60) if ends.is_due(step)]
    assert found == [7, 29, 52], "30 of the first pass, 87 of the second, all of the third"
    late = Recurrence("epoch", 91, 4, begin=2, skipped=skipped)
    assert [step for step in range(3, 40) if late.is_due(step)] == [23], "from place 68 on"


@pytest.mark.parametrize("every", [None, 1, 3, 7, 100, "epoch"])
def test_whether_it_may_be_due_on_the_way_is_known_before(every: int | str | None) -> None:
    for rows, batch in ((10, 4), (8, 4), (225, 32), (97, 7)):
        recurrence = Recurrence(every, rows, batch)
        for first in range(12):
            for last in range(first, 24):
                due = sum(map(recurrence.is_due, range(first + 1, last)))
                assert recurrence.most_often(first, last) == due, (every, rows, first, last)
                assert recurrence.may_be_due(first, last) == (due > 0)
    assert Recurrence("1h", 10, 4).may_be_due(0, 2), "nobody knows how long a step takes"
    assert not Recurrence("1h", 10, 4).may_be_due(0, 1)


ALONE = Mesh(Ranks(), torch.device("cpu"))
STOP_EARLY = {"train__early_stop": "{}", "train__steps": 9}


@pytest.mark.parametrize(
    ("knobs", "told"),
    [
        ({**STOP_EARLY, "train__evaluate_every": 10}, ["train.early_stop"]),
        ({**STOP_EARLY, "train__evaluate_every": 9}, ["train.early_stop"]),
        ({**STOP_EARLY, "train__evaluate_every": 3}, ["train.early_stop"]),
        ({**STOP_EARLY, "train__evaluate_every": 2}, []),
        ({"train__early_stop": "{patience: 4}", "train__evaluate_every": 2}, ["train.early_stop"]),
        ({"train__early_stop": "{patience: 1}", "train__evaluate_every": 4}, []),
        ({**STOP_EARLY, "train__evaluate_every": "epoch"}, ["train.early_stop"]),
        ({**STOP_EARLY, "train__evaluate_every": 10, "train__start_step": 4}, ["train.early_stop"]),
        ({"train__evaluate_every": 500, "checkpoint__best": "loss"}, ["checkpoint.best"]),
        ({"train__evaluate_every": 500}, ["train.evaluate_every"]),
        ({"train__evaluate_every": 9}, []),
        ({"train__evaluate_every": "epoch"}, ["train.evaluate_every"]),
        ({"train__evaluate_every": "1h"}, []),
        ({"train__sample_every": 3}, ["train.sample_every"]),
        ({"train__sample_every": 10, "evaluate__prompts": ["a"]}, ["train.sample_every"]),
        (
            {"train__sample_every": 5, "train__start_step": 5, "evaluate__prompts": ["a"]},
            ["train.sample_every"],
        ),
        ({"train__sample_every": 9, "evaluate__prompts": ["a"]}, []),
        ({"train__average": "{kind: last}", "checkpoint__every": 2}, []),
        ({"train__average": "{kind: last}", "checkpoint__every": 3}, ["train.average"]),
        ({"train__average": "{kind: last}", "checkpoint__every": "1h"}, []),
        ({"train__average": "{}", "checkpoint__every": 500}, []),
    ],
)
def test_what_a_training_is_too_short_for_is_told(
    knobs: dict[str, Any], told: list[str], tmp_path: Path
) -> None:
    recipe = small_recipe(tmp_path, checkpoint__keep=5, **{"train__steps": 9, **knobs})
    first = recipe.train.start_step or 0
    assert [knob for knob, _ in too_short(recipe, 40, first, 9)] == told


def test_epochs_end_with_their_rows_though_some_are_left_out(root: Path) -> None:
    """What is left out on purpose is neither trained on in another pass, nor replaced by it."""
    one = {"train__steps": None, "train__epochs": 1}
    whole = make_setup(small_recipe(root, **one), ALONE)
    taken = whole.order.rows(0, len(whole.rows)).tolist()
    recipe = small_recipe(root, **one, data__skip=[[0, 60], [62, 63]])
    setup = make_setup(recipe, ALONE)
    rows = setup.order.rows(0, setup.last * setup.batch.global_batch).tolist()
    assert setup.last == (len(taken) - 61) // 4 > 0
    assert rows == [*taken[60:62], *taken[63:]][: len(rows)]
    once = Recurrence.of(recipe, "epoch", len(taken))
    assert [step for step in range(1, setup.last + 2) if once.is_due(step)] == [setup.last]
    counted = small_recipe(root, data__skip=[[0, 60]])
    assert make_setup(counted, ALONE).last == counted.train.steps
    with pytest.raises(WrongInput, match=r"data\.skip leaves out .* less than one train\.global"):
        make_setup(small_recipe(root, **one, data__skip=[[0, len(taken) - 3]]), ALONE)


@pytest.mark.parametrize(("every", "on_the_way"), [(2, True), (4, False), (500, False)])
def test_room_for_a_copy_is_taken_for_saves_on_the_way_alone(
    every: int, on_the_way: bool, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocated, keep = [], Staging.allocate

    def watched(staging: Staging, tensors: Mapping[str, torch.Tensor]) -> Any:
        allocated.append(len(tensors))
        return keep(staging, tensors)

    monkeypatch.setattr(Staging, "allocate", watched)
    recipe = small_recipe(root, train__steps=4, checkpoint__every=every)
    train(recipe)
    assert len(allocated) == (2 if on_the_way else 0), "beside the first step, and for the copy"
    kept = [found.step for found in committed(recipe.folder.checkpoints)]
    assert sorted(kept) == ([2, 4] if on_the_way else [4])


@pytest.mark.parametrize("text", ["0", "-3", "0s", "epochs", "30 m", "1.5h", "m", "yes"])
def test_what_says_no_recurrence_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(WrongInput, match=r"train\.evaluate_every"):
        small_recipe(tmp_path, train__evaluate_every=text)


@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        (
            {"train__evaluate_every": "30m", "train__early_stop": "{}"},
            "would end training by the clock",
        ),
        (
            {"train__evaluate_every": "30m", "checkpoint__best": "loss"},
            "would choose by the clock",
        ),
        (
            {"checkpoint__every": "90s", "train__skip__then": "roll_back"},
            "would go back by the clock",
        ),
    ],
)
def test_the_clock_decides_no_numbers(knobs: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(WrongInput, match=says):
        small_recipe(tmp_path, **knobs)
    small_recipe(
        tmp_path, **{key: "epoch" if "every" in key else knob for key, knob in knobs.items()}
    )


def steps_of(recipe: Recipe, key: str) -> list[int]:
    return [line["step"] for line in read_lines(recipe.folder.metrics) if key in line]


def losses(recipe: Recipe) -> list[float]:
    return [
        line["train/loss"] for line in read_lines(recipe.folder.metrics) if "train/loss" in line
    ]


def test_once_an_epoch_and_on_after_a_stop(prepared_root: Path, tmp_path: Path) -> None:
    knobs = {
        "train__epochs": 2,
        "train__steps": None,
        "train__micro_batch": 16,
        "train__global_batch": 48,
        "train__evaluate_every": "epoch",
        "checkpoint__every": "epoch",
        "checkpoint__keep": 5,
    }
    whole, broken = (
        small_recipe(copy_of(prepared_root, tmp_path / name), **knobs) for name in ("one", "two")
    )
    train(whole)
    setup = make_setup(whole, Mesh(Ranks(), torch.device("cpu")))
    first = len(setup.rows) // 48
    ends = [first, setup.last]
    assert first < setup.last - 1, "an epoch is some steps"
    assert steps_of(whole, "validation/loss") == ends
    assert [found.step for found in committed(whole.folder.checkpoints)] == ends[::-1]
    train_until(first + 1, broken)
    train(broken)
    assert steps_of(broken, "validation/loss") == ends
    assert losses(broken) == losses(whole)
    ours, theirs = (load_file(one.folder.model / "model.safetensors") for one in (broken, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


class Ticks:
    """A clock that is a second further whenever it is asked; `fast` times as much."""

    def __init__(self, fast: float) -> None:
        self.now, self.fast = 0.0, fast

    def __call__(self) -> float:
        self.now += self.fast
        return self.now


def train_by_the_clock(root: str, fast: list[float], knobs: dict[str, Any]) -> list[list[int]]:
    ticks = Ticks(fast[int(os.environ["RANK"])])
    real = assembly.Recurrence
    ticking = {"__init__": partialmethod(real.__init__, clock=ticks)}
    assembly.Recurrence = type("Ticking", (real,), ticking)  # type: ignore[misc]
    try:
        recipe = small_recipe(Path(root), **knobs)
        train(recipe)
    finally:
        assembly.Recurrence = real  # type: ignore[misc]
    evaluated = steps_of(recipe, "validation/loss")
    return [evaluated, sorted(one.step for one in committed(recipe.folder.checkpoints))]


def test_the_clock_of_rank_0_counts_for_all_and_changes_no_numbers(
    prepared_root: Path, tmp_path: Path
) -> None:
    """Rank 1's clock runs a thousand times as fast: nobody asks it."""
    plain = small_recipe(copy_of(prepared_root, tmp_path / "plain"), train__micro_batch=1)
    train(plain)
    timed = {
        "parallel__replicate": 2,
        "train__micro_batch": 1,
        "train__evaluate_every": "9s",
        "checkpoint__every": "5s",
    }
    root = copy_of(prepared_root, tmp_path / "timed")
    found = run_ranks(2, train_by_the_clock, str(root), [1.0, 1000.0], timed, timeout_s=PATIENCE_S)
    assert found[0] == found[1]
    evaluated, saved = found[0]
    assert 0 < len(evaluated) < 6
    assert len(saved) > 1
    recipe = small_recipe(root, **timed)
    assert losses(recipe) == pytest.approx(losses(plain), rel=tolerances.SPLIT_LOSS)


def test_an_interval_begins_when_the_last_one_is_over(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else all steps behind the first would be evaluated and saved."""
    monkeypatch.setenv("RANK", "0")
    often = {"train__evaluate_every": "7s", "checkpoint__every": "7s", "checkpoint__keep": 99}
    evaluated, saved = train_by_the_clock(str(root), [1.0], {"train__steps": 12, **often})
    for steps in (evaluated, saved[:-1]):  # the last one is saved in any case
        assert len(steps) > 1
        assert all(later - earlier > 1 for earlier, later in pairwise(steps))


def test_a_tracker_sees_one_run_whatever_was_allowed_to_change(
    prepared_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, str, str, dict[str, Any]]] = []

    class Tracker:
        def __init__(
            self, folder: Path, project: str, name: str, run_id: str, config: Any, place: Any
        ) -> None:
            seen.append((project, name, run_id, place))

        def write(self, step: int, values: Any) -> None:
            pass

        def close(self) -> None:
            pass

    monkeypatch.setattr(assembly, "WeightsAndBiases", Tracker)
    root = copy_of(prepared_root, tmp_path / "root")
    wandb = "{project: forge, name: first, entity: smiths, tags: [hot, new]}"
    train(small_recipe(root, train__steps=2, track__wandb=wandb))
    longer = {"train__steps": 3, "resume__allow": "[train.steps]"}
    train(small_recipe(root, track__wandb=wandb, **longer))
    place = {"entity": "smiths", "tags": ["hot", "new"]}
    assert [one[:2] + one[3:] for one in seen] == [("forge", "first", place)] * 2
    assert seen[0][2] == seen[1][2], "one run, though its identity is another"
    other = copy_of(prepared_root, tmp_path / "other")
    train(small_recipe(other, train__steps=2, track__wandb="{}"))
    assert seen[2][1] == "small"
    assert seen[2][2] != seen[0][2], "another training of the same recipe is another run"
    train(small_recipe(other, track__wandb="{id: my-run}", **longer))
    assert seen[3][2] == "my-run"
