"""Checkpoints on disk: one folder each, `step-00000300/`, complete when its commit marker
`COMMIT.json` exists.

Incomplete or damaged checkpoints are reported and skipped in favour of the newest valid one, which
is never deleted. `ingot.checkpoints.writer` writes them, `ingot.checkpoints.reader` reads them.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.base.errors import Failed, WrongInput
from ingot.base.markers import COMMIT, FileEntry, problems, read_marker, write_marker
from ingot.base.progress import say
from ingot.base.runfolder import RunFolder
from ingot.base.storage import fsync_folder

BEFORE = ".before"
"""Suffix of a committed checkpoint that a new one of the same step is about to replace."""
DAMAGED = "damaged-"
"""Prefix of a damaged checkpoint that its training has set aside."""


@dataclass(frozen=True)
class CommittedCheckpoint:
    """A committed checkpoint: folder, step and the contents of its marker."""

    folder: Path
    step: int
    commit: Mapping[str, Any]


def step_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step:08d}"


def remove_folder(folder: Path) -> None:
    """Delete a checkpoint folder, marker first, so that a partly deleted one never counts as
    complete. A file in its place, as a broken copy leaves, goes too.
    """
    if folder.is_file():  # another node may be making the folder at this moment
        folder.unlink(missing_ok=True)
    elif folder.is_dir():
        (folder / COMMIT).unlink(missing_ok=True)
        fsync_folder(folder)
        shutil.rmtree(folder, ignore_errors=True)


def _in_order(checkpoints: Path) -> list[Path]:
    """All checkpoint folders, complete or not, newest first; one that was moved aside follows its
    replacement. A file of such a name, as a broken copy leaves, is none.
    """
    return sorted(
        (
            folder
            for folder in checkpoints.glob("step-*")
            if _step_of(folder.name) >= 0 and folder.is_dir()
        ),
        key=lambda folder: (-_step_of(folder.name), folder.name),
    )


def _step_of(name: str) -> int:
    """The step in a folder's name; -1 if it is not a checkpoint's."""
    number = name.removeprefix(DAMAGED).removeprefix("step-").removesuffix(BEFORE)
    return int(number) if number.isdecimal() else -1


def committed(checkpoints: Path) -> list[CommittedCheckpoint]:
    """All checkpoints with a marker, newest first; their files are not checked."""
    found = ((folder, read_marker(folder, COMMIT)) for folder in _in_order(checkpoints))
    return [
        CommittedCheckpoint(folder, int(commit["step"]), commit)
        for folder, commit in found
        if commit is not None
    ]


def recommit(found: CommittedCheckpoint, fields: Mapping[str, Any]) -> None:
    """Have the marker of a committed checkpoint say `fields` in place of what it said. One move
    replaces it, so that the checkpoint is complete at every moment, and its files stay as they are.
    """
    files = [FileEntry(**entry) for entry in found.commit["files"]]
    write_marker(found.folder, COMMIT, {**found.commit, **fields}, files)


def newest_valid(
    checkpoints: Path, otherwise: str = "start over with --fresh"
) -> CommittedCheckpoint | None:
    """The newest checkpoint whose files all match their checksums; None if none was ever committed.
    Incomplete and damaged ones on the way are reported. `otherwise`: what to do where none can be
    restored.

    Raises:
        Failed: there are checkpoints, and all are damaged.
    """
    damaged = False
    for folder in _in_order(checkpoints):
        found, wrong = _verify(folder)
        if found is not None and not wrong:
            return found
        damaged = damaged or bool(wrong)
        say(
            f"warning: checkpoint {folder} is"
            f" {f'damaged ({wrong[0]})' if wrong else f'not complete (it has no {COMMIT})'}; trying"
            " an older one"
        )
    if damaged:
        raise Failed(f"no checkpoint in {checkpoints} is whole; restore one, or {otherwise}")
    return None


def set_damaged_aside(newest: CommittedCheckpoint) -> None:
    """Rename the checkpoints that stand before `newest`, the newest valid one: they are damaged,
    and whoever compares sizes only would keep and send them in its place.
    """
    for folder in itertools.takewhile(
        lambda folder: folder != newest.folder, _in_order(newest.folder.parent)
    ):
        if (folder / COMMIT).exists():
            aside = folder.with_name(DAMAGED + folder.name)
            remove_folder(aside)
            folder.rename(aside)
            fsync_folder(aside.parent)
            say(f"{folder} is set aside as {aside.name}")


def _verify(folder: Path) -> tuple[CommittedCheckpoint | None, list[str]]:
    """The checkpoint in a folder and its problems, with every file's checksum verified; (None, [])
    if nothing was committed there.
    """
    commit = read_marker(folder, COMMIT)
    if commit is None:
        return None, (
            [f"{folder / COMMIT} is not as it was written"] if (folder / COMMIT).exists() else []
        )
    return CommittedCheckpoint(folder, int(commit["step"]), commit), problems(
        folder, commit, checksums=True
    )


def is_due(commit: Mapping[str, Any]) -> bool:
    """Whether the checkpoint of this marker was made because it was due, and not because training
    ended or was to stop.
    """
    return bool(commit["due"])


def retain(checkpoints: Path, keep: int, best: int | None = None, due: int = 0) -> list[str]:
    """Delete all checkpoints but the newest `keep`, the newest `due` of those that were due and the
    one of step `best`, and the remains of killed saves. Returns the names of the folders kept.

    A checkpoint with missing files or wrong sizes does not count towards `keep`; if none is
    complete, nothing is deleted. Checksums are not verified here.
    """
    there = committed(checkpoints)
    whole = {found.step: found for found in reversed(there) if _is_complete(found)}
    newest = [whole[step] for step in sorted(whole, reverse=True)]
    were_due = (found for found in newest if is_due(found.commit))
    wanted = [*newest[: max(keep, 1)], *itertools.islice(were_due, due)]
    kept = list(dict.fromkeys(found.folder.name for found in wanted))
    if kept:
        kept += [
            found.folder.name
            for found in there
            if found.step == best and found.folder.name not in kept
        ]
        sweep(checkpoints, kept)
    return kept


def sweep(checkpoints: Path, kept: Collection[str]) -> None:
    """Delete checkpoints older than the newest of `kept` that are not in `kept`, damaged ones too;
    also used on a node's own disk, where folders have no marker.
    """
    newest = max(map(_step_of, kept), default=-1)
    damaged = (folder for folder in checkpoints.glob(f"{DAMAGED}step-*") if folder.is_dir())
    for folder in [*_in_order(checkpoints), *damaged]:
        step = _step_of(folder.name)
        if folder.name not in kept and (
            step < newest or (step == newest and folder.name.endswith(BEFORE))
        ):
            remove_folder(folder)


def _is_complete(found: CommittedCheckpoint) -> bool:
    return bool(found.commit.get("scattered")) or not problems(
        found.folder, found.commit, checksums=False
    )


def checkpoint_in(place: Path) -> CommittedCheckpoint:
    """The checkpoint that a path refers to: a checkpoint folder itself, or the newest valid one of
    a run folder.

    Raises:
        WrongInput: there is none.
        Failed: there are checkpoints, and all are damaged.
    """
    found, wrong = _verify(place)
    if wrong:
        raise Failed(f"checkpoint {place} is damaged ({wrong[0]}); take another one")
    if found is not None:
        return found
    checkpoints = place if place.name == "checkpoints" else RunFolder(place).checkpoints
    found = newest_valid(checkpoints, otherwise="take those of another run")
    if found is None:
        raise WrongInput(
            f"{place} holds no checkpoint; give a run folder, or one of the folders in its"
            " checkpoints/"
        )
    return found
