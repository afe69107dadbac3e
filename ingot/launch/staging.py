"""Before a start elsewhere: what its nodes need is put where they look for it, on the disk that
they share with us or into the bucket.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ingot.base.errors import Failed
from ingot.base.progress import say
from ingot.base.remote.bucket import open_bucket
from ingot.base.remote.replica import push
from ingot.base.storage import write_atomic
from ingot.config.load import dump_recipe
from ingot.config.recipe import Recipe
from ingot.launch.handles import find, jobs_folder
from ingot.launch.job import Job
from ingot.launch.sending import bring_back
from ingot.launch.supervise import Stamp, committed


def staged(recipe: Recipe, job: Job) -> Job:
    """The same job for one more start, with all that its nodes need where they look for it. What an
    earlier start has made and nobody fetched is fetched before.
    """
    if (
        job.mirror is not None
        and find(recipe.folder.root, job.name, recipe.launch.kind) is not None
    ):
        bring_back(job.mirror, recipe.folder.root)
    job = again(recipe, job)
    stage(recipe, job)
    return job


def again(recipe: Recipe, job: Job) -> Job:
    """The same job for one more start: it meets in a place of its own, which exists from then
    on.
    """
    folder = meeting_of(recipe.folder.root.absolute(), job.name)
    folder.mkdir(parents=True, exist_ok=True)
    if job.mirror is None:
        return replace(job, meet=str(folder))
    meet = f"{job.mirror}/jobs/{folder.name}"
    for place in (
        meet,
        f"{job.mirror}/heartbeats",
        f"{job.mirror}/stacks",
    ):  # of a run of this name whose folder is gone from here, of earlier starts
        bucket = open_bucket(place)
        for left in bucket.list():
            bucket.delete(left.name)
    return replace(job, meet=meet)


def stage(recipe: Recipe, job: Job) -> None:
    """Put what the nodes need where they see it: the recipe as they are to read it, and the run
    folder where they share no disk with us.
    """
    given = recipe.folder.root / "jobs" / f"nodes.{job.name}.yaml"
    if job.mirror is None:
        write_atomic(given, dump_recipe(recipe))
        return
    write_atomic(given, dump_recipe(for_nodes(recipe, job.mirror)))
    push(recipe.folder.root, job.mirror)


def for_nodes(recipe: Recipe, mirror: str) -> Recipe:
    """The recipe as the nodes of a job without a shared disk read it: checkpoints go to the bucket,
    and nothing is launched from there.
    """
    upload = recipe.checkpoint.upload or f"{mirror}/checkpoints"
    return recipe.model_copy(
        update={
            "checkpoint": recipe.checkpoint.model_copy(update={"upload": upload}),
            "launch": recipe.launch.model_copy(
                update={"kind": "local", "nodes": 1, "detach": False}
            ),
        }
    )


def meeting_of(root: Path, verb: str) -> Path:
    """A place of its own for each start, numbered."""
    numbers = [
        int(path.name.rpartition("-")[2])
        for path in jobs_folder(root).glob(f"{verb}-*")
        if path.name.rpartition("-")[2].isdigit()
    ]
    return jobs_folder(root) / f"{verb}-{max(numbers, default=0) + 1}"


def checkpoints(recipe: Recipe, job: Job) -> Callable[[], dict[int, Stamp]]:
    """What tells the committed steps, wherever the job's checkpoints go."""
    if job.mirror is None:
        return lambda: committed(recipe.folder.checkpoints)
    url = recipe.checkpoint.upload or f"{job.mirror}/checkpoints"

    known: dict[int, Stamp] = {}

    def in_bucket() -> dict[int, Stamp]:
        """As they were last seen, where the bucket does not answer."""
        try:
            markers = [
                blob
                for blob in open_bucket(url).list("step-")
                if blob.name.endswith("/COMMIT.json")
            ]
        except Failed as error:
            say(f"warning: {error}")
            return dict(known)
        known.clear()
        known.update(
            {
                int(blob.name.partition("/")[0].removeprefix("step-")): (blob.generation, 0)
                for blob in markers
            }
        )
        return dict(known)

    return in_bucket
