"""Checkpoints on disk: `step-00000300/` by torch's distributed checkpoint, complete when its
`COMMIT.json` stands.

Any world size loads what any other wrote. A torn, truncated or changed checkpoint is named and
passed over for the newest valid one; the newest valid one is never deleted.
"""

from __future__ import annotations

import contextlib
import shutil
import time
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.optim import Optimizer

import ingot
from ingot.base.errors import Failed, WrongInput
from ingot.base.markers import FileEntry, problems, read_marker, write_marker
from ingot.base.progress import say
from ingot.base.runfolder import RunFolder
from ingot.base.storage import disk_errors, fsync_folder
from ingot.checkpoints.state import MODEL, make_room, misfits, settle, training_tensors
from ingot.checkpoints.together import together
from ingot.checkpoints.writer import write_tensors
from ingot.parallel.masters import Masters
from ingot.parallel.mesh import Mesh

COMMIT = "COMMIT.json"
BEFORE = ".before"
"""Ends the name of a checkpoint that another one of the same step is about to replace."""


@dataclass(frozen=True)
class Found:
    """A committed checkpoint: its folder, step, and all that its marker says."""

    folder: Path
    step: int
    commit: Mapping[str, Any]


def step_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step:08d}"


@dataclass(frozen=True)
class Written:
    """A checkpoint that was committed just now."""

    folder: Path
    mine: list[str]
    """Names of the files that this rank wrote, but for the marker."""
    bytes: int
    """Of all files of all ranks, but for the marker."""


def write_checkpoint(
    checkpoints: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    payload: Mapping[str, Any],
    line: Mesh,
    *,
    scattered: bool = False,
) -> Written:
    """Write tensors and marker as checkpoint `step`, durably; all ranks of `line` call it. What was
    begun is removed if it cannot be ended.

    `scattered`: the nodes may have a disk each, and meet elsewhere; without, rank 0 must see all
    files.

    Raises:
        Failed: the disk is full, on any rank; or rank 0 does not see what others wrote.
        WrongInput: the folder may not be written, or something else stands in its place.
    """
    folder = step_folder(checkpoints, step)
    with disk_errors(folder):
        together(line, lambda: _begin(folder, line), lambda _: None)
        try:
            mine = write_tensors(folder, tensors, line)
            about = {
                "step": step,
                "world": line.world,
                "layout": line.degrees.told(),
                "torch": torch.__version__,
                "ingot": ingot.__version__,
                "time": time.time(),
            }
            size = together(
                line,
                lambda: mine,
                lambda everyone: _commit(
                    folder, {**about, **payload}, list(chain(*everyone)), scattered=scattered
                ),
            )
        except Exception:
            with contextlib.suppress(
                Exception
            ):  # nobody writes any more; if the line itself is dead, the next save makes way
                together(
                    line,
                    lambda: _remove(folder) if line.ranks.local_rank == 0 else None,
                    lambda _: None,
                )
            raise
    return Written(folder, [entry.path for entry in mine], size)


def _begin(folder: Path, line: Mesh) -> None:
    """An empty folder on every node. A checkpoint of the same step that stands there is moved
    aside, where it still counts.
    """
    if line.ranks.local_rank != 0:
        return
    if read_marker(folder, COMMIT) is not None:
        before = folder.with_name(folder.name + BEFORE)
        _remove(before)
        folder.rename(before)
    _remove(folder)  # what a killed save left
    folder.mkdir(parents=True, exist_ok=True)
    fsync_folder(folder.parent)
    fsync_folder(folder.parent.parent)


def _commit(
    folder: Path, about: Mapping[str, Any], files: Sequence[FileEntry], *, scattered: bool
) -> int:
    """On rank 0, when all files are durable; their bytes."""
    files = sorted(files, key=lambda entry: entry.path)
    unseen = problems(folder, {"files": [asdict(entry) for entry in files]}, checksums=False)
    if unseen and not scattered:
        raise Failed(
            f"{unseen[0]} as rank 0 sees it, though another rank wrote it; put `output` on a disk"
            " that all nodes share, or set checkpoint.upload"
        )
    write_marker(folder, COMMIT, {**about, **({"scattered": True} if unseen else {})}, files)
    fsync_folder(folder.parent)
    _remove(folder.with_name(folder.name + BEFORE))
    return sum(entry.bytes for entry in files)


def _remove(folder: Path) -> None:
    """The marker goes first, so that a half-deleted checkpoint is never taken for a whole one."""
    if folder.exists():
        (folder / COMMIT).unlink(missing_ok=True)
        fsync_folder(folder)
        shutil.rmtree(folder, ignore_errors=True)


def _in_order(checkpoints: Path) -> list[Path]:
    """All folders of checkpoints, whole or not, newest first; one that was moved aside comes after
    the one that came in its place.
    """
    return sorted(
        (folder for folder in checkpoints.glob("step-*") if _step_of(folder.name) >= 0),
        key=lambda folder: (-_step_of(folder.name), folder.name),
    )


def _step_of(name: str) -> int:
    """By the name of a folder; -1 where it is none of ours."""
    number = name.removeprefix("step-").removesuffix(BEFORE)
    return int(number) if number.isdecimal() else -1


def committed(checkpoints: Path) -> list[Found]:
    """All checkpoints with a marker, newest first; their files are not looked at."""
    found = ((folder, read_marker(folder, COMMIT)) for folder in _in_order(checkpoints))
    return [
        Found(folder, int(commit["step"]), commit) for folder, commit in found if commit is not None
    ]


