"""A training whose checkpoints also go to a bucket: it goes on there on another machine, alone, and the bucket's faults are told."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot.base.errors import Failed, WrongInput
from ingot.base.events import read_lines
from ingot.checkpoints.mirror import BucketMirror
from ingot.checkpoints.store import committed
from ingot.config.recipe import Recipe
from ingot.train.run import train
from tests import gcs
from tests.ranks import run_ranks
from tests.small import copy_of, small_recipe
from tests.train.test_run import losses, stop_after, weights

PLACE = "gs://bucket/runs/small"
KNOBS: dict[str, Any] = {"train__steps": 8, "checkpoint__every": 2, "checkpoint__upload": PLACE}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[gcs.Server]:
    with gcs.serving(monkeypatch) as running:
        yield running


def steps(recipe: Recipe) -> list[int]:
    return [found.step for found in committed(recipe.folder.checkpoints)]


def test_checkpoints_go_there_too_and_are_kept_alike(server: gcs.Server, root: Path) -> None:
    recipe = small_recipe(root, **KNOBS)
    train(recipe)
    assert list(BucketMirror(PLACE).steps()) == steps(recipe) == [8, 6]
    assert "runs/small/lease" not in server.objects, "given back"


def test_another_machine_goes_on_from_there(server: gcs.Server, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = small_recipe(copy_of(root, tmp_path / "whole"), **{**KNOBS, "checkpoint__upload": None})
    train(whole)
    here = small_recipe(root, **KNOBS)
    stop_after(here, 5, monkeypatch)
    there = small_recipe(copy_of(root, tmp_path / "there"), **KNOBS)
    shutil.rmtree(there.folder.checkpoints)
    train(there)
    assert next(event["step"] for event in read_lines(there.folder.events) if event["kind"] == "start" and event["cause"] == "resumed") == 4
    expected = weights(whole)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(there).items())


def test_a_new_training_is_not_mixed_with_an_old_one(server: gcs.Server, root: Path) -> None:
    train(small_recipe(root, **KNOBS))
    with pytest.raises(WrongInput, match=r"gs://bucket/runs/small.* holds checkpoints of an earlier training, up to step 8.*another folder"):
        train(small_recipe(root, **KNOBS, seed=5))
    with pytest.raises(WrongInput, match=r"holds checkpoints of an earlier training"):
        train(small_recipe(root, **KNOBS), fresh=True)
    train(small_recipe(root, **{**KNOBS, "checkpoint__upload": "gs://bucket/runs/other"}, seed=5))


def test_two_runs_on_one_place(server: gcs.Server, root: Path, tmp_path: Path) -> None:
    with BucketMirror(PLACE).lease("run first"), pytest.raises(Failed, match=r"is in use by run first"):
        train(small_recipe(root, **KNOBS))
    train(small_recipe(root, **KNOBS))


def test_a_bucket_that_stays_away_ends_training_and_it_goes_on(server: gcs.Server, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ingot.base.bucket.PATIENCE_S", 1.0)
    recipe = small_recipe(root, **KNOBS)
    with monkeypatch.context() as patch:
        # From the first step on.
        patch.setattr("ingot.train.run._announce", lambda *arguments, **knobs: server.fault("insert", 10**6, code=503))
        with pytest.raises(Failed, match=r"could not write gs://bucket/runs/small/step-00000002/.*run the same command again"):
            train(recipe)
    server.faults.clear()
    train(recipe)
    assert next(BucketMirror(PLACE).steps()) == 8


def train_shared(root: Path, address: str) -> list[float]:
    os.environ[gcs.EMULATOR] = address
    recipe = small_recipe(root, **KNOBS, train__micro_batch=1)
    train(recipe)
    return losses(recipe)


def test_two_ranks_send_a_share_each(server: gcs.Server, root: Path) -> None:
    one, other = run_ranks(2, train_shared, root, server.address)
    assert one == other
    names = [name for name in server.objects if name.startswith("runs/small/step-00000008/")]
    assert {name.rpartition("/")[2] for name in names} >= {"__0_0.distcp", "__1_0.distcp", "COMMIT.json", ".metadata"}
