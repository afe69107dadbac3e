"""Earlier trainings of a run folder: each is set aside with its checkpoints and logs in a folder of
`earlier/`, and brought back when its recipe is used again. Nothing is deleted.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ingot.base.markers import fingerprint
from ingot.base.progress import say
from ingot.base.runfolder import SET_ASIDE, RunFolder
from ingot.base.runlog import read_lines
from ingot.base.storage import fsync_folder
from ingot.checkpoints.store import (
    CommittedCheckpoint,
    committed,
    newest_valid,
    set_damaged_aside,
)
from ingot.config.models.lineage import read_lineage

LEFT_OUT = "left_out.json"
"""File in the run folder that lists the samples a roll-back has left out."""
PARTS = ("metrics.jsonl", "samples.jsonl", "tensorboard", LEFT_OUT, "checkpoints")
"""What belongs to one training of a run folder. Checkpoints come last, and are moved last in either
direction: a folder without them counts as logs only.
"""
MOVING = ".moving"
"""Suffix of a folder in `earlier/` while a training is moved into it or out of it."""


def set_aside(run: RunFolder, identity: Mapping[str, Any]) -> None:
    """Move checkpoints and their logs to `earlier/`, also the logs of a training that died before
    its first checkpoint. The folder is named after the identity in the newest checkpoint; only
    where nothing is committed after `identity`, that of the recipe.
    """
    if not any((run.root / name).exists() for name in PARTS):
        return
    name = _trained(run.checkpoints) or fingerprint(dict(identity))
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    place = next(at for at in (earlier(run) / name for name in names) if not at.exists())
    _gather(run, place)
    say(f"the earlier training is set aside in {place}")


def set_logs_aside(run: RunFolder, identity: Mapping[str, Any]) -> None:
    """Move the logs of the training that made the model, whose checkpoints were removed, to
    `earlier/`; those of one that died before its first checkpoint are in nobody's way. The model
    stays until there is another one, and a line says that nothing brings it back then.
    """
    if _began_and_did_not_end(run):  # which may have gone back to its first step
        return
    made = read_lineage(run.model)
    logged = max((line.get("step", 0) for line in read_lines(run.metrics)), default=0)
    if made is None or logged < (made.get("step") or 0):
        return
    say(
        f"warning: of the training that made {run.model} no checkpoint is left, so nothing brings"
        " that model back once this training ends; copy it to keep it"
    )
    set_aside(run, identity)


def place_of(run: RunFolder, identity: Mapping[str, Any]) -> Path | None:
    """Where the training of this identity is set aside, None if there is none. Of several it is the
    last one that finished, which nothing more is paid for, or else the last one. The markers of its
    checkpoints say whose a folder is, whatever it is called.
    """
    name = fingerprint(dict(identity))
    places = sorted(earlier(run).glob("*"), key=lambda place: (len(place.name), place.name))
    own = [at for at in reversed(places) if _trained(at / "checkpoints") == name]
    return max(own, key=_finished, default=None)


def bring_back(run: RunFolder, place: Path) -> CommittedCheckpoint | None:
    """Move the training in `place` to the run folder, where no other one is; returns its newest
    valid checkpoint. Damaged ones that are newer are set aside.
    """
    moving = _moving(place)
    place.rename(moving)
    _move(moving, run.root)
    moving.rmdir()
    fsync_folder(earlier(run))
    say(f"this recipe was trained before: {place} is brought back")
    found = newest_valid(run.checkpoints)
    if found is not None:
        set_damaged_aside(found)
    return found


def finish_moves(run: RunFolder) -> None:
    """Set a training aside that a killed process was moving, in either direction: one of which a
    part lies here and a part there would be taken for none. `find_start` brings it back where it is
    the recipe's.
    """
    for moving in sorted(earlier(run).glob(f"*{MOVING}")):
        place = moving.with_name(moving.name.removesuffix(MOVING))
        _gather(run, place)
        say(f"a training was half moved when its process died; it is set aside in {place}")


def earlier(run: RunFolder) -> Path:
    return run.root / SET_ASIDE


def _trained(checkpoints: Path) -> str | None:
    """The fingerprint of the training whose newest checkpoint this is, as its recipe has it: what a
    roll-back has left out is no part of that. None where there is none, or one of another version
    of ingot.
    """
    newest = next(iter(committed(checkpoints)), None)
    known = None if newest is None else newest.commit.get("identity")
    if newest is None or known is None:
        return None
    if spans := newest.commit.get("left_out"):
        known = known | {"data.skip": [one for one in known["data.skip"] if one not in spans]}
    return fingerprint(dict(known))


def _finished(place: Path) -> bool:
    return bool(committed(place / "checkpoints")[0].commit.get("finished"))


def _began_and_did_not_end(run: RunFolder) -> bool:
    """Whether the logs are those of a training that is under way, or was when it died."""
    kinds = [event.get("kind") for event in read_lines(run.events)]
    return [kind for kind in kinds if kind in ("start", "finish")][-1:] == ["start"]


def _gather(run: RunFolder, place: Path) -> None:
    """Move what the run folder has of a training to `place`, which is called so once it has all."""
    moving = _moving(place)
    moving.mkdir(parents=True, exist_ok=True)
    _move(run.root, moving)
    moving.rename(place)
    fsync_folder(earlier(run))


def _moving(place: Path) -> Path:
    return place.with_name(f"{place.name}{MOVING}")


def _move(source: Path, target: Path) -> None:
    """Move the parts of a training between folders."""
    for name in PARTS:
        if (source / name).exists() and not (target / name).exists():
            (source / name).rename(target / name)
    fsync_folder(target)
    fsync_folder(source)
