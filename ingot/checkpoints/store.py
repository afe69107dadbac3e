"""Checkpoints on disk: `step-00000300/` by torch's distributed checkpoint, complete when its `COMMIT.json` stands.

Any world size loads what any other wrote. A torn, truncated or changed checkpoint is named and passed over for the newest
valid one; the newest valid one is never deleted.
"""

from __future__ import annotations

import contextlib
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

import ingot
from ingot.base.errors import Failed, WrongInput
from ingot.base.markers import entry_of, problems, read_marker, write_marker
from ingot.base.progress import say
from ingot.base.runfolder import RunFolder
from ingot.base.storage import disk_errors, fsync_folder, fsync_tree
from ingot.checkpoints.state import MODEL, make_room, settle, training_tensors
from ingot.parallel.masters import Masters
from ingot.parallel.mesh import Mesh

COMMIT = "COMMIT.json"


@dataclass(frozen=True)
class Found:
    """A committed checkpoint: its folder, step, and all that its marker says."""

    folder: Path
    step: int
    commit: Mapping[str, Any]


def step_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step:08d}"


def save_checkpoint(checkpoints: Path, step: int, masters: Masters, optimizer: Optimizer, payload: Mapping[str, Any], mesh: Mesh) -> Path:
    """Write and commit the state after `step` optimizer steps; all ranks call it, it returns on all when it is committed.

    `payload` goes into the marker: samples seen, identities, hook states.

    Raises:
        Failed: the disk is full or a file could not be written; earlier checkpoints stay.
    """
    folder = step_folder(checkpoints, step)
    if mesh.is_main:
        shutil.rmtree(folder, ignore_errors=True)  # what a killed save left: it has no marker
        with disk_errors(folder):
            folder.mkdir(parents=True)
    mesh.barrier()
    with disk_errors(folder):
        try:
            with _alone_is_meant():
                save(dict(training_tensors(masters, optimizer)), checkpoint_id=folder, no_dist=mesh.world == 1)
        except CheckpointException as error:
            raise next((cause for cause, _ in error.failures.values() if isinstance(cause, OSError)), error) from error
    if mesh.is_main:
        with disk_errors(folder):
            fsync_tree(folder)
            files = [entry_of(folder, str(path.relative_to(folder))) for path in sorted(folder.rglob("*")) if path.is_file()]
            about = {
                "step": step, "world": mesh.world, "layout": mesh.degrees.told(), "torch": torch.__version__, "ingot": ingot.__version__, "time": time.time(),
            }
            write_marker(folder, COMMIT, {**about, **payload}, files)
            fsync_folder(checkpoints)
    mesh.barrier()
    return folder


def committed(checkpoints: Path) -> list[Found]:
    """All checkpoints with a marker, newest first; their files are not looked at."""
    found = []
    for folder in checkpoints.glob("step-*"):
        commit = read_marker(folder, COMMIT)
        if commit is not None:
            found.append(Found(folder, int(commit["step"]), commit))
    return sorted(found, key=lambda item: -item.step)


def newest_valid(checkpoints: Path) -> Found | None:
    """The newest checkpoint whose every byte is as written. Broken ones on the way are named; None when there are none at all.

    Raises:
        Failed: there are checkpoints, and not one is whole.
    """
    candidates = committed(checkpoints)
    for found in candidates:
        wrong = problems(found.folder, found.commit, checksums=True)
        if not wrong:
            return found
        say(f"warning: checkpoint {found.folder} is damaged ({wrong[0]}); trying an older one")
    if candidates:
        raise Failed(f"no checkpoint in {checkpoints} is whole; restore one, or start over with --fresh")
    return None


def load_checkpoint(found: Found, masters: Masters, optimizer: Optimizer | None, mesh: Mesh) -> None:
    """Fill weights and optimizer in place, whatever layout wrote the checkpoint; without an optimizer, the weights alone.

    Each rank reads its own part. All ranks call it.

    Raises:
        Failed: tensors are missing or of another shape; all are named, none is loaded.
    """
    reader = FileSystemReader(str(found.folder))
    stored = reader.read_metadata().state_dict_metadata
    if optimizer is not None:
        make_room(masters, optimizer, stored)
    tensors = training_tensors(masters, optimizer)
    there = {name: about for name, about in stored.items() if optimizer is not None or name.startswith(MODEL)}
    if wrong := _misfits(tensors, there, mesh):
        more = f" and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise Failed(f"checkpoint {found.folder} does not fit this model: {'; '.join(wrong[:8])}{more}; use --fresh, or the recipe that wrote it")
    with _alone_is_meant():
        load(dict(tensors), storage_reader=reader, no_dist=mesh.world == 1)
    settle(masters, optimizer, tensors)
    masters.publish()


