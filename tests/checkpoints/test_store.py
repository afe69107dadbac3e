"""Checkpoints: what is written comes back bit for bit in any world, and what is broken is never taken for whole."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot.base.environment import Ranks
from ingot.base.errors import Failed
from ingot.checkpoints.state import training_tensors
from ingot.checkpoints.store import COMMIT, committed, load_checkpoint, newest_valid, retain, save_checkpoint, step_folder
from ingot.config.work import SGD, AdamW
from ingot.models.architecture import DecoderConfig
from ingot.models.decoder import Decoder
from ingot.models.initial import initialise
from ingot.parallel.masters import Master, Masters
from ingot.parallel.mesh import Mesh, running_mesh
from ingot.train.optim import make_optimizer
from tests.ranks import run_ranks

CONFIG = {
    "model_type": "llama", "vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1,
}


def trained(seed: int, kind: str = "adamw", tied: bool = False) -> tuple[Masters, torch.optim.Optimizer]:
    """A model whose optimizer has state, as after a few steps; gradients are made up."""
    model = Decoder(DecoderConfig.from_hf({**CONFIG, "tie_word_embeddings": tied}))
    initialise(model, seed)
    masters = Masters(model, Mesh(Ranks(), torch.device("cpu")))
    optimizer = make_optimizer(AdamW(lr=1e-2) if kind == "adamw" else SGD(kind="sgd", lr=0.1, momentum=0.9), masters)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return masters, optimizer


def save(folder: Path, step: int, seed: int = 0, **kinds: Any) -> dict[str, torch.Tensor]:
    with running_mesh() as mesh:
        masters, optimizer = trained(seed, **kinds)
        save_checkpoint(folder, step, masters, optimizer, {"samples": step}, mesh)
        return {name: tensor.clone() for name, tensor in training_tensors(masters, optimizer).items()}


def load(folder: Path, **kinds: Any) -> dict[str, torch.Tensor]:
    """Into a fresh model with other weights and an optimizer without state."""
    with running_mesh() as mesh:
        masters, _ = trained(99, **kinds)
        optimizer = make_optimizer(AdamW(lr=1e-2) if kinds.get("kind", "adamw") == "adamw" else SGD(kind="sgd", lr=0.1, momentum=0.9), masters)
        found = newest_valid(folder)
        assert found is not None
        load_checkpoint(found, masters, optimizer, mesh)
        return training_tensors(masters, optimizer)


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name
        assert one[name].dtype == other[name].dtype


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_everything_comes_back_bit_for_bit(kind: str, tied: bool, tmp_path: Path) -> None:
    written = save(tmp_path, 3, kind=kind, tied=tied)
    assert any(name.startswith("optimizer.") for name in written)
    assert ("model.lm_head.weight" in written) != tied
    assert_equal(load(tmp_path, kind=kind, tied=tied), written)


@pytest.mark.parametrize(("writers", "readers"), [(2, 1), (1, 2), (2, 3)])
def test_any_world_loads_what_any_other_wrote(writers: int, readers: int, tmp_path: Path) -> None:
    written = run_ranks(writers, save, tmp_path, 3)[0] if writers > 1 else save(tmp_path, 3)
    for tensors in run_ranks(readers, load, tmp_path) if readers > 1 else [load(tmp_path)]:
        assert_equal(tensors, written)


def data_file(folder: Path) -> Path:
    return max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)


def truncate(folder: Path) -> None:
    file = data_file(folder)
    file.write_bytes(file.read_bytes()[:-1])


def flip_a_bit(folder: Path) -> None:
    file = data_file(folder)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def remove_a_file(folder: Path) -> None:
    data_file(folder).unlink()


def remove_marker(folder: Path) -> None:
    (folder / COMMIT).unlink()


def tear_marker(folder: Path) -> None:
    marker = folder / COMMIT
    marker.write_bytes(marker.read_bytes()[:40])


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, remove_a_file, remove_marker, tear_marker])
def test_a_damaged_checkpoint_is_passed_over(damage: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, 1, seed=1)
    save(tmp_path, 2, seed=2)
    damage(step_folder(tmp_path, 2))
    found = newest_valid(tmp_path)
    assert found is not None
    assert found.step == 1
    if damage in (truncate, flip_a_bit, remove_a_file):
        assert "step-00000002 is damaged" in capsys.readouterr().err


def test_with_none_whole_it_stops_and_says_so(tmp_path: Path) -> None:
    save(tmp_path, 1)
    flip_a_bit(step_folder(tmp_path, 1))
    with pytest.raises(Failed, match=r"no checkpoint in .* is whole"):
        newest_valid(tmp_path)


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


def test_the_newest_are_kept_and_leftovers_go(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    leftover = step_folder(tmp_path, 2)
    remove_marker(leftover)
    newer = step_folder(tmp_path, 9)
    newer.mkdir()  # being written by a save that goes on
    retain(tmp_path, 2)
    assert [found.step for found in committed(tmp_path)] == [4, 3]
    assert not leftover.exists()
    assert newer.exists()


def test_marker_tells_what_is_in_it(tmp_path: Path) -> None:
    save(tmp_path, 7)
    commit = json.loads((step_folder(tmp_path, 7) / COMMIT).read_text())
    assert commit["schema"] == 1
    assert commit["step"] == commit["samples"] == 7
    on_disk = {path.name for path in step_folder(tmp_path, 7).iterdir()} - {COMMIT}
    assert {entry["path"] for entry in commit["files"]} == on_disk


def test_another_models_checkpoint_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 1, tied=True)
    with pytest.raises(Failed, match=r"does not fit this model: model\.lm_head\.weight"):
        load(tmp_path, tied=False)


def test_a_full_disk_is_said_in_one_line_and_earlier_checkpoints_stay(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], capture_output=True, check=False).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        save(disk / "checkpoints", 1)
        free = shutil.disk_usage(disk).free
        (disk / "other").write_bytes(b"x" * (free - 20_000))
        with pytest.raises(Failed, match=r"disk full while writing .*step-00000002; make space and run the same command again"):
            save(disk / "checkpoints", 2)
        found = newest_valid(disk / "checkpoints")
        assert found is not None
        assert found.step == 1
        (disk / "other").unlink()
        save(disk / "checkpoints", 2)
        assert [found.step for found in committed(disk / "checkpoints")] == [2, 1]
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_what_is_loaded_into_a_copy_is_brought_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where masters are on the host and parameters on a device: what torch spreads is a copy of them."""
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
