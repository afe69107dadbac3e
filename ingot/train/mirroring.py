"""A training and the bucket that its checkpoints also go to: who may write there, and which of the
two places is ahead at the start.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from pathlib import Path

from ingot.base.environment import REPLICA
from ingot.base.errors import Failed, WrongInput
from ingot.base.markers import problems, read_marker
from ingot.base.remote.replica import push
from ingot.checkpoints.mirror import BucketMirror, fetch_newer, send_newest
from ingot.checkpoints.store import COMMIT, Found, step_folder
from ingot.config.recipe import Recipe
from ingot.parallel.mesh import Mesh
from ingot.train.resume import LEFT_OUT

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
    replica, root = os.environ.get(REPLICA), recipe.folder.root
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


def send_missing(mirror: BucketMirror | None, start: Found | None, mesh: Mesh) -> None:
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
