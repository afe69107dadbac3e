"""Training that draws from some parts of the columns at a time, which come from a bucket: the same
weights, and asked to stop while it waits it saves.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from ingot.base.errors import Stopped
from ingot.base.remote.deferred import defer_files
from ingot.base.remote.replica import pull, push
from ingot.checkpoints.store import committed
from ingot.data.batches.prefetch import PartPrefetcher
from ingot.train.trainer import train
from tests import gcs
from tests.small import copy_of, small_recipe
from tests.train.test_run import weights

URL = "gs://bucket/ingot/runs/small"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[gcs.Server]:
    with gcs.serving(monkeypatch) as running:
        yield running


@pytest.fixture
def left(server: gcs.Server, root: Path, tmp_path: Path) -> Path:
    """A root whose columns stayed in the bucket."""
    push(small_recipe(root).folder.root, URL)
    node = small_recipe(tmp_path / "node").folder.root
    pull(URL, node, leave=lambda path: path.endswith((".bin", ".idx")))
    defer_files(node, "data/columns", URL)
    return tmp_path / "node"


def test_asked_to_stop_while_a_part_is_waited_for_it_saves_and_goes_on_to_the_same_weights(
    root: Path, left: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, node = (
        small_recipe(place, data__window=1) for place in (copy_of(root, tmp_path / "whole"), left)
    )
    train(whole)
    wait = PartPrefetcher.wait

    def stuck(self: PartPrefetcher, step: int, meanwhile: Callable[[], bool]) -> bool:
        if step != 3:
            return wait(self, step, meanwhile)
        assert not meanwhile()
        os.kill(os.getpid(), signal.SIGTERM)
        assert meanwhile()
        return False

    with monkeypatch.context() as patched:
        patched.setattr(PartPrefetcher, "wait", stuck)
        with pytest.raises(Stopped):
            train(node)
    assert [found.step for found in committed(node.folder.checkpoints)] == [3]
    train(node)
    assert not list(node.folder.columns.glob("*.bin"))
    expected = weights(whole)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(node).items())
