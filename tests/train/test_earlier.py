"""Trainings that are set aside and brought back: each under its own recipe, and whole."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from ingot.base.errors import WrongInput
from ingot.base.markers import fingerprint
from ingot.base.runfolder import RunFolder
from ingot.checkpoints.store import committed
from ingot.train.earlier import LEFT_OUT, MOVING, PARTS, earlier, finish_moves
from ingot.train.resume import find_start, resumable
from ingot.train.trainer import train
from tests.checkpoints.states import flip_bit
from tests.small import small_recipe
from tests.train.test_resume import identity, saved
from tests.train.test_run import metrics

ONE, OTHER = identity([], of="one"), identity([], of="other")
LOGS = ("metrics.jsonl", "samples.jsonl", LEFT_OUT)


def trained(run: RunFolder, step: int, known: dict[str, Any]) -> None:
    """What a finished training of `known` leaves in its run folder."""
    saved(run, step, known, finished=True)
    run.tensorboard.mkdir()
    (run.tensorboard / str(step)).touch()
    for file in (run.metrics, run.samples, run.root / LEFT_OUT):
        file.write_text(f"{step}\n", encoding="utf-8")


def what_lies_in(folder: Path) -> tuple[int, ...]:
    """The step that each part of a training in this folder says."""
    return (
        *(int((folder / name).read_text()) for name in LOGS),
        *map(int, os.listdir(folder / "tensorboard")),
        *(found.step for found in committed(folder / "checkpoints")),
    )


def test_a_training_is_never_brought_back_as_that_of_another_recipe(tmp_path: Path) -> None:
    """`--fresh` asks for a new recipe while the old one's training lies there: called after the new
    one, it would be exported as that recipe's model once the new training died.
    """
    run = RunFolder(tmp_path)
    trained(run, 6, ONE)
    assert find_start(run, OTHER, fresh=True) is None
    assert find_start(run, OTHER, fresh=False) is None
    found = find_start(run, ONE, fresh=False)
    assert found is not None
    assert found.step == 6
    assert what_lies_in(run.root) == (6,) * 5


def test_the_markers_of_a_folder_say_whose_it_is_whatever_it_is_called(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    trained(RunFolder(earlier(run) / fingerprint(OTHER)), 6, ONE)
    assert resumable(run, OTHER, ()) is None
    assert find_start(run, OTHER, fresh=False) is None
    assert not run.checkpoints.exists()


def test_the_last_of_several_is_brought_back(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for step in (6, 7, 8):
        trained(run, step, ONE)
        find_start(run, ONE, fresh=True)
    for _ in range(2):
        found = find_start(run, ONE, fresh=False)
        assert found is not None
        assert found.step == 8
        assert find_start(run, OTHER, fresh=False) is None
    assert [what_lies_in(folder)[0] for folder in sorted(earlier(run).iterdir())] == [6, 7, 8]


def test_of_several_the_finished_one_is_brought_back(tmp_path: Path) -> None:
    """What `--fresh` began anew died, another recipe followed, and this one is asked for again."""
    run = RunFolder(tmp_path)
    trained(run, 6, ONE)
    find_start(run, ONE, fresh=True)
    saved(run, 3, ONE, finished=False)
    find_start(run, OTHER, fresh=True)
    told = resumable(run, ONE, ())
    found = find_start(run, ONE, fresh=False)
    assert told is not None
    assert found is not None
    assert found.step == told.step == 6
    assert [committed(folder / "checkpoints")[0].step for folder in earlier(run).iterdir()] == [3]


@pytest.mark.parametrize("allow", [(), ("of",)])
@pytest.mark.parametrize("finished", [True, False])
def test_one_that_lies_there_is_brought_back_in_the_place_of_an_unfinished_one(
    finished: bool, allow: tuple[str, ...], tmp_path: Path
) -> None:
    """To be told of `--fresh` instead would be to pay for it twice, as it would to go on with the
    other one, whatever may change. Nor is that lost.
    """
    run = RunFolder(tmp_path)
    saved(RunFolder(earlier(run) / "of one"), 6, ONE, finished=finished)
    saved(run, 4, OTHER, finished=False)
    for asked, step in ((ONE, 6), (OTHER, 4)):
        told = resumable(run, asked, allow)
        found = find_start(run, asked, fresh=False, allow=allow)
        assert found is not None
        assert told is not None
        assert found.step == told.step == step


@pytest.mark.parametrize("finished", [True, False])
def test_what_is_brought_back_is_compared_where_its_newest_checkpoint_is_damaged(
    finished: bool, tmp_path: Path
) -> None:
    """It changed its recipe on the way, by `resume.allow`, and only the steps before are whole."""
    run = RunFolder(tmp_path)
    aside = RunFolder(earlier(run) / fingerprint(ONE))
    saved(aside, 4, OTHER, finished=finished)
    flip_bit(saved(aside, 6, ONE, finished=True) / "weights", 3)
    if finished:
        assert find_start(run, ONE, fresh=False) is None
    else:
        with pytest.raises(WrongInput, match=r"unfinished training .* of another recipe"):
            find_start(run, ONE, fresh=False)
    found = find_start(run, OTHER, fresh=False)
    assert found is not None
    assert found.step == 4


@pytest.mark.parametrize("asked", [ONE, OTHER])
def test_a_kill_at_any_move_leaves_every_training_whole(
    asked: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One half here and one half there is taken for no training, or for the logs of another."""

    class Killed(BaseException):
        pass

    def moved(kill_at: int, run: RunFolder) -> bool:
        """Bring ONE back in the place of OTHER, and die after some renames; False if there are
        fewer.
        """
        trained(run, 6, ONE)
        find_start(run, OTHER, fresh=False)
        trained(run, 8, OTHER)
        left, rename = iter(range(kill_at)), Path.rename

        def dies(path: Path, target: Path) -> Path:
            if next(left, None) is None:
                raise Killed
            return rename(path, target)

        with monkeypatch.context() as killing:
            killing.setattr(Path, "rename", dies)
            try:
                find_start(run, ONE, fresh=False)
            except Killed:
                return True
        return False

    kills = 0
    while moved(kills, run := RunFolder(tmp_path / str(kills))):
        finish_moves(run)
        found = find_start(run, asked, fresh=False)
        step, other = (6, 8) if asked is ONE else (8, 6)
        assert found is not None
        assert found.step == step
        assert what_lies_in(run.root) == (step,) * 5
        assert [what_lies_in(folder) for folder in earlier(run).iterdir()] == [(other,) * 5]
        kills += 1
    assert kills == 2 * (len(PARTS) + 1)


def test_a_training_finishes_what_a_killed_process_moved(root: Path) -> None:
    recipe = small_recipe(root)
    train(recipe)
    run, logged = recipe.folder, metrics(recipe)
    known = committed(run.checkpoints)[0].commit["identity"]
    half = earlier(run) / f"{fingerprint(known)}{MOVING}"
    half.mkdir(parents=True)
    run.metrics.rename(half / run.metrics.name)
    train(recipe)
    assert metrics(recipe) == logged
    assert not half.exists()


def test_logs_outlive_the_checkpoints_of_a_finished_training(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which were removed for their room."""
    recipe = small_recipe(root, train__steps=2)
    train(recipe)
    run, logged = recipe.folder, recipe.folder.metrics.read_text()
    shutil.rmtree(run.checkpoints)
    for seed in (5, 6):
        find_start(run, identity([], seed=seed), fresh=False)
        run.metrics.write_text('{"step": 1}\n')  # by one that dies before its first checkpoint
    (place,) = earlier(run).iterdir()
    assert (place / "metrics.jsonl").read_text() == logged
    assert capsys.readouterr().err.count("nothing brings that model back") == 1
