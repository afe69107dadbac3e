"""Checkpoints: what is written comes back bit for bit in any world, and what is broken is never
taken for whole.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from ingot.base.errors import Failed, WrongInput
from ingot.base.markers import COMMIT, FileEntry
from ingot.checkpoints.reader import load_checkpoint
from ingot.checkpoints.state import training_tensors
from ingot.checkpoints.store import (
    checkpoint_in,
    committed,
    newest_valid,
    remove_folder,
    retain,
    step_folder,
)
from ingot.config.sections.training import AdamW
from ingot.models.native.config import DecoderConfig
from ingot.models.native.decoder import Decoder
from ingot.models.parameters import init_weights
from ingot.parallel.masters import Master, Masters
from ingot.parallel.mesh import running_mesh
from ingot.train.optim.optimizers import make_optimizer
from tests.checkpoints.states import CONFIG, assert_equal, flip_bit, load, save, trained
from tests.markers import changed
from tests.ranks import run_ranks


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_everything_comes_back_bit_for_bit(kind: str, tied: bool, tmp_path: Path) -> None:
    written = save(tmp_path, 3, kind=kind, tied=tied)
    assert any(name.startswith("optimizer.") for name in written)
    assert ("model.lm_head.weight" in written) != tied
    assert_equal(load(tmp_path, kind=kind, tied=tied), written)


@pytest.mark.drawn
@pytest.mark.parametrize(("writers", "readers"), [(2, 1), (1, 2), (2, 3)])
def test_any_world_loads_what_any_other_wrote(writers: int, readers: int, tmp_path: Path) -> None:
    written = run_ranks(writers, save, tmp_path, 3)[0] if writers > 1 else save(tmp_path, 3)
    for tensors in run_ranks(readers, load, tmp_path) if readers > 1 else [load(tmp_path)]:
        assert_equal(tensors, written)


def test_no_checkpoints_at_all_is_a_first_start(tmp_path: Path) -> None:
    assert newest_valid(tmp_path / "checkpoints") is None


def test_saving_over_what_a_killed_save_left(tmp_path: Path) -> None:
    folder = step_folder(tmp_path, 5)
    folder.mkdir(parents=True)
    (folder / "__9_9.distcp").write_bytes(b"half")
    save(tmp_path, 5)
    found = newest_valid(tmp_path)
    assert found is not None
    assert "__9_9.distcp" not in {entry["path"] for entry in found.commit["files"]}
    assert not (folder / "__9_9.distcp").exists()


def test_a_folder_that_another_node_makes_meanwhile_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is there once one has looked whether it is."""
    made = tmp_path / "step-00000002"
    made.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "is_dir", lambda _: False)
        remove_folder(made)
    assert made.is_dir()


def test_saving_where_a_file_has_the_name_of_a_checkpoint(tmp_path: Path) -> None:
    step_folder(tmp_path, 5).write_bytes(b"")
    step_folder(tmp_path, 5).with_suffix(".before").write_bytes(b"")
    for _ in range(2):
        save(tmp_path, 5)
    assert steps(tmp_path) == [5]


def steps(folder: Path) -> list[int]:
    return [found.step for found in committed(folder)]


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 1 to 4; read only."""
    folder = tmp_path_factory.mktemp("four")
    for step in (1, 2, 3, 4):
        save(folder, step)
    return folder


@pytest.fixture
def made(four: Path, tmp_path: Path) -> Path:
    """The same, for a test of its own."""
    return shutil.copytree(four, tmp_path / "checkpoints")


def test_the_newest_are_kept_and_leftovers_go(made: Path) -> None:
    leftover = step_folder(made, 2)
    (leftover / COMMIT).unlink()
    newer = step_folder(made, 9)
    newer.mkdir()  # being written by a save that goes on
    (made / "step-by-step").mkdir()  # none of ours
    copies = [made / "step-00000001.before", made / "damaged-step-00000001"]
    for copy in copies:
        copy.write_bytes(b"")  # nor is what a broken copy left
    assert retain(made, 2) == ["step-00000004", "step-00000003"]
    assert steps(made) == [4, 3]
    assert not leftover.exists()
    assert newer.exists()
    assert (made / "step-by-step").exists()
    assert all(copy.exists() for copy in copies)


@pytest.mark.parametrize(
    ("keep", "best", "left"),
    [
        (1, None, [4]),
        (1, 2, [4, 2]),
        (2, 3, [4, 3]),
        (9, None, [4, 3, 2, 1]),
        (0, None, [4]),
        (1, 77, [4]),
    ],
)
def test_the_best_stays_beside_the_newest_and_one_always_stays(
    keep: int, best: int | None, left: list[int], made: Path
) -> None:
    retain(made, keep, best)
    assert steps(made) == left
    assert len(list(made.iterdir())) == len(left)


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_what_lacks_files_does_not_count_towards_keep(damage: str, made: Path) -> None:
    for step in (4, 3):
        file = step_folder(made, step) / "__0_0.distcp"
        if damage == "missing":
            file.unlink()
        else:
            file.write_bytes(file.read_bytes()[:-1])
    retain(made, 1)
    assert step_folder(made, 2).exists(), "the newest whole one"
    assert not step_folder(made, 1).exists()
    found = newest_valid(made)
    assert found is not None
    assert found.step == 2


def test_what_other_nodes_hold_is_not_lacking(made: Path) -> None:
    """Where nodes have their own disks, rank 0 sees its own files alone."""
    newest = step_folder(made, 4)
    changed(newest, COMMIT, scattered=True)
    (newest / "__0_0.distcp").unlink()
    assert retain(made, 1) == [newest.name]


def test_where_none_is_whole_training_does_not_begin_anew(made: Path) -> None:
    for folder in made.iterdir():
        flip_bit(next(folder.glob("*.distcp")), 9)
    with pytest.raises(Failed, match="is whole; restore one, or start over with --fresh"):
        newest_valid(made)


def test_where_none_is_whole_none_goes(made: Path) -> None:
    for step in (1, 2, 3, 4):
        (step_folder(made, step) / ".metadata").unlink()
    assert retain(made, 1) == []
    assert steps(made) == [4, 3, 2, 1]


def test_the_marker_of_what_goes_is_gone_for_good_before_any_file_is(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However deletion is cut short, nothing half-deleted is taken for whole."""
    said: list[tuple[str, bool, int]] = []
    monkeypatch.setattr(
        "ingot.checkpoints.store.fsync_folder",
        lambda folder: said.append(
            ("fsync", (folder / COMMIT).exists(), len(list(folder.iterdir())))
        ),
    )
    monkeypatch.setattr(
        shutil,
        "rmtree",
        lambda folder, ignore_errors: said.append(
            ("delete", (folder / COMMIT).exists(), len(list(folder.iterdir())))
        ),
    )
    retain(made, 3)
    assert said == [("fsync", False, 2), ("delete", False, 2)]


