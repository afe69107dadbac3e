"""Why nodes could not do a job, whatever their place, told before a machine is made: what it reads
is not there, or lies on this machine alone.
"""

from __future__ import annotations

from pathlib import Path

from ingot.base.markers import read_marker
from ingot.base.remote.bucket import open_bucket
from ingot.base.remote.index import read_index
from ingot.base.storage import is_remote
from ingot.cloud.regions import region_mismatch
from ingot.config.recipe import Recipe
from ingot.launch.job import Job
from ingot.launch.staging import checkpoints
from ingot.launch.supervise import FRESH, committed

MANIFEST = "manifest.json"


def what_is_missing(recipe: Recipe, job: Job) -> list[str]:
    """Why nodes could not do a job, whatever their place: what it reads is not there, or lies on
    this machine alone. One reason each.
    """
    reasons = away(recipe, job.name) if job.mirror is not None else []
    if job.mirror is None or reasons:
        return reasons
    if (mismatch := region_mismatch(recipe.cloud)) is not None:
        return [mismatch]
    if (
        job.name in ("train", "evaluate")
        and read_marker(recipe.folder.columns, MANIFEST) is None
        and not _has(job.mirror, f"data/columns/{MANIFEST}")
    ):
        return [
            f"nothing is prepared, neither here nor in {job.mirror}; run `ingot ingest` and `ingot"
            " prepare` with the same recipe first"
        ]
    if job.name == "train":
        here, there = (
            max(committed(recipe.folder.checkpoints), default=0),
            max(checkpoints(recipe, job)(), default=0),
        )
        upload = recipe.checkpoint.upload or f"{job.mirror}/checkpoints"
        if FRESH in job.argv and there:
            return [
                f"{upload} holds checkpoints up to step {there:,}, which --fresh would not begin"
                " from; set checkpoint.upload to another folder"
            ]
        if FRESH not in job.argv and here > there:
            step = f"step-{here:08d}"
            return [
                f"checkpoint {here:,} of this machine is newer than what {upload} holds; send it"
                f" (gcloud storage cp -r {recipe.folder.checkpoints / step} {upload}/), or begin"
                " anew with another `name`"
            ]
    return []


def _has(mirror: str, path: str) -> bool:
    """Whether the replica holds a file."""
    return path in read_index(open_bucket(mirror)).entries


def away(recipe: Recipe, verb: str) -> list[str]:
    """Why the nodes of a place without a shared disk could not do a verb: what it reads lies on
    this machine alone.
    """
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
    if verb in ("ingest", "run"):
        reasons += [
            f"data source {source} is a file of this machine; put it into the bucket, or run `ingot"
            " ingest` here first"
            for source in recipe.sources
            if ":" not in source and not is_remote(source)
        ]
    if verb in ("prepare", "train", "evaluate", "run"):
        reasons += [
            f"{knob} {value} cannot be read by the nodes, which see no folder of this machine and"
            " fetch models from the hub alone; give hf:ORGANIZATION/NAME"
            for knob, value in local_folders(recipe).items()
        ]
    return reasons


def local_folders(recipe: Recipe) -> dict[str, str]:
    """The models, tokenizers, adapters and checkpoints that the recipe names by a path or address,
    by knob.
    """
    objective, lora = recipe.objective, recipe.model.lora
    named: dict[str, str | None] = {
        "model.source": recipe.model.source,
        "tokenizer.source": recipe.tokenizer.source,
        "evaluate.model": recipe.evaluate.model,
        "objective.teacher": getattr(objective, "teacher", None),
        "objective.reference": getattr(objective, "reference", None),
        "model.lora.adapter": getattr(lora, "adapter", None),
        "train.start_from": recipe.train.start_from,
    }
    return {
        knob: value
        for knob, value in named.items()
        if value not in (None, "train", "none") and not value.startswith(("hf:", "preset:"))
    }
