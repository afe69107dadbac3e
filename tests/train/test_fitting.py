"""`train.micro_batch: auto`: the search by itself with made-up memory, and on a real training state; what
it chooses changes no number of training.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot.base.environment import Ranks, ranks
from ingot.base.errors import Failed, WrongInput
from ingot.parallel.mesh import Mesh, running_mesh
from ingot.train.micro_batch import search as fitting
from ingot.train.micro_batch import trial
from ingot.train.micro_batch.search import (
    TriedMicroBatch,
    fitting_micro_batch,
    micro_batches,
    search,
    with_fitting_micro_batch,
)
from ingot.train.trainer import train
from tests import tolerances
from tests.ranks import run_ranks
from tests.small import small_recipe
from tests.train.test_run import losses

SIZES = [1, 2, 4, 8, 16, 32]
ALONE = Mesh(Ranks(), torch.device("cpu"))


class Device:
    """Memory of 100: so much is taken by the weights, so much by each row. Slower above `best` rows
    at once.
    """

    def __init__(self, weights: float, row: float, best: int = 1 << 20) -> None:
        self.weights, self.row, self.best = weights, row, best
        self.asked: list[int] = []

    def __call__(self, size: int) -> TriedMicroBatch:
        self.asked.append(size)
        share = (self.weights + self.row * size) / 100
        speed = min(size, self.best) / max(1.0, size / self.best)
        return TriedMicroBatch(size, share if share <= 1 else 1e9, speed if share <= 1 else 0.0)


def test_the_largest_that_leaves_a_margin_is_chosen_and_none_beyond_is_tried() -> None:
    device = Device(weights=20, row=5)
    found = search([1, 2, 4, 8, 16, 32], device, 0.9, largest=True)
    assert found.micro_batch == 8
    assert device.asked == [1, 2, 4, 8]
    assert (
        found.why
        == "the largest that fits, with 60% of the memory; 16 would take about 100% of the memory,"
        " and 90% may be taken"
    )


def test_all_rows_of_a_rank_are_the_end() -> None:
    found = search([1, 2, 4], Device(weights=20, row=5), 0.9, largest=True)
    assert (found.micro_batch, found.why) == (
        4,
        "the largest that fits, with 40% of the memory; these are all rows of a rank (4)",
    )


def test_running_out_is_no_error_where_a_smaller_one_fits() -> None:
    device = Device(weights=20, row=50)
    found = search([1, 2, 4], device, 0.9, largest=True)
    assert (found.micro_batch, device.asked) == (1, [1, 2])
    assert "2 ran out of memory" in found.why


def test_the_smallest_may_take_more_than_the_margin_but_not_run_out() -> None:
    assert search([1, 2], Device(weights=85, row=10), 0.9, largest=True).micro_batch == 1
    with pytest.raises(Failed, match=r"out of memory with 1 rows at once; lower data.seq_len"):
        search([1, 2], Device(weights=95, row=10), 0.9, largest=True)


def test_the_fastest_is_chosen_on_a_cpu_the_smallest_of_equals_and_slower_ones_are_not_pursued() -> (
    None
):
    device = Device(weights=1, row=1, best=4)
    found = search([1, 2, 4, 8, 16, 32], device, 0.7, largest=False)
    assert found.micro_batch == 4
    assert device.asked == [1, 2, 4, 8, 16]
    assert "larger ones were not faster, up to 16" in found.why
    equal = search(
        [1, 2, 4, 8],
        lambda size: TriedMicroBatch(size, 0.1, 1.0 + 0.01 * (size == 2)),
        0.7,
        largest=False,
    )
    assert equal.micro_batch == 1


@pytest.mark.parametrize(
    ("knobs", "world", "sizes"),
    [
        ({"train__global_batch": 8}, 1, [1, 2, 4, 8]),
        ({"train__global_batch": 8}, 2, [1, 2, 4]),
        (
            {"train__global_batch": 12},
            1,
            [1, 2, 4, 6, 12],
        ),  # 8 would take two micro-batches, as 6 does
        (
            {"train__global_batch": 10, "parallel__pipeline": 2, "parallel__replicate": 1},
            2,
            [1, 2, 5, 10],
        ),  # a pipeline wants divisors
        ({"train__global_batch": 1}, 1, [1]),
    ],
)
def test_sizes_to_try(knobs: dict[str, Any], world: int, sizes: list[int], tmp_path: Path) -> None:
    assert micro_batches(small_recipe(tmp_path, **knobs), world) == sizes


def test_a_batch_that_does_not_divide_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WrongInput, match=r"train.global_batch 4 does not divide over 3 processes"):
        micro_batches(small_recipe(tmp_path), 3)


def test_a_number_is_left_as_it_is(tmp_path: Path) -> None:
    assert fitting_micro_batch(small_recipe(tmp_path, train__micro_batch=3), ALONE) == 3


def searched(root: Path, knobs: Mapping[str, Any] = {}) -> tuple[int, int]:
    """What a rank found for the small recipe, and how many sizes it tried."""
    recipe = small_recipe(root, **{"train__micro_batch": "auto", "train__global_batch": 8, **knobs})
    tried = []
    probe = fitting._probe
    fitting._probe = lambda *arguments: tried.append(1) or probe(*arguments)  # type: ignore[func-returns-value,assignment]
    try:
        with running_mesh(recipe.parallel) as mesh:
            return fitting_micro_batch(recipe, mesh), len(tried)
    finally:
        fitting._probe = probe


@pytest.mark.drawn("a micro-batch that fits")
def test_it_is_found_on_the_real_trainee_told_and_kept(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = small_recipe(root, train__micro_batch="auto", train__global_batch=8)
    before = torch.get_rng_state()
    size, tried = searched(root)
    assert tried >= 2
    assert torch.equal(before, torch.get_rng_state())
    assert (
        f"train.micro_batch: auto is {size}: the fastest, or the smallest of equals"
        in capsys.readouterr().err
    )
    kept = json.loads((recipe.folder.reports / "micro_batch.json").read_text())
    assert kept["micro_batch"] == size
    assert [one["micro_batch"] for one in kept["tried"]] == [1, 2, 4, 8][:tried]
    assert all(0 < one["share"] < 0.7 and one["rows_per_s"] > 0 for one in kept["tried"])
    assert {path.name for path in recipe.folder.root.iterdir()} == {"data", "reports"}
    assert with_fitting_micro_batch(recipe, ALONE).train.micro_batch == size


@pytest.mark.drawn("a micro-batch that fits")
def test_it_is_sought_again_only_where_something_that_matters_changed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        fitting,
        "_try",
        lambda recipe, sizes, mesh, begin: (
            sought.append(sizes) or fitting.FoundMicroBatch(2, "", [])
        ),
    )
    sought: list[Any] = []
    for knobs, times in (
        ({}, 1),
        ({}, 1),
        ({"train__optimizer__lr": 1e-4, "train__steps": 9}, 1),
        ({"memory__recompute__kind": "full"}, 2),
        ({}, 3),
    ):
        assert (
            fitting_micro_batch(
                small_recipe(root, train__micro_batch="auto", train__global_batch=8, **knobs), ALONE
            )
            == 2
        )
        assert len(sought) == times
    (root / "runs/small/reports/micro_batch.json").write_text("{")
    assert (
        fitting_micro_batch(
            small_recipe(root, train__micro_batch="auto", train__global_batch=8), ALONE
        )
        == 2
    )
    assert len(sought) == 4


@pytest.mark.drawn
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. TriedMicroBatch to allocate 2 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
        MemoryError(),
    ],
    ids=["accelerator", "cpu", "python"],
)
def test_running_out_of_memory_in_a_step_ends_the_search(
    error: Exception, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = trial.train_step

    def fails(context: Any, number: int) -> Any:
        if len(context.control.fetch(number)[0].tokens) >= 4:
            raise error
        return taken(context, number)

    monkeypatch.setattr(trial, "train_step", fails)
    monkeypatch.setattr(fitting, "AS_FAST", 0.0)  # the smallest counts as fastest
    assert searched(root) == (1, 3)
    assert (
        "4 ran out of memory"
        in json.loads((root / "runs/small/reports/micro_batch.json").read_text())["why"]
    )


def test_another_error_is_none_of_memory(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("shapes do not fit")

    monkeypatch.setattr(trial, "train_step", fails)
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        searched(root)
    assert not (root / "runs/small/reports").exists()


def test_ranks_agree_on_the_one_where_memory_is_tightest(root: Path) -> None:
    found = run_ranks(2, searched_with_uneven_room, root)
    assert found[0] == found[1]
    kept = json.loads((root / "runs/small/reports/micro_batch.json").read_text())
    assert all(one["share"] > 0.5 for one in kept["tried"])


def test_a_pipeline_is_tried_with_whole_batches_and_divisors(root: Path) -> None:
    found = run_ranks(2, searched, root, {"parallel__pipeline": 2, "train__global_batch": 6})
    assert found[0] == found[1]
    kept = json.loads((root / "runs/small/reports/micro_batch.json").read_text())
    assert [one["micro_batch"] for one in kept["tried"]] == [1, 2, 3, 6][: found[0][1]]


def searched_with_uneven_room(root: Path) -> tuple[int, int]:
    """Rank 1 has room for little more than it holds already."""
    rank = ranks().rank
    fitting.room_bytes = lambda device, local_world: (
        10**12 if rank == 0 else int(1.5 * fitting.peak_bytes(device))
    )  # type: ignore[assignment]
    return searched(root)


@pytest.mark.drawn("a micro-batch that fits")
def test_its_choice_changes_no_result(root: Path) -> None:
    """The made-up rows of the search leave no trace in what training computes."""
    fixed = small_recipe(root, train__global_batch=8, train__micro_batch=8)
    train(fixed)
    expected = losses(fixed)
    with running_mesh() as mesh:
        auto = with_fitting_micro_batch(
            small_recipe(root, train__global_batch=8, train__micro_batch="auto"), mesh
        )
    assert isinstance(auto.train.micro_batch, int)
    train(auto, fresh=True)
    assert losses(auto) == pytest.approx(expected, abs=tolerances.SPLIT_LOSS)


def test_prepared_data_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(WrongInput, match=r"holds no prepared data; run `ingot prepare`"):
        fitting_micro_batch(small_recipe(tmp_path, train__micro_batch="auto"), ALONE)


def test_trials_begin_where_the_plan_proposes_and_measuring_decides() -> None:
    """As far as one size tells that the next fits, none smaller is tried; else one, for the slope."""
    device = Device(weights=20, row=5)
    assert search(SIZES, device, 0.9, largest=True, begin=9).micro_batch == 8
    assert device.asked == [8, 4], "8 takes 60 %, so 16 might take 120 %"
    roomy = Device(weights=1, row=1)
    assert search(SIZES, roomy, 0.9, largest=True, begin=8).micro_batch == 32
    assert roomy.asked == [8, 16, 32]
    whole = Device(weights=1, row=1)
    assert search(SIZES, whole, 0.9, largest=True, begin=500).micro_batch == 32
    assert whole.asked == [32]


def test_a_proposal_that_does_not_fit_is_gone_below() -> None:
    device = Device(weights=20, row=20)
    found = search(SIZES, device, 0.9, largest=True, begin=16)
    assert (found.micro_batch, device.asked) == (2, [16, 8, 4, 2])
    assert found.why.endswith("4 took 100% of the memory, and 90% may be taken")
    with pytest.raises(Failed, match=r"out of memory with 1 rows at once"):
        search(SIZES, Device(weights=200, row=1), 0.9, largest=True, begin=16)