def newest_valid(checkpoints: Path) -> Found | None:
    """The newest checkpoint whose every byte is as written. Broken ones on the way are named; None
    when none was ever committed.

    Raises:
        Failed: there are checkpoints, and not one is whole.
    """
    damaged = False
    for folder in _in_order(checkpoints):
        found, wrong = _looked_at(folder)
        if found is not None and not wrong:
            return found
        damaged = damaged or bool(wrong)
        say(
            f"warning: checkpoint {folder} is"
            f" {f'damaged ({wrong[0]})' if wrong else f'not complete (it has no {COMMIT})'}; trying"
            " an older one"
        )
    if damaged:
        raise Failed(
            f"no checkpoint in {checkpoints} is whole; restore one, or start over with --fresh"
        )
    return None


def _looked_at(folder: Path) -> tuple[Found | None, list[str]]:
    """What a folder says that it holds, and what is wrong with it, every byte read; (None, [])
    where nothing was ever committed.
    """
    commit = read_marker(folder, COMMIT)
    if commit is None:
        return None, (
            [f"{folder / COMMIT} is not as it was written"] if (folder / COMMIT).exists() else []
        )
    return Found(folder, int(commit["step"]), commit), problems(folder, commit, checksums=True)


def load_checkpoint(
    found: Found, masters: Masters, optimizer: Optimizer | None, mesh: Mesh
) -> None:
    """Fill weights and optimizer in place, whatever layout wrote the checkpoint; without an
    optimizer, the weights alone.

    Each rank reads its own part. All ranks call it.

    Raises:
        Failed: tensors are missing or of another shape; all are named, none is loaded.
    """
    reader = FileSystemReader(str(found.folder))
    stored = reader.read_metadata().state_dict_metadata
    if optimizer is not None:
        make_room(masters, optimizer, stored)
    tensors = training_tensors(masters, optimizer)
    there = {
        name: about
        for name, about in stored.items()
        if optimizer is not None or name.startswith(MODEL)
    }
    if wrong := misfits(tensors, there, mesh):
        more = f" and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise Failed(
            f"checkpoint {found.folder} does not fit this model: {'; '.join(wrong[:8])}{more}; use"
            " --fresh, or the recipe that wrote it"
        )
    with _alone_is_meant():
        load(dict(tensors), storage_reader=reader, no_dist=mesh.world == 1)
    settle(masters, optimizer, tensors)
    masters.publish()


class StoredTensors:
    """The tensors in a checkpoint by their names there, each whole, one at a time and for one
    process alone, whatever layout wrote them.
    """

    def __init__(self, folder: Path) -> None:
        self._reader = _ReadOnce(str(folder))
        self._stored = self._reader.read_metadata().state_dict_metadata

    @property
    def names(self) -> Collection[str]:
        return self._stored.keys()

    def __getitem__(self, name: str) -> Tensor:
        about: Any = self._stored[name]
        tensor = torch.empty(about.size, dtype=about.properties.dtype)
        with _alone_is_meant():
            load({name: tensor}, storage_reader=self._reader, no_dist=True)
        return tensor


class WholeWeights(StoredTensors):
    """The weights among them, by their names in the model, in the type they were trained in."""

    def __getitem__(self, name: str) -> Tensor:
        return super().__getitem__(MODEL + name)


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


def retain(checkpoints: Path, keep: int, best: int | None = None) -> list[str]:
    """Delete all but the newest `keep` checkpoints and that of step `best`, and what killed saves
    left behind them; the names that are kept.

    One whose files are missing or of another size does not count, and where none is whole, none
    goes. The newest one is trusted to
    be as it was written: its bytes are not read.
    """
    there = committed(checkpoints)
    whole = {found.step: found.folder.name for found in reversed(there) if _seems_whole(found)}
    kept = [whole[step] for step in sorted(whole, reverse=True)[: max(keep, 1)]]
    if kept:
        kept += [
            found.folder.name
            for found in there
            if found.step == best and found.folder.name not in kept
        ]
        sweep(checkpoints, kept)
    return kept


def sweep(checkpoints: Path, kept: Collection[str]) -> None:
    """Delete what is older than the newest of the folders named and is not among them; also on a
    node's own disk, where there is no marker.
    """
    newest = max(map(_step_of, kept), default=-1)
    for folder in _in_order(checkpoints):
        step = _step_of(folder.name)
        if folder.name not in kept and (
            step < newest or (step == newest and folder.name.endswith(BEFORE))
        ):
            _remove(folder)


def _seems_whole(found: Found) -> bool:
    return bool(found.commit.get("scattered")) or not problems(
        found.folder, found.commit, checksums=False
    )


def checkpoint_in(place: Path) -> Found:
    """The checkpoint that a path means: a checkpoint folder itself, or the newest whole one of a
    run folder.

    Raises:
        WrongInput: there is none.
        Failed: there are checkpoints, and not one is whole.
    """
    found, wrong = _looked_at(place)
    if wrong:
        raise Failed(f"checkpoint {place} is damaged ({wrong[0]}); take another one")
    if found is not None:
        return found
    checkpoints = place if place.name == "checkpoints" else RunFolder(place).checkpoints
    found = newest_valid(checkpoints)
    if found is None:
        raise WrongInput(
            f"{place} holds no checkpoint; give a run folder, or one of the folders in its"
            " checkpoints/"
        )
    return found
