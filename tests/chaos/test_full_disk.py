"""A disk that fills up while a checkpoint is written beside training: said at once, nothing lost,
and it goes on when there is room.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot.base.errors import Failed
from ingot.checkpoints.saver import Saver
from ingot.checkpoints.store import committed, newest_valid, step_folder
from ingot.parallel.mesh import running_mesh
from ingot.train import step
from ingot.train.trainer import train as whole_training
from tests.checkpoints.states import (
    ALONE,
    assert_equal,
    gate,
    load,
    small_disk,
    state_of,
    train,
    trained,
)
from tests.ranks import run_ranks
from tests.saving import save_checkpoint
from tests.small import small_recipe
from tests.train.test_run import metrics, weights

MEGABYTES = 2


def fill(disk: Path, free: int) -> Path:
    """Leave only `free` bytes."""
    stuff = disk / "other"
    with stuff.open("wb") as stream:
        stream.truncate(0)
        stream.write(b"x" * max(shutil.disk_usage(disk).free - free, 0))
    return stuff


@pytest.mark.drawn("a full disk", keep=2)
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_disk_that_fills_up_in_the_midst_of_a_save(asynchronous: bool, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", MEGABYTES) as disk:
        checkpoints = disk / "checkpoints"
        masters, optimizer = trained(0)
        saver = Saver(checkpoints, ALONE, asynchronous=asynchronous)
        saver.save(1, masters, optimizer, {}, keep=2, best=None)
        saver.wait()
        first, size = (
            state_of(masters, optimizer),
            sum(path.stat().st_size for path in step_folder(checkpoints, 1).iterdir()),
        )
        free = size // 2
        words = (
            f"disk full while writing {re.escape(str(step_folder(checkpoints, 2)))}; make space and"
            " run the same command again"
        )
        if asynchronous:
            with gate() as opened:
                saver.save(2, masters, optimizer, {}, keep=2, best=None)
                stuff = fill(disk, free)
                train(masters, optimizer)  # goes on, and is told when it asks
                opened.set()
                while not saver.failed:
                    time.sleep(0.01)
                assert saver.done() == []
                with pytest.raises(Failed, match=f"^{words}$"):
                    saver.wait()
        else:
            stuff = fill(disk, free)
            with pytest.raises(Failed, match=f"^{words}$"):
                saver.save(2, masters, optimizer, {}, keep=2, best=None)
        assert shutil.disk_usage(disk).free >= free - 8192, "what was written of it is given back"
        assert [path.name for path in checkpoints.iterdir()] == ["step-00000001"]
        assert_equal(load(checkpoints), first)
        stuff.unlink()
        saver.save(3, masters, optimizer, {}, keep=2, best=None)
        assert [saved.step for saved in saver.wait()] == [3]
        assert [found.step for found in committed(checkpoints)] == [3, 1]
        assert_equal(load(checkpoints), state_of(masters, optimizer))
        saver.close()


@pytest.mark.drawn("a full disk", keep=2)
def test_wherever_it_fills_up_there_is_a_whole_checkpoint_and_it_is_said(tmp_path: Path) -> None:
    """From no room at all, page by page, to all that it needs: within any of its files, and within
    the marker.
    """
    ends: list[bool] = []
    told: list[str] = []
    with small_disk(tmp_path / "disk", MEGABYTES) as disk:
        masters, optimizer = trained(0)
        save_checkpoint(disk / "checkpoints", 1, masters, optimizer, {"samples": 1}, ALONE)
        size = sum(
            -(-path.stat().st_size // 4096) * 4096
            for path in step_folder(disk / "checkpoints", 1).iterdir()
        )
        for free in (
            0,
            4096,
            *range(12288, size - 32768, 32768),
            *range(max(size - 32768, 0), size + 32768, 4096),
        ):
            stuff = fill(disk, free)
            try:
                save_checkpoint(disk / "checkpoints", 2, masters, optimizer, {"samples": 2}, ALONE)
                ends.append(True)
            except Failed as error:
                told.append(str(error))
                ends.append(False)
            found = newest_valid(disk / "checkpoints")
            assert found is not None
            assert found.step == (2 if ends[-1] else 1)
            assert step_folder(disk / "checkpoints", 2).exists() == ends[-1]
            stuff.unlink()
            shutil.rmtree(step_folder(disk / "checkpoints", 2), ignore_errors=True)
    place = re.escape(str(step_folder(tmp_path / "disk" / "checkpoints", 2)))
    words = (
        rf"disk full while writing {place}(/COMMIT\.json)?; make space and run the same command"
        r" again"
    )
    assert [text for text in told if not re.fullmatch(words, text)] == []
    assert ends == sorted(ends)
    assert ends.count(False) > 5
    assert ends.count(True) > 2


def two_ranks(disk: Path) -> list[str]:
    """What this rank is told of three saves, of which the second meets a full disk."""
    with running_mesh() as mesh:
        masters, optimizer = trained(0)
        saver, told = Saver(disk / "checkpoints", mesh, asynchronous=True), list[str]()
        for step in (1, 2, 3):
            if step == 2 and mesh.is_main:
                fill(disk, 60_000)
            if step == 3 and mesh.is_main:
                (disk / "other").unlink()
            mesh.barrier()
            saver.save(step, masters, optimizer, {}, keep=2, best=None)
            try:
                told += [str(saved.step) for saved in saver.wait()]
            except Failed as error:
                told.append(str(error).partition(" while")[0])
        saver.close()
        return told


@pytest.mark.drawn("a full disk", keep=2)
def test_both_of_two_ranks_are_told(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", MEGABYTES) as disk:
        assert run_ranks(2, two_ranks, disk) == [["1", "disk full", "3"]] * 2
        assert [found.step for found in committed(disk / "checkpoints")] == [3, 1]


@pytest.mark.drawn("a full disk", keep=2)
def test_a_training_whose_disk_fills_up_says_so_and_goes_on_when_there_is_space(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    knobs: dict[str, Any] = {"train__steps": 8, "checkpoint__every": 2}
    straight = small_recipe(root, **knobs)
    whole_training(straight)
    with small_disk(tmp_path / "disk", 4 * MEGABYTES) as disk:
        shutil.copytree(root / "text", disk / "text")
        recipe = small_recipe(disk, **knobs)
        shutil.copytree(straight.folder.data, recipe.folder.data)
        original, filled = step.accumulate_gradients, disk / "other"

        def fill_first(context: Any, number: int, batches: Any) -> Any:
            if number == 5:
                with contextlib.suppress(OSError):  # a checkpoint is being written meanwhile
                    fill(disk, 0)
            return original(context, number, batches)

        with monkeypatch.context() as patch:
            patch.setattr(step, "accumulate_gradients", fill_first)
            with pytest.raises(
                Failed,
                match=r"^disk full while writing .*; make space and run the same command again$",
            ):
                whole_training(recipe)
        filled.unlink()
        found = newest_valid(recipe.folder.checkpoints)
        assert found is not None
        assert found.step >= 2
        whole_training(recipe)
        assert metrics(recipe) == metrics(straight)
        expected = weights(straight)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(recipe).items())