def _misfits(tensors: Mapping[str, Tensor], there: Mapping[str, Any], mesh: Mesh) -> list[str]:
    """What differs between the tensors of this rank and the stored ones, which all stages of a pipeline together must have."""
    names = sorted(there)
    wrong = [f"{name} is missing" for name in sorted(tensors.keys() - there.keys())]
    wrong += [
        f"{name} is {list(size)}, {list(tensors[name].shape)} is wanted"
        for name in names if name in tensors and (size := getattr(there[name], "size", None)) is not None and size != tensors[name].shape
    ]
    elsewhere, *holders = mesh.pipeline.agree(len(wrong), *(float(name in tensors) for name in names))
    unknown = [f"{name} is not part of this model" for name, count in zip(names, holders, strict=True) if not count]
    # Where only another stage has something to tell, this one stops with it.
    return [*wrong, *unknown] or ["another stage of the pipeline says what"] * bool(elsewhere)


class WholeWeights:
    """The weights in a checkpoint, each whole, one at a time and for one process alone, whatever layout wrote them."""

    def __init__(self, folder: Path) -> None:
        self._reader = _ReadOnce(str(folder))
        self._stored = self._reader.read_metadata().state_dict_metadata

    def __getitem__(self, name: str) -> Tensor:
        """A parameter by its name in the model, in the type it was trained in."""
        about: Any = self._stored[MODEL + name]
        tensor = torch.empty(about.size, dtype=about.properties.dtype)
        with _alone_is_meant():
            load({MODEL + name: tensor}, storage_reader=self._reader, no_dist=True)
        return tensor


class _ReadOnce(FileSystemReader):
    """Does not read again what tells where each tensor lies: it grows with tensors times ranks."""

    _kept: Metadata | None = None

    def read_metadata(self, *arguments: Any, **knobs: Any) -> Metadata:
        if self._kept is None:
            self._kept = super().read_metadata(*arguments, **knobs)
        return self._kept


@contextlib.contextmanager
def _alone_is_meant() -> Iterator[None]:
    """torch warns when one process saves for itself; here that is no oversight."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def retain(checkpoints: Path, keep: int, best: int | None = None) -> None:
    """Delete all but the newest `keep` committed checkpoints and that of step `best`, and what killed saves left behind them.

    The marker goes first, so that a half-deleted checkpoint is never taken for a whole one.
    """
    found = committed(checkpoints)
    kept = {item.folder for number, item in enumerate(found) if number < keep or item.step == best}
    for old in (item for item in found if item.folder not in kept):
        (old.folder / COMMIT).unlink(missing_ok=True)
        fsync_folder(old.folder)
        shutil.rmtree(old.folder, ignore_errors=True)
    newest = found[0].step if found else -1
    for folder in checkpoints.glob("step-*"):
        if folder not in kept and folder < step_folder(checkpoints, newest):
            shutil.rmtree(folder, ignore_errors=True)


def checkpoint_in(place: Path) -> Found:
    """The checkpoint that a path means: a checkpoint folder itself, or the newest whole one of a run folder.

    Raises:
        WrongInput: there is none.
        Failed: there are checkpoints, and not one is whole.
    """
    commit = read_marker(place, COMMIT)
    if commit is not None:
        if wrong := problems(place, commit, checksums=True):
            raise Failed(f"checkpoint {place} is damaged ({wrong[0]}); take another one")
        return Found(place, int(commit["step"]), commit)
    checkpoints = place if place.name == "checkpoints" else RunFolder(place).checkpoints
    found = newest_valid(checkpoints)
    if found is None:
        raise WrongInput(f"{place} holds no checkpoint; give a run folder, or one of the folders in its checkpoints/")
    return found