def test_saving_a_step_again_keeps_the_one_before_until_the_new_one_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = save(tmp_path, 5, seed=1)
    with monkeypatch.context() as patched:
        patched.setattr(
            "ingot.checkpoints.writer.write_tensors",
            lambda *arguments: (_ for _ in ()).throw(OSError(28, "No space left on device")),
        )
        with pytest.raises(Failed, match="disk full"):
            save(tmp_path, 5, seed=2)
    assert_equal(load(tmp_path), first)
    assert retain(tmp_path, 1) == ["step-00000005.before"]
    assert_equal(load(tmp_path), first)
    second = save(tmp_path, 5, seed=2)
    assert_equal(load(tmp_path), second)
    assert [folder.name for folder in tmp_path.iterdir()] == ["step-00000005"]


def test_what_was_moved_aside_goes_though_a_kill_came_before(made: Path) -> None:
    aside = shutil.copytree(step_folder(made, 4), made / "step-00000004.before")
    assert retain(made, 2) == ["step-00000004", "step-00000003"]
    assert not aside.exists()


def test_a_file_that_rank_0_does_not_see_is_no_part_of_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where each node has a disk of its own."""
    save(tmp_path, 1)
    monkeypatch.setattr(
        "ingot.checkpoints.writer.write_tensors",
        lambda folder, tensors, line: [FileEntry("__8_0.distcp", 3, "0" * 64)],
    )
    with pytest.raises(
        Failed,
        match=(
            r"__8_0\.distcp is missing as rank 0 sees it, .* a disk that all nodes share, or set"
            r" checkpoint\.upload"
        ),
    ):
        save(tmp_path, 2)
    assert steps(tmp_path) == [1]
    assert not step_folder(tmp_path, 2).exists()


def test_a_damaged_checkpoint_that_is_asked_for_by_name_is_refused(made: Path) -> None:
    marker = step_folder(made, 4) / COMMIT
    flip_bit(marker, 100)
    with pytest.raises(
        Failed,
        match=(
            r"step-00000004 is damaged \(.*COMMIT\.json is not as it was written\); take"
            r" another one"
        ),
    ):
        checkpoint_in(step_folder(made, 4))
    assert checkpoint_in(step_folder(made, 3)).step == checkpoint_in(made).step == 3


def test_marker_tells_what_is_in_it(tmp_path: Path) -> None:
    save(tmp_path, 7)
    commit = json.loads((step_folder(tmp_path, 7) / COMMIT).read_text())
    assert commit["schema"] == 1
    assert commit["step"] == commit["samples"] == 7
    on_disk = {path.name for path in step_folder(tmp_path, 7).iterdir()} - {COMMIT}
    assert {entry["path"] for entry in commit["files"]} == on_disk


def test_another_models_checkpoint_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 1, tied=True)
    with pytest.raises(WrongInput, match=r"does not fit this model: model\.lm_head\.weight"):
        load(tmp_path, tied=False)


def test_a_model_has_what_was_loaded_into_its_masters(tmp_path: Path) -> None:
    """Where it works with copies of them in a narrower type."""
    written = save(tmp_path, 3)
    model = Decoder(DecoderConfig.from_hf(CONFIG))
    init_weights(model, 99)
    found = newest_valid(tmp_path)
    assert found is not None
    with running_mesh() as mesh:
        load_checkpoint(found, Masters(model, mesh, working=torch.bfloat16), None, mesh)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, written[f"model.{name}"].bfloat16()), name


def test_what_is_loaded_into_a_copy_is_brought_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where masters are on the host and parameters on a device: what torch spreads is a copy of
    them.
    """
    written = save(tmp_path, 3)
    monkeypatch.setattr(Master, "spread", lambda self, tensor: tensor.clone())
    with running_mesh() as mesh:
        masters, _ = trained(99)
        optimizer = make_optimizer(AdamW(lr=1e-2), masters)
        found = newest_valid(tmp_path)
        assert found is not None
        load_checkpoint(found, masters, optimizer, mesh)
    monkeypatch.undo()
    assert_equal(training_tensors(masters, optimizer), written)
