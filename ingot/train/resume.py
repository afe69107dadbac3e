"""Where training starts: from nothing, from the newest whole checkpoint, or not at all because the
recipe has changed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from ingot.base.errors import WrongInput
from ingot.base.markers import fingerprint
from ingot.base.progress import say
from ingot.base.runfolder import RunFolder
from ingot.base.storage import fsync_folder
from ingot.checkpoints.store import Found, committed, newest_valid
from ingot.config.identity import MAY_CHANGE, changes
from ingot.data.order import place_of

LEFT_OUT = "left_out.json"
"""In the run folder: which samples a training has left out by itself."""


def find_start(
    run: RunFolder,
    identity: Mapping[str, Any],
    *,
    fresh: bool,
    allow: Collection[str] = (),
    tell: Callable[[Found, str], None] = lambda found, changed: None,
    before_anew: Callable[[], None] = lambda: None,
) -> Found | None:
    """The checkpoint to go on from, or None to start from the first step.

    A finished training with another recipe is set aside under `earlier/`, and brought back when the
    recipe is. Knobs among `allow` may differ; `tell` then hears what does. `before_anew` is called
    where no checkpoint is to be gone on from, before anything is set aside: what it raises leaves
    all as it is.

    Raises:
        WrongInput: an unfinished training lies here and its recipe differs; names what changed.
        Failed: there are checkpoints, and not one is whole.
    """
    found = None if fresh else newest_valid(run.checkpoints)
    if found is not None:
        before, now = _so_far(found.commit["identity"], found), _so_far(identity, found)
        differ = [key for key in {**before, **now} if before.get(key) != now.get(key)]
        if all(key.startswith(tuple(allow)) for key in differ):
            if differ:
                changed = "; ".join(changes(before, now))
                say(f"going on although {changed}, as resume.allow says")
                tell(found, changed)
            return found
        if not found.commit["finished"]:
            raise _refused(run, found, dict(identity), differ)
    if found is not None:
        say(
            "the recipe changed since the last training"
            f" ({'; '.join(changes(found.commit['identity'], dict(identity)))})"
        )
    place = _place_of(run, identity)
    if fresh or not committed(place / "checkpoints"):
        before_anew()
    if found is None and not fresh and not place.exists():
        return None
    set_aside(run, found.commit["identity"] if found else identity)
    return None if fresh else _bring_back(run, identity)


def _refused(
    run: RunFolder, found: Found, identity: dict[str, Any], differ: list[str]
) -> WrongInput:
    """What changed, and the two ways on."""
    changed = "; ".join(changes(found.commit["identity"], identity))
    meant = [knob for knob in MAY_CHANGE if any(key.startswith(knob) for key in differ)]
    way = (
        f"go on with the change by resume.allow=[{','.join(meant)}]"
        if all(key.startswith(MAY_CHANGE) for key in differ)
        else "undo the change to go on"
    )
    return WrongInput(
        f"{run.checkpoints} holds an unfinished training ({found.step} steps) of another recipe:"
        f" {changed}; {way}, or start over with --fresh (the old checkpoints are set aside, not"
        " deleted)"
    )


def _so_far(identity: Mapping[str, Any], found: Found) -> dict[str, Any]:
    """An identity without the ranges of samples to skip that training has not come to yet: those
    may be another choice now.
    """
    skipped = found.commit["identity"].get("data.skip", [])
    place = place_of(
        found.step * int(identity["train.global_batch"]),
        [(first, after) for first, after in skipped],
    )
    return {
        **identity,
        "data.skip": [list(span) for span in identity.get("data.skip", []) if span[0] < place],
    }


def set_aside(run: RunFolder, identity: Mapping[str, Any]) -> None:
    """Move checkpoints and what was logged with them out of the way; nothing is deleted."""
    if not run.checkpoints.exists() and not (run.root / LEFT_OUT).exists():
        return
    name = fingerprint(dict(identity))
    places = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    place = next(
        folder for folder in (earlier(run) / name for name in places) if not folder.exists()
    )
    _move(run.root, place)
    say(f"the earlier training is set aside in {place}")


def _bring_back(run: RunFolder, identity: Mapping[str, Any]) -> Found | None:
    place = _place_of(run, identity)
    if not place.exists():
        return None
    _move(place, run.root)
    place.rmdir()
    say(f"this recipe was trained before: {place} is brought back")
    return newest_valid(run.checkpoints)


def _place_of(run: RunFolder, identity: Mapping[str, Any]) -> Path:
    return earlier(run) / fingerprint(dict(identity))


def earlier(run: RunFolder) -> Path:
    return run.root / "earlier"


def _move(source: Path, target: Path) -> None:
    """Checkpoints go last when set aside and come last when brought back: without them the rest is
    only logs.
    """
    target.mkdir(parents=True, exist_ok=True)
    for name in ("metrics.jsonl", "tensorboard", LEFT_OUT, "checkpoints"):
        if (source / name).exists():
            (source / name).rename(target / name)
    fsync_folder(target)
    fsync_folder(source)
