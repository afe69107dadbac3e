"""Preparation of a start at another place: reports what its nodes would lack before a machine is
created, and puts their inputs where they look for them, on the shared disk or in the bucket.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ingot.base.errors import Failed
from ingot.base.markers import read_marker
from ingot.base.progress import say
from ingot.base.remote.bucket import open_bucket
from ingot.base.remote.index import read_index
from ingot.base.remote.replica import push, would_delete
from ingot.base.storage import write_atomic
from ingot.cloud.regions import region_mismatch
from ingot.config.load import dump_recipe
from ingot.config.recipe import Recipe
from ingot.launch.handles import find_handle, jobs_folder
from ingot.launch.job import Job
from ingot.launch.local_inputs import (
    MANIFEST,
    is_sent,
    is_there,
    local_folders,
    local_inputs,
)
from ingot.launch.rendezvous import clear_rendezvous
from ingot.launch.run_folder_sync import pull_results
from ingot.launch.supervisor.supervise import FRESH, FileStamp, committed_steps

PREPARED = f"data/columns/{MANIFEST}"


def stage_start(recipe: Recipe, job: Job) -> Job:
    """The job for one more start, with all inputs of its nodes in place. Results of an earlier
    start that were never fetched are fetched first.
    """
    root, url = recipe.folder.root, job.run_folder_url
    if url and (
        find_handle(root, job.name, recipe.launch.kind) is not None
        # Deleted here to make room, it would be deleted there, too.
        or would_delete(url, root, PREPARED)
    ):
        pull_results(url, root)
    job = with_next_rendezvous(recipe, job)
    put_inputs(recipe, job)
    return job


def with_next_rendezvous(recipe: Recipe, job: Job) -> Job:
    """The job with a new, empty rendezvous of its own."""
    folder = next_rendezvous(recipe.folder.root.absolute(), job.name)
    folder.mkdir(parents=True, exist_ok=True)
    if not job.run_folder_url:
        return replace(job, rendezvous=str(folder))
    rendezvous = f"{job.run_folder_url}/jobs/{folder.name}"
    clear_rendezvous(rendezvous)
    for left in ("heartbeats", "stacks"):  # files of earlier starts
        clear_rendezvous(f"{job.run_folder_url}/{left}")
    return replace(job, rendezvous=rendezvous)


def put_inputs(recipe: Recipe, job: Job) -> None:
    """Put the resolved recipe, and without a shared disk also the run folder, where the nodes read
    them.
    """
    resolved = recipe.folder.root / "jobs" / f"nodes.{job.name}.yaml"
    if not job.run_folder_url:
        write_atomic(resolved, dump_recipe(recipe))
        return
    write_atomic(resolved, dump_recipe(recipe_for_nodes(recipe, job.run_folder_url)))
    push(recipe.folder.root, job.run_folder_url)


def recipe_for_nodes(recipe: Recipe, run_folder_url: str) -> Recipe:
    """The recipe for nodes without a shared disk: checkpoints go to the bucket, and nothing is
    launched from there.
    """
    upload = recipe.checkpoint.upload or f"{run_folder_url}/checkpoints"
    launch = {"kind": "local", "nodes": 1, "detach": False}
    return recipe.model_copy(
        update={
            "checkpoint": recipe.checkpoint.model_copy(update={"upload": upload}),
            "launch": recipe.launch.model_copy(update=launch),
        }
    )


def next_rendezvous(root: Path, verb: str) -> Path:
    """A new numbered folder for each start."""
    numbers = [
        int(path.name.rpartition("-")[2])
        for path in jobs_folder(root).glob(f"{verb}-*")
        if path.name.rpartition("-")[2].isdigit()
    ]
    return jobs_folder(root) / f"{verb}-{max(numbers, default=0) + 1}"


def committed_anywhere(recipe: Recipe, job: Job) -> Callable[[], dict[int, FileStamp]]:
    """Returns a function that lists the committed steps, wherever the job's checkpoints are stored;
    while the bucket does not answer, it returns the last known ones.
    """
    if not job.run_folder_url:
        return lambda: committed_steps(recipe.folder.checkpoints)
    url = recipe.checkpoint.upload or f"{job.run_folder_url}/checkpoints"
    last_seen: dict[int, FileStamp] = {}

    def in_bucket() -> dict[int, FileStamp]:
        nonlocal last_seen
        try:
            blobs = open_bucket(url).list("step-")
        except Failed as error:
            say(f"warning: {error}")
            return dict(last_seen)
        # A copy that somebody keeps beside them, such as step-00000004-best, is none of them.
        last_seen = {
            int(found[1]): (blob.generation, 0)
            for blob in blobs
            if (found := re.fullmatch(r"step-(\d{8,})/COMMIT\.json", blob.name))
        }
        return dict(last_seen)

    return in_bucket


def missing_inputs(recipe: Recipe, job: Job) -> list[str]:
    """Why nodes at any place without a shared disk could not run a job: an input does not exist, or
    is only on this machine. One reason each.
    """
    if not job.run_folder_url:
        return []
    if reasons := unreachable_inputs(recipe, job.name):
        return reasons
    if (mismatch := region_mismatch(recipe.cloud)) is not None:
        return [mismatch]
    if absent := [
        f"{each.what} {each.named} is neither here nor in {job.run_folder_url}; put it there"
        for each in local_inputs(recipe, job.name)
        if not is_there(recipe, each.path, job.run_folder_url)
    ]:
        return absent
    if (
        job.name in ("train", "evaluate")
        and read_marker(recipe.folder.columns, MANIFEST) is None
        and PREPARED not in read_index(open_bucket(job.run_folder_url)).entries
    ):
        return [
            f"nothing is prepared, neither here nor in {job.run_folder_url}; run `ingot ingest` and"
            " `ingot prepare` with the same recipe first"
        ]
    return _checkpoint_conflict(recipe, job) if job.name == "train" else []


def _checkpoint_conflict(recipe: Recipe, job: Job) -> list[str]:
    """Why the checkpoints in the bucket would not give the wanted start: those of this machine are
    newer, or --fresh would find some.
    """
    here = max(committed_steps(recipe.folder.checkpoints), default=0)
    remote = max(committed_anywhere(recipe, job)(), default=0)
    upload = recipe.checkpoint.upload or f"{job.run_folder_url}/checkpoints"
    if FRESH in job.argv and remote:
        return [
            f"{upload} holds checkpoints up to step {remote:,}, which --fresh would not begin"
            " from; set checkpoint.upload to another folder"
        ]
    if FRESH not in job.argv and here > remote:
        folder = recipe.folder.checkpoints / f"step-{here:08d}"
        return [
            f"checkpoint {here:,} of this machine is newer than what {upload} holds; send it"
            f" (gcloud storage cp -r {folder} {upload}/), or begin anew with another `name`"
        ]
    return []


def unreachable_inputs(recipe: Recipe, verb: str) -> list[str]:
    """Why nodes without a shared disk could not run a verb: its inputs are only on this machine."""
    reasons = []
    if recipe.cloud.bucket is None:
        reasons.append(
            f"launch.kind {recipe.launch.kind} keeps the run folder in a bucket; set cloud.bucket"
        )
    if Path(recipe.output).is_absolute():
        reasons.append(
            f"output {recipe.output} is a folder of this machine; give one relative to the working"
            " folder, such as runs"
        )
    root = recipe.folder.root
    for each in local_inputs(recipe, verb):
        if not is_sent(recipe, each.path):
            ways = [each.instead]
            if verb not in ("ingest", "prepare"):
                ways.append(f"put it into {root}, of which nodes get a copy")
            elif not each.is_columns:
                ways.append(f"run `ingot {verb}` here first")
            told = f"{each.what} {each.named} lies on this machine alone"
            reasons.append(f"{told}; {', or '.join(ways)}")
    if verb in ("prepare", "train", "evaluate", "run"):
        reasons += [
            f"{knob} {value} cannot be read by the nodes, which see no folder of this machine and"
            " fetch models from the hub alone; give hf:ORGANIZATION/NAME"
            for knob, value in local_folders(recipe).items()
        ]
    return reasons
