"""Checkpoints on disk: a folder `step-00000300/` each, complete when its `COMMIT.json` stands.

A torn, truncated or changed checkpoint is named and passed over for the newest valid one; the
newest valid one is never deleted. Writing is `ingot.checkpoints.writer`'s, reading
`ingot.checkpoints.reader`'s.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.base.errors import Failed, WrongInput
from ingot.base.markers import problems, read_marker
from ingot.base.progress import say
from ingot.base.runfolder import RunFolder
from ingot.base.storage import fsync_folder

COMMIT = "COMMIT.json"
BEFORE = ".before"
"""Ends the name of a checkpoint that another one of the same step is about to replace."""


@dataclass(frozen=True)
class CommittedCheckpoint:
    """A committed checkpoint: its folder, step, and all that its marker says."""

    folder: Path
    step: int
    commit: Mapping[str, Any]


def step_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step:08d}"


def remove_folder(folder: Path) -> None:
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


def committed(checkpoints: Path) -> list[CommittedCheckpoint]:
    """All checkpoints with a marker, newest first; their files are not looked at."""
    found = ((folder, read_marker(folder, COMMIT)) for folder in _in_order(checkpoints))
    return [
        CommittedCheckpoint(folder, int(commit["step"]), commit)
        for folder, commit in found
        if commit is not None
    ]


def newest_valid(checkpoints: Path) -> CommittedCheckpoint | None:
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


def _looked_at(folder: Path) -> tuple[CommittedCheckpoint | None, list[str]]:
    """What a folder says that it holds, and what is wrong with it, every byte read; (None, [])
    where nothing was ever committed.
    """
    commit = read_marker(folder, COMMIT)
    if commit is None:
        return None, (
            [f"{folder / COMMIT} is not as it was written"] if (folder / COMMIT).exists() else []
        )
    return CommittedCheckpoint(folder, int(commit["step"]), commit), problems(
        folder, commit, checksums=True
    )


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
            remove_folder(folder)


def _seems_whole(found: CommittedCheckpoint) -> bool:
    return bool(found.commit.get("scattered")) or not problems(
        found.folder, found.commit, checksums=False
    )


def checkpoint_in(place: Path) -> CommittedCheckpoint:
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
