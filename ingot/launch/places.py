"""Which launcher a recipe asks for, and the job that it is given: what `ingot launch`, `ingot run` and the pipeline share."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ingot.base.bucket import open_bucket
from ingot.base.errors import Failed, WrongInput
from ingot.base.progress import duration, say
from ingot.base.replica import push, replica_url
from ingot.base.storage import is_remote, write_atomic
from ingot.cloud.prices import time_limit_s
from ingot.config.load import dump_recipe
from ingot.config.recipe import Recipe
from ingot.launch.attempt import follow
from ingot.launch.dataflow import DataflowLauncher
from ingot.launch.dataproc import DataprocLauncher
from ingot.launch.gce import GceLauncher
from ingot.launch.handles import find, jobs_folder
from ingot.launch.job import Job, Launcher
from ingot.launch.local import Ended
from ingot.launch.remote import RemoteAttempt, ask_or_unknown
from ingot.launch.slurm import SlurmLauncher
from ingot.launch.ssh import SshLauncher
from ingot.launch.stops import Stops
from ingot.launch.supervise import Stamp, committed, supervise
from ingot.launch.tpu import TpuLauncher
from ingot.launch.vertex import VertexLauncher

LAUNCHERS: dict[str, Callable[[Recipe], Launcher]] = {
    "ssh": SshLauncher, "slurm": SlurmLauncher, "gce": GceLauncher, "vertex": VertexLauncher, "dataproc": DataprocLauncher, "dataflow": DataflowLauncher,
    "tpu": TpuLauncher,
}
LEAST_S = 60.0
"""With less time than this left, another start would be paid in vain."""
MIRRORED = ("gce", "vertex", "tpu", "dataproc", "dataflow")
"""Kinds whose nodes share no disk with us."""


def launcher(recipe: Recipe) -> Launcher:
    """The launcher of `launch.kind`. Raises WrongInput for `local`, which needs none."""
    kind = recipe.launch.kind
    if kind not in LAUNCHERS:
        raise WrongInput(f"launch.kind {kind} has no launcher here; choose one of {', '.join(LAUNCHERS)}")
    return LAUNCHERS[kind](recipe)


def place(recipe: Recipe, verb: str, argv: Sequence[str], *, shared: bool, options: Sequence[str] = ()) -> Job:
    """The job of a verb where `launch` says. `shared`: several nodes and processes can do it together. `argv` are recipe files and overrides.

    On a shared disk the nodes read the files that were typed; elsewhere they get the resolved recipe in the run folder's replica.
    """
    launch = recipe.launch
    nodes, processes = (launch.nodes, launch.processes) if shared else (1, 1)
    environment = dict(launch.environment)
    if launch.interface:
        environment |= {"GLOO_SOCKET_IFNAME": launch.interface, "NCCL_SOCKET_IFNAME": launch.interface}
    job = Job(
        verb, (verb, *argv, *options), processes, nodes, environment, tuple(launch.secrets), launch.image,
        _time_limit_s(recipe, nodes),
    )
    if launch.kind not in MIRRORED:
        return replace(job, meet=str(_meeting(recipe.folder.root.absolute(), verb)))
    url = replica_url(recipe.cloud.bucket or "", recipe.name)
    given = str(Path(recipe.output) / recipe.name / "jobs" / f"nodes.{verb}.yaml")
    return replace(job, argv=(verb, given, *options), mirror=url, meet=f"{url}/{_meeting(recipe.folder.root, verb).relative_to(recipe.folder.root)}")


def _time_limit_s(recipe: Recipe, nodes: int) -> float | None:
    """What the job may take, where that costs money by the hour."""
    kind = recipe.launch.kind
    if kind in ("dataproc", "dataflow"):
        if recipe.cloud.max_cost is not None:
            say(f"note: {kind} is paid by what it uses, which cloud.max_cost does not bound; cloud.max_run does")
        return recipe.cloud.max_run
    return time_limit_s(recipe, nodes=nodes) if kind in MIRRORED else None


def _meeting(root: Path, verb: str) -> Path:
    """A place of its own for each start, numbered."""
    numbers = [int(path.name.rpartition("-")[2]) for path in jobs_folder(root).glob(f"{verb}-*") if path.name.rpartition("-")[2].isdigit()]
    return jobs_folder(root) / f"{verb}-{max(numbers, default=0) + 1}"


def do(recipe: Recipe, job: Job, *, supervised: bool) -> Ended:
    """Run a job at its place and wait for it: a training under supervision, whose caller holds the run folder's `run-lock`; anything else once.

    Raises:
        WrongInput: the place cannot run it; nothing was sent.
    """
    elsewhere = launcher(recipe)
    if reasons := [*elsewhere.can(job), *(away(recipe, job.name) if job.mirror is not None else [])]:
        raise WrongInput(f"{job.name} cannot run with launch.kind {recipe.launch.kind}: {'; '.join(reasons)}")

    began, starts = time.monotonic(), list[RemoteAttempt]()

    def start(job: Job) -> RemoteAttempt:
        job = _in_time(again(recipe, job), time.monotonic() - began)
        if not _runs_already(recipe, elsewhere, job):
            stage(recipe, job)
        # What keeps the first start from coming about is told at once; a later one waits for it to pass.
        starts.append(RemoteAttempt(elsewhere, job, recipe.folder.root, patience_s=recipe.launch.start_s if starts else 0.0))
        return starts[-1]

    if supervised:
        return supervise(job, recipe, start=start, checkpoints=checkpoints(recipe, job))
    with Stops() as stops:
        attempt = start(job)
        try:
            end = follow(attempt, stops)
        except BaseException:
            attempt.stop()
            raise
    if end.how:
        say(f"{job.name}: {end.how}")
    return Ended(end.shown, stops.first)


def _runs_already(recipe: Recipe, elsewhere: Launcher, job: Job) -> bool:
    """Whether an earlier launcher that died has left the job running, which is gone on with: its node 0 is who writes to the bucket then."""
    handle = find(recipe.folder.root, job.name, recipe.launch.kind)
    return handle is not None and ask_or_unknown(lambda: elsewhere.status(handle)) in ("queued", "running")


def _in_time(job: Job, spent_s: float) -> Job:
    """What is left of the time for one more start. Raises Failed when that is nothing to speak of."""
    if job.time_limit_s is None:
        return job
    left = job.time_limit_s - spent_s
    if left < LEAST_S:
        raise Failed(f"the {duration(job.time_limit_s)} that cloud.max_run and cloud.max_cost allow are used up; raise them, and the same command goes on")
    return replace(job, time_limit_s=left)


def again(recipe: Recipe, job: Job) -> Job:
    """The same job for one more start: it meets in a place of its own, which exists from then on."""
    folder = _meeting(recipe.folder.root.absolute(), job.name)
    folder.mkdir(parents=True, exist_ok=True)
    if job.mirror is None:
        return replace(job, meet=str(folder))
    meet = f"{job.mirror}/jobs/{folder.name}"
    bucket = open_bucket(meet)
    for left in bucket.list():  # of a run of this name whose folder is gone from here
        bucket.delete(left.name)
    return replace(job, meet=meet)


def stage(recipe: Recipe, job: Job) -> None:
    """Send what the nodes need into the bucket: the recipe as they are to read it, and the run folder. Nothing where they share our disk."""
    if job.mirror is None:
        return
    write_atomic(recipe.folder.root / "jobs" / f"nodes.{job.name}.yaml", dump_recipe(for_nodes(recipe, job.mirror)))
    push(recipe.folder.root, job.mirror)


def for_nodes(recipe: Recipe, mirror: str) -> Recipe:
    """The recipe as the nodes of a job without a shared disk read it: checkpoints go to the bucket, and nothing is launched from there."""
    upload = recipe.checkpoint.upload or f"{mirror}/checkpoints"
    return recipe.model_copy(update={
        "checkpoint": recipe.checkpoint.model_copy(update={"upload": upload}),
        "launch": recipe.launch.model_copy(update={"kind": "local", "nodes": 1, "detach": False}),
    })


def away(recipe: Recipe, verb: str) -> list[str]:
    """Why the nodes of a place without a shared disk could not do a verb: what it reads lies on this machine alone."""
    reasons = []
    if recipe.cloud.bucket is None:
        reasons.append(f"launch.kind {recipe.launch.kind} keeps the run folder in a bucket; set cloud.bucket")
    if verb in ("ingest", "run"):
        sources = [*recipe.data.train, *(recipe.data.validation if isinstance(recipe.data.validation, list) else [])]
        reasons += [f"data source {source.source} is a file of this machine; put it into the bucket, or run `ingot ingest` here first"
                    for source in sources if ":" not in source.source and not is_remote(source.source)]
    model = recipe.model.source
    if verb in ("prepare", "train", "evaluate", "run") and ":" not in model and not is_remote(model):
        reasons.append(f"model.source {model} is a folder of this machine; copy it into the bucket and give gs://..., or use hf:")
    return reasons


def checkpoints(recipe: Recipe, job: Job) -> Callable[[], dict[int, Stamp]]:
    """What tells the committed steps, wherever the job's checkpoints go."""
    if job.mirror is None:
        return lambda: committed(recipe.folder.checkpoints)
    url = recipe.checkpoint.upload or f"{job.mirror}/checkpoints"

    def in_bucket() -> dict[int, Stamp]:
        markers = [blob for blob in open_bucket(url).list("step-") if blob.name.endswith("/COMMIT.json")]
        return {int(blob.name.partition("/")[0].removeprefix("step-")): (blob.generation, 0) for blob in markers}

    return in_bucket
