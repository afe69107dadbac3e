"""Where training starts: from nothing, from the newest valid checkpoint here or in the bucket of
`checkpoint.upload`, or not at all because the recipe has changed.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ingot.base.environment import REPLICA_VARIABLE
from ingot.base.errors import Failed, WrongInput
from ingot.base.markers import fingerprint, problems, read_marker
from ingot.base.progress import say
from ingot.base.remote.replica import push
from ingot.base.runfolder import RunFolder
from ingot.base.storage import fsync_folder
from ingot.checkpoints.mirror import BucketMirror, fetch_newer, send_newest
from ingot.checkpoints.store import (
    COMMIT,
    CommittedCheckpoint,
    committed,
    newest_valid,
    step_folder,
)
from ingot.config.identity import MAY_CHANGE, changes
from ingot.config.recipe import Recipe
from ingot.data.batches.order import sequence_position
from ingot.parallel.mesh import Mesh

LEFT_OUT = "left_out.json"
"""In the run folder: which samples a training has left out by itself."""


def find_start(
    run: RunFolder,
    identity: Mapping[str, Any],
    *,
    fresh: bool,
    allow: Collection[str] = (),
    on_change: Callable[[CommittedCheckpoint, str], None] = lambda found, changed: None,
    before_anew: Callable[[], None] = lambda: None,
) -> CommittedCheckpoint | None:
    """The checkpoint to go on from, or None to start from the first step.

    A finished training with another recipe is set aside under `earlier/`, and brought back when the
    recipe is. Knobs among `allow` may differ; `on_change` is then called with what does.
    `before_anew` is called where training begins anew, before anything is set aside: what it raises
    leaves everything as it is.

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
                on_change(found, changed)
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
    run: RunFolder, found: CommittedCheckpoint, identity: dict[str, Any], differ: list[str]
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


def _so_far(identity: Mapping[str, Any], found: CommittedCheckpoint) -> dict[str, Any]:
    """An identity without the ranges of samples to skip that training has not come to yet: those
    may be another choice now.
    """
    skipped = found.commit["identity"].get("data.skip", [])
    place = sequence_position(
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


def _bring_back(run: RunFolder, identity: Mapping[str, Any]) -> CommittedCheckpoint | None:
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


NOTED = ("metrics.jsonl", "events.jsonl", LEFT_OUT)
"""What rank 0 writes beside checkpoints that a training goes on with."""
AGAIN_S = (1.0, 2.0, 4.0, 8.0)


def open_mirror(
    recipe: Recipe, mesh: Mesh, closing: ExitStack, *, again: bool
) -> BucketMirror | None:
    """The bucket of `checkpoint.upload`, leased by rank 0 until `closing`; None where none is asked
    for. Collective.

    `again`: an attempt before this one may have died, on another machine even, and left its lease,
    whose life is waited for.

    Raises:
        Failed: another run writes there.
    """
    if recipe.checkpoint.upload is None:
        return None
    replica, root = os.environ.get(REPLICA_VARIABLE), recipe.folder.root
    # A checkpoint vouches for what was noted up to its step, wherever training goes on from it.
    mirror = BucketMirror(
        recipe.checkpoint.upload,
        before_commit=(lambda: _send_noted(root, replica)) if replica else lambda: None,
    )

    def lease() -> None:
        closing.enter_context(mirror.lease(f"run {recipe.name}", wait=again))

    mesh.from_main(lease)
    return mirror


def _send_noted(root: Path, replica: str) -> None:
    """Again, where another job of this run (an evaluation) sent something in the same moment: each
    keeps what is the other's.
    """
    for wait_s in (*AGAIN_S, None):
        try:
            push(root, replica, parts=NOTED)
            return
        except Failed:
            if wait_s is None:
                raise
            time.sleep(wait_s)


def fetch_missing(mirror: BucketMirror | None, checkpoints: Path, mesh: Mesh) -> None:
    """Fetch the newest checkpoint where only the bucket has it whole, on every node. Collective."""
    if mirror is None:
        return
    mesh.from_main(lambda: fetch_newer(mirror, checkpoints))
    if mesh.ranks.local_rank == 0 and not mesh.is_main:
        fetch_newer(mirror, checkpoints)  # nothing to do where all nodes share a disk
    mesh.barrier()


def send_missing(
    mirror: BucketMirror | None, start: CommittedCheckpoint | None, mesh: Mesh
) -> None:
    """Send what the bucket has not yet of the training that goes on from `start`: an attempt was
    stopped in between. Collective.
    """
    if mirror is not None and start is not None:
        mesh.from_main(lambda: send_newest(mirror, start.folder.parent))


def complete(
    mirror: BucketMirror | None, checkpoints: Path, reached: int, best: int | None, mesh: Mesh
) -> None:
    """Fetch what other nodes, with disks of their own, have written of the checkpoints that an
    export reads: the last one on the first node, the best one on every node. Collective.
    """
    if mirror is not None and mesh.ranks.local_rank == 0:
        for step in sorted(
            ({reached} if mesh.is_main else set())
            | ({best} if best is not None and best != reached else set())
        ):
            folder = step_folder(checkpoints, step)
            marker = read_marker(folder, COMMIT)
            if marker is None or problems(folder, marker, checksums=False):
                mirror.fetch(step, checkpoints)
    mesh.barrier()


def refuse_others(mirror: BucketMirror | None) -> None:
    """Raises WrongInput where another training's checkpoints lie in the bucket: they would be taken
    for this one's later on.
    """
    if mirror is not None and (step := mirror.newest()) is not None:
        raise WrongInput(
            f"{mirror.bucket.url} holds checkpoints of an earlier training, up to step {step:,},"
            " and this one begins anew; set checkpoint.upload to another folder, or empty that one"
        )
