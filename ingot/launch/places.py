"""Which launcher a recipe asks for, and the job that it is given: what `ingot launch`, `ingot run`
and the pipeline share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ingot.base.errors import EXIT_DONE, EXIT_KEEP, Failed, WrongInput
from ingot.base.progress import duration, say
from ingot.base.remote.replica import replica_url
from ingot.cloud.prices import LEAST_S, hourly_of, time_limit_s
from ingot.config.recipe import Recipe
from ingot.launch.attempt import follow
from ingot.launch.dataflow import DataflowLauncher
from ingot.launch.dataproc import DataprocLauncher
from ingot.launch.gce import GceLauncher
from ingot.launch.handles import find
from ingot.launch.job import Job, Launcher
from ingot.launch.local import Ended
from ingot.launch.meeting import EXIT, Meeting
from ingot.launch.missing import what_is_missing
from ingot.launch.remote import RemoteAttempt, ask_or_unknown
from ingot.launch.shared import seen
from ingot.launch.slurm import SlurmLauncher
from ingot.launch.spending import Meter
from ingot.launch.ssh import SshLauncher
from ingot.launch.staging import checkpoints, meeting_of, staged
from ingot.launch.stops import Stops
from ingot.launch.supervise import FRESH, supervise
from ingot.launch.tpu import TpuLauncher
from ingot.launch.vertex import VertexLauncher

LAUNCHERS: dict[str, Callable[[Recipe], Launcher]] = {
    "ssh": SshLauncher,
    "slurm": SlurmLauncher,
    "gce": GceLauncher,
    "vertex": VertexLauncher,
    "dataproc": DataprocLauncher,
    "dataflow": DataflowLauncher,
    "tpu": TpuLauncher,
}
MIRRORED = ("gce", "vertex", "tpu", "dataproc", "dataflow")
"""Kinds whose nodes share no disk with us."""
BY_USE = ("dataproc", "dataflow")
"""Those that are not paid by the machine and hour."""


def launcher(recipe: Recipe) -> Launcher:
    """The launcher of `launch.kind`. Raises WrongInput for `local`, which needs none."""
    kind = recipe.launch.kind
    if kind not in LAUNCHERS:
        raise WrongInput(
            f"launch.kind {kind} has no launcher here; choose one of {', '.join(LAUNCHERS)}"
        )
    return LAUNCHERS[kind](recipe)


def place(recipe: Recipe, verb: str, *, shared: bool, options: Sequence[str] = ()) -> Job:
    """The job of a verb where `launch` says. `shared`: several nodes and processes can do it
    together.

    Nodes read the recipe as it is resolved here and now, whatever files, overrides and variables it
    came from: `stage` puts it there.
    """
    launch = recipe.launch
    nodes, processes = (launch.nodes, launch.processes) if shared else (1, 1)
    mirrored = launch.kind in MIRRORED
    given = Path(recipe.output) / recipe.name / "jobs" / f"nodes.{verb}.yaml"
    job = Job(
        verb,
        (verb, str(given) if mirrored else seen(given), *options),
        processes,
        nodes,
        launch.variables,
        tuple(launch.secrets),
        launch.image,
        _time_limit_s(recipe, nodes),
    )
    if not mirrored:
        return replace(job, meet=str(meeting_of(recipe.folder.root.absolute(), verb)))
    url = replica_url(recipe.cloud.bucket or "", recipe.name)
    return replace(
        job,
        mirror=url,
        meet=f"{url}/{meeting_of(recipe.folder.root, verb).relative_to(recipe.folder.root)}",
    )


def _time_limit_s(
    recipe: Recipe, nodes: int, used: tuple[float, float] = (0.0, 0.0)
) -> float | None:
    """What is left of what the job may take, where that costs money by the hour."""
    kind = recipe.launch.kind
    if kind in BY_USE:
        if recipe.cloud.max_cost is not None and not used[0]:
            say(
                f"note: {kind} is paid by what it uses, which cloud.max_cost does not bound;"
                " cloud.max_run does"
            )
        return recipe.cloud.max_run - used[0]
    return time_limit_s(recipe, nodes=nodes, used=used) if kind in MIRRORED else None


def do(recipe: Recipe, job: Job, *, supervised: bool) -> Ended:
    """Run a job at its place and wait for it: a training under supervision, whose caller holds the
    run folder's `run-lock`; anything else once.

    Raises:
        WrongInput: the place cannot run it; nothing was sent.
    """
    elsewhere, fresh = launcher(recipe), FRESH in job.argv
    if reasons := [*elsewhere.can(job), *what_is_missing(recipe, job)]:
        raise WrongInput(
            f"{job.name} cannot run with launch.kind {recipe.launch.kind}:"
            f" {'; '.join(dict.fromkeys(reasons))}"
        )
    meter = meter_of(recipe, job)
    if meter is not None and fresh:
        meter.forget()
    starts = list[RemoteAttempt]()

    def start(job: Job) -> RemoteAttempt:
        runs = not starts and _runs_already(recipe, elsewhere, job)  # how our own ended is known
        if meter is not None and not starts and not runs:
            meter.end(_ended_at(recipe, job))  # of a launcher that did not live to see it
        if meter is not None and not runs:
            job = _in_time(recipe, job, meter)
        # What keeps the first start from coming about is told at once; a later one waits for it to
        # pass.
        patience_s = recipe.launch.start_s if starts else 0.0
        ready = None if runs else lambda job: staged(recipe, _free(elsewhere, job))
        starts.append(
            RemoteAttempt(
                elsewhere, job, recipe.folder.root, patience_s=patience_s, ready=ready, meter=meter
            )
        )
        return starts[-1]

    ended = (
        supervise(job, recipe, start=start, checkpoints=checkpoints(recipe, job))
        if supervised
        else _once(job, start)
    )
    if meter is not None and ended.code in (EXIT_DONE, EXIT_KEEP):
        meter.forget()
    return ended


def _once(job: Job, start: Callable[[Job], RemoteAttempt]) -> Ended:
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
    """Whether an earlier launcher that died has left the job running, which is gone on with: its
    node 0 is who writes to the bucket then.

    Raises:
        Failed: the place does not say.
    """
    handle = find(recipe.folder.root, job.name, recipe.launch.kind)
    state = ask_or_unknown(lambda: elsewhere.status(handle)) if handle is not None else "failed"
    if state == "unknown":
        raise Failed(
            f"whether {recipe.launch.kind} {handle.id if handle else ''} still does {job.name}"
            " cannot be told now; run the same command again"
        )
    return state in ("queued", "running")


def _free(elsewhere: Launcher, job: Job) -> Job:
    """Raises Failed where the same job runs that was started elsewhere: its folder in the bucket is
    not ours to write to.
    """
    if isinstance(elsewhere, GceLauncher) and (reason := elsewhere.busy(job)) is not None:
        raise Failed(reason)
    return job


def meter_of(recipe: Recipe, job: Job) -> Meter | None:
    """What counts the job's time, where it is paid by the hour."""
    if job.time_limit_s is None:
        return None
    rate = 0.0 if recipe.launch.kind in BY_USE else hourly_of(recipe, job.nodes)
    return Meter(recipe.folder.root, job.name, rate)


def _in_time(recipe: Recipe, job: Job, meter: Meter) -> Job:
    """With what is left of the time for one more start. Raises Failed when that is nothing to speak
    of.
    """
    used = meter.used()
    left = _time_limit_s(recipe, job.nodes, used) or 0.0
    if left < LEAST_S and used[0]:
        raise Failed(
            f"what cloud.max_run and cloud.max_cost allow is used up ({duration(used[0])}, about"
            f" {used[1]:.2f} US dollars); raise them, and the same command goes on"
        )
    return replace(job, time_limit_s=left)


def _ended_at(recipe: Recipe, job: Job) -> float | None:
    """When a start that nobody waited for was over, as its nodes have said; None where they have
    not.
    """
    handle = find(recipe.folder.root, job.name, recipe.launch.kind)
    if handle is None or "meet" not in handle.about:
        return None
    return max(
        (float(note["t_wall"]) for note in Meeting(handle.about["meet"]).notes(EXIT).values()),
        default=None,
    )
