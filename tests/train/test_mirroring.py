"""A training whose checkpoints also go to a bucket: it goes on there on another machine, alone, and
the bucket's faults are told.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot.base.environment import REPLICA_VARIABLE
from ingot.base.errors import Failed, WrongInput
from ingot.base.markers import COMMIT
from ingot.base.remote.replica import push
from ingot.base.runlog import append_line, read_lines
from ingot.checkpoints.mirror import BucketMirror
from ingot.checkpoints.store import committed
from ingot.config.recipe import Recipe
from ingot.train import mirroring, step
from ingot.train.trainer import train
from tests import gcs
from tests.ranks import run_ranks
from tests.small import copy_of, small_recipe
from tests.train.test_run import last_state, losses, metrics, stop_after, weights
from tests.train.test_signals import EARLY, stop_in_evaluation
from tests.train.test_skipping import events, poison

PLACE = "gs://bucket/runs/small"
KNOBS: dict[str, Any] = {"train__steps": 8, "checkpoint__every": 2, "checkpoint__upload": PLACE}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[gcs.Server]:
    with gcs.serving(monkeypatch) as running:
        yield running


def steps(recipe: Recipe) -> list[int]:
    return [found.step for found in committed(recipe.folder.checkpoints)]


@pytest.mark.drawn("checkpoints in a bucket", keep=2)
def test_checkpoints_go_there_too_and_are_kept_alike(server: gcs.Server, root: Path) -> None:
    recipe = small_recipe(root, **KNOBS)
    train(recipe)
    assert list(BucketMirror(PLACE).steps()) == steps(recipe) == [8, 6]
    assert "runs/small/lease" not in server.objects, "given back"


@pytest.mark.drawn("checkpoints in a bucket", keep=2)
def test_another_machine_goes_on_from_there(
    server: gcs.Server, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = small_recipe(copy_of(root, tmp_path / "whole"), **{**KNOBS, "checkpoint__upload": None})
    train(whole)
    here = small_recipe(root, **KNOBS)
    stop_after(here, 5, monkeypatch)
    there = small_recipe(copy_of(root, tmp_path / "there"), **KNOBS)
    shutil.rmtree(there.folder.checkpoints)
    train(there)
    assert (
        next(
            event["step"]
            for event in read_lines(there.folder.events)
            if event["kind"] == "start" and event["cause"] == "resumed"
        )
        == 4
    )
    expected = weights(whole)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(there).items())


@pytest.mark.drawn("checkpoints in a bucket", keep=2)
def test_checkpoints_of_a_mean_come_along(
    server: gcs.Server, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another machine made is in the mean, too, and is not deleted in the bucket for not being
    here.
    """
    knobs = {
        **KNOBS,
        "train__average": "{kind: last, checkpoints: 4}",
        "checkpoint__keep": 4,
        "precision__export": "fp32",
    }
    whole = small_recipe(copy_of(root, tmp_path / "whole"), **{**knobs, "checkpoint__upload": None})
    train(whole)
    stop_after(small_recipe(root, **knobs), 5, monkeypatch)
    there = small_recipe(copy_of(root, tmp_path / "there"), **knobs)
    shutil.rmtree(there.folder.checkpoints)
    train(there)
    assert list(BucketMirror(PLACE).steps()) == [8, 6, 4, 2]
    expected = weights(whole)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(there).items())


