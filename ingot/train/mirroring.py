"""What a training asks of the bucket of `checkpoint.upload`: the right to write there, checkpoints
that only one of both has, and that no other training's lie in it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path

from ingot.base.environment import REPLICA_VARIABLE
from ingot.base.errors import Failed, WrongInput
from ingot.base.remote.replica import push
from ingot.checkpoints.mirror import (
    BucketMirror,
    fetch_due,
    fetch_newer,
    fetch_unless_here,
    send_newest,
)
from ingot.checkpoints.store import CommittedCheckpoint
from ingot.config.recipe import Recipe
from ingot.parallel.mesh import Mesh
from ingot.train.earlier import LEFT_OUT

NOTED = (
    *("metrics.jsonl", "samples.jsonl", "events.jsonl", LEFT_OUT),
    *("reports/layout.json", "reports/micro_batch.json"),
)
"""Files that rank 0 writes beside the checkpoints and that a resumed training needs."""
AGAIN_S = (1.0, 2.0, 4.0, 8.0)


def open_mirror(
    recipe: Recipe, mesh: Mesh, closing: ExitStack, *, again: bool
) -> BucketMirror | None:
    """The bucket of `checkpoint.upload`, with its lease held by rank 0 until `closing` closes; None
    if the recipe has none. Collective.

    `again`: an earlier attempt may have died, possibly on another machine, without releasing its
    lease; wait until that expires.

    Raises:
        Failed: another run holds the lease.
    """
    if recipe.checkpoint.upload is None:
        return None
    replica, root = os.environ.get(REPLICA_VARIABLE), recipe.folder.root
    # A checkpoint implies the logs up to its step, on whatever machine training resumes.
    mirror = BucketMirror(
        recipe.checkpoint.upload,
        before_commit=(lambda: _send_noted(root, replica)) if replica else lambda: None,
    )

    def lease() -> None:
        closing.enter_context(mirror.lease(f"run {recipe.name}", wait=again))

    mesh.from_main(lease)
    return mirror


def _send_noted(root: Path, replica: str) -> None:
    """Push the logs to the replica; retry when another job of this run (an evaluation) pushed at
    the same moment. Each push keeps the other's files.
    """
    for wait_s in (*AGAIN_S, None):
        try:
            push(root, replica, parts=NOTED)
            return
        except Failed:
            if wait_s is None:
                raise
            time.sleep(wait_s)


def fetch_missing(
    mirror: BucketMirror | None, checkpoints: Path, mesh: Mesh
) -> CommittedCheckpoint | None:
    """Fetch the newest checkpoint on every node that lacks it, if only the bucket has it intact.
    Returns the newest valid one of rank 0, verified; None without a bucket. Collective.
    """
    if mirror is None:
        return None
    newest = mesh.from_main(lambda: fetch_newer(mirror, checkpoints))
    if newest is not None and mesh.ranks.local_rank == 0 and not mesh.is_main:
        # Does nothing if the nodes share a disk.
        fetch_unless_here(mirror, newest.step, checkpoints)
    mesh.barrier()
    return newest


def exchange_missing(
    mirror: BucketMirror | None, start: CommittedCheckpoint | None, averaged: int, mesh: Mesh
) -> None:
    """Upload the newest checkpoint if the bucket lacks it, because an earlier attempt ended before
    its upload did; fetch those before it that only the bucket has and the export may read, the
    newest `averaged` that were due. Collective.
    """

    def exchange(mirror: BucketMirror, start: CommittedCheckpoint) -> None:
        send_newest(mirror, start)
        fetch_due(mirror, start.folder.parent, start.step, averaged)

    if mirror is not None and start is not None:
        mesh.from_main(lambda: exchange(mirror, start))


def complete(
    mirror: BucketMirror | None,
    checkpoints: Path,
    reached: Collection[int],
    best: int | None,
    mesh: Mesh,
) -> None:
    """Fetch the files that other nodes wrote to their own disks for the checkpoints that an export
    reads: those of `reached` on the first node, the best one on every node. Collective.
    """
    if mirror is not None and mesh.ranks.local_rank == 0:
        for step in sorted(
            (set(reached) if mesh.is_main else set())
            | ({best} if best is not None and best not in reached else set())
        ):
            fetch_unless_here(mirror, step, checkpoints)
    mesh.barrier()


def refuse_others(mirror: BucketMirror | None) -> None:
    """Raises WrongInput if the bucket holds checkpoints of another training: they would later be
    mistaken for this one's.
    """
    if mirror is not None and (step := mirror.newest()) is not None:
        raise WrongInput(
            f"{mirror.bucket.url} holds checkpoints of an earlier training, up to step {step:,},"
            " and this one begins anew; set checkpoint.upload to another folder, or empty that one"
        )