@pytest.mark.drawn("checkpoints in a bucket", keep=2)
def test_what_an_evaluation_decided_later_is_known_there_too(
    server: gcs.Server, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = small_recipe(root, **EARLY, checkpoint__upload=PLACE)
    stop_in_evaluation(recipe, 2, monkeypatch)
    marker = recipe.folder.checkpoints / "step-00000004" / COMMIT
    there = "runs/small/step-00000004/COMMIT.json"
    before = server.objects[there].data
    assert before == marker.read_bytes()
    train(recipe)
    assert server.objects[there].data == marker.read_bytes() != before


@pytest.mark.drawn("checkpoints in a bucket", keep=2)
def test_a_new_training_is_not_mixed_with_an_old_one(server: gcs.Server, root: Path) -> None:
    recipe = small_recipe(root, **KNOBS)
    train(recipe)
    before = metrics(recipe)
    with pytest.raises(
        WrongInput,
        match=(
            r"gs://bucket/runs/small.* holds checkpoints of an earlier training, up to step"
            r" 8.*another folder"
        ),
    ):
        train(small_recipe(root, **KNOBS, train__optimizer__lr=0.02))
    with pytest.raises(WrongInput, match=r"holds checkpoints of an earlier training"):
        train(recipe, fresh=True)
    assert (steps(recipe), metrics(recipe)) == ([8, 6], before)
    assert not (recipe.folder.root / "earlier").exists()
    other = small_recipe(
        root, **{**KNOBS, "checkpoint__upload": "gs://bucket/runs/other"}, train__optimizer__lr=0.02
    )
    train(other)
    assert (list(BucketMirror("gs://bucket/runs/other").steps()), steps(other)) == ([8, 6], [8, 6])
    train(recipe)  # brought back, and its checkpoints lie in the bucket
    assert metrics(recipe) == before


@pytest.mark.drawn("checkpoints in a bucket", keep=2)
def test_two_runs_on_one_place(server: gcs.Server, root: Path, tmp_path: Path) -> None:
    with (
        BucketMirror(PLACE).lease("run first"),
        pytest.raises(Failed, match=r"is in use by run first"),
    ):
        train(small_recipe(root, **KNOBS))
    train(small_recipe(root, **KNOBS))


@pytest.mark.drawn("checkpoints in a bucket", keep=2)
def test_a_bucket_that_stays_away_ends_training_and_it_goes_on(
    server: gcs.Server, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ingot.base.remote.bucket.PATIENCE_S", 5.0)
    recipe = small_recipe(root, **KNOBS)
    with monkeypatch.context() as patch:
        # From the first step on.
        patch.setattr(
            "ingot.train.trainer.announce",
            lambda *arguments, **knobs: server.fault("insert", 10**6, code=503),
        )
        with pytest.raises(
            Failed,
            match=(
                r"could not write gs://bucket/runs/small/step-00000002/.*run the same command again"
            ),
        ):
            train(recipe)
    server.faults.clear()
    train(recipe)
    assert next(BucketMirror(PLACE).steps()) == 8


def train_shared(root: Path, address: str) -> list[float]:
    os.environ[gcs.EMULATOR] = address
    recipe = small_recipe(root, **KNOBS, train__micro_batch=1)
    train(recipe)
    return losses(recipe)


@pytest.mark.drawn("two ranks and a bucket")
def test_two_ranks_send_a_share_each(server: gcs.Server, root: Path) -> None:
    one, other = run_ranks(2, train_shared, root, server.address)
    assert one == other
    names = [name for name in server.objects if name.startswith("runs/small/step-00000008/")]
    assert {name.rpartition("/")[2] for name in names} >= {
        "__0_0.distcp",
        "__1_0.distcp",
        "COMMIT.json",
        ".metadata",
    }


@pytest.mark.drawn("checkpoints in a bucket", keep=2)
def test_what_a_checkpoint_vouches_for_is_in_the_replica_before_it_counts(
    server: gcs.Server, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Should this machine go, another one goes on from the checkpoint, and has the metrics of all
    steps up to it. Another job of the run may send something in the same moment.
    """
    tries = count()

    def contended(*arguments: Any, **knobs: Any) -> None:
        if next(tries) % 3 < 2:
            raise Failed("written by somebody else meanwhile")
        push(*arguments, **knobs)

    monkeypatch.setattr(mirroring, "push", contended)
    monkeypatch.setattr(mirroring, "AGAIN_S", (0.0, 0.0))
    replica = "gs://bucket/ingot/runs/small"
    monkeypatch.setenv(REPLICA_VARIABLE, replica)
    write, seen = server.write, list[tuple[int, list[int]]]()

    def look(name: str, *about: Any) -> Any:
        if name.endswith("COMMIT.json"):
            index = json.loads(server.objects["ingot/runs/small/REPLICA.json"].data)
            keys = {entry["path"]: entry["key"] for entry in index["files"]}
            lines = server.objects[f"ingot/runs/small/{keys['metrics.jsonl']}"].data.splitlines()
            seen.append(
                (
                    int(name.split("/")[-2].removeprefix("step-")),
                    [json.loads(line)["step"] for line in lines],
                )
            )
            assert {"events.jsonl", "samples.jsonl"} <= keys.keys()
            assert not any(path.startswith("data/") for path in keys)
        return write(name, *about)

    monkeypatch.setattr(server, "write", look)
    recipe = small_recipe(root, **KNOBS)
    append_line(recipe.folder.samples, {"step": 1})
    train(recipe)
    assert [step for step, _ in seen] == [2, 4, 6, 8]
    assert all(logged[:step] == list(range(1, step + 1)) for step, logged in seen)


POISONED: dict[str, Any] = {
    "train__steps": 10,
    "checkpoint__every": 2,
    "train__skip__in_row": 2,
    "train__skip__then": "roll_back",
    "checkpoint__upload": PLACE,
}


@pytest.mark.drawn("checkpoints in a bucket", keep=2)
def test_what_was_left_out_is_known_where_only_the_bucket_is_left(
    server: gcs.Server, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = small_recipe(
        copy_of(root, tmp_path / "whole"), **{**POISONED, "checkpoint__upload": None}
    )
    there = small_recipe(copy_of(root, tmp_path / "there"), **POISONED)
    poison(monkeypatch, range(20, 28))
    train(whole)
    here = small_recipe(root, **POISONED)
    stop_after(here, 9, monkeypatch)
    assert steps(here)[0] == 8
    assert (here.folder.root / "left_out.json").exists()
    server.ahead_s = 3600  # the lease of the machine that was lost
    train(there)
    assert events(there, "roll_back") == []
    assert [event["step"] for event in events(there, "start")] == [8]
    assert (there.folder.root / "left_out.json").read_bytes() == (
        here.folder.root / "left_out.json"
    ).read_bytes()
    expected = weights(whole)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(there).items())


def train_noting(place: Path, address: str | None) -> tuple[list[Any], dict[str, bytes]]:
    """The rows that this rank trains on, by step, and what rank 0 comes to. With a bucket's address
    each rank is a node with a disk of its own.
    """
    rank, knobs = int(os.environ["RANK"]), dict(POISONED)
    if address is None:
        knobs["checkpoint__upload"] = None
    else:
        os.environ.update(
            {
                gcs.EMULATOR: address,
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "GROUP_RANK": str(rank),
            }
        )
        place /= str(rank)
    os.chdir(place)
    trained = list[Any]()
    with pytest.MonkeyPatch.context() as patch:
        poison(patch, range(20, 28))
        accumulate = step.accumulate_gradients

        def noting(context: Any, number: int, batches: Any) -> Any:
            trained.append((number, [batch.rows.tolist() for batch in batches]))
            return accumulate(context, number, batches)

        patch.setattr(step, "accumulate_gradients", noting)
        recipe = small_recipe(place, **knobs, output="runs", train__micro_batch=1)
        train(recipe)
    return trained, last_state(recipe) if rank == 0 else {}


@pytest.mark.drawn("two ranks and a bucket")
def test_nodes_with_a_disk_each_go_back_together(
    server: gcs.Server, root: Path, tmp_path: Path
) -> None:
    for name in ("shared", "0", "1"):
        copy_of(root, tmp_path / name)
    apart = run_ranks(2, train_noting, tmp_path, server.address)
    assert len(apart[0][0]) > 10
    assert apart == run_ranks(2, train_noting, tmp_path / "shared", None)
