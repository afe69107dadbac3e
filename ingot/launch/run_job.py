"""Runs a verb where `launch` says: chooses the launcher, makes the job, submits it and waits.
Shared by `ingot launch`, `ingot run` and the pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ingot.base.errors import EXIT_DONE, EXIT_KEEP, Failed, WrongInput
from ingot.base.progress import say
from ingot.base.remote.replica import replica_url
from ingot.config.recipe import Recipe
from ingot.launch.attempt import StartAttempt, StopRequested, StopRequests, follow
from ingot.launch.handles import check_same_work, find_handle
from ingot.launch.job import (
    FINAL_STATES,
    AdoptingLauncher,
    ExclusiveLauncher,
    Job,
    Launcher,
    launcher_of,
    status_or_unknown,
)
from ingot.launch.places.local import JobExit
from ingot.launch.places.node_commands import path_on_nodes
from ingot.launch.staging import committed_anywhere, missing_inputs, next_rendezvous, stage_start
from ingot.launch.supervisor.budget import (
    end_last_start,
    meter_of,
    time_left_s,
    with_time_left,
)
from ingot.launch.supervisor.remote_attempt import RemoteAttempt
from ingot.launch.supervisor.supervise import FRESH, supervise


def job_of(recipe: Recipe, verb: str, *, distributed: bool, options: Sequence[str] = ()) -> Job:
    """The job of a verb where `launch` says. `distributed`: whether the verb supports several nodes
    and processes.

    Nodes read the recipe as resolved here and now, whatever files, overrides and variables it came
    from; `stage_start` copies it to where they look for it.
    """
    launch = recipe.launch
    nodes, processes = (launch.nodes, launch.processes) if distributed else (1, 1)
    shares_disk = launcher_of(recipe).shares_disk
    resolved = Path(recipe.output) / recipe.name / "jobs" / f"nodes.{verb}.yaml"
    job = Job(
        verb,
        (verb, path_on_nodes(resolved) if shares_disk else str(resolved), *options),
        processes,
        nodes,
        launch.variables,
        tuple(launch.secrets),
        launch.image,
        time_left_s(recipe, nodes),
    )
    if shares_disk:
        return replace(job, rendezvous=str(next_rendezvous(recipe.folder.root.absolute(), verb)))
    url = replica_url(recipe.cloud.bucket or "", recipe.name)
    rendezvous = next_rendezvous(recipe.folder.root, verb).relative_to(recipe.folder.root)
    return replace(job, run_folder_url=url, rendezvous=f"{url}/{rendezvous}")


def run_job(recipe: Recipe, job: Job, *, supervised: bool) -> JobExit:
    """Run a job at its place and wait for it: a training under supervision, whose caller holds the
    run folder's `run-lock`; any other verb once.

    Raises:
        WrongInput: the place cannot run it; nothing was sent.
    """
    launcher, fresh = launcher_of(recipe), FRESH in job.argv
    if reasons := [*launcher.can(job), *missing_inputs(recipe, job)]:
        raise WrongInput(
            f"{job.name} cannot run with launch.kind {recipe.launch.kind}:"
            f" {'; '.join(dict.fromkeys(reasons))}"
        )
    meter = meter_of(recipe, job)
    attempts = list[RemoteAttempt]()

    def start(job: Job, stops: StopRequests) -> RemoteAttempt:
        # Only before this command's first start: how our own attempts ended is known.
        already_runs = not attempts and _already_runs(recipe, launcher, job)
        if meter is not None and not already_runs:
            if not attempts:  # an earlier launcher may have died before its start ended
                end_last_start(meter, recipe, job, launcher)
                if fresh:
                    meter.reset()
            job = with_time_left(recipe, job, meter)
        # What prevents the first start is reported at once; later starts wait until it passes.
        patience_s = recipe.launch.start_s if attempts else 0.0

        def prepare(job: Job) -> Job | None:
            try:
                with stops.leaving_at_once():
                    if _runs_elsewhere(launcher, job):
                        return None
                    return stage_start(recipe, job)
            except StopRequested:
                say(f"{job.name}: stopped before anything was started on {recipe.launch.kind}")
                raise

        attempts.append(
            RemoteAttempt(
                launcher,
                job,
                recipe.folder.root,
                patience_s=patience_s,
                prepare=None if already_runs else prepare,
                meter=meter,
            )
        )
        return attempts[-1]

    ended = (
        supervise(job, recipe, start=start, checkpoints=committed_anywhere(recipe, job))
        if supervised
        else _run_once(job, start)
    )
    if meter is not None and ended.code in (EXIT_DONE, EXIT_KEEP):
        meter.reset()
    return ended


def _run_once(job: Job, start: StartAttempt) -> JobExit:
    with StopRequests() as stops:
        try:
            attempt = start(job, stops)
        except StopRequested:
            return JobExit(128 + stops.first, stops.first)
        try:
            end = follow(attempt, stops)
        except BaseException:
            attempt.stop()
            raise
    if end.reason:
        say(f"{job.name}: {end.reason}")
    return JobExit(end.shell_code, stops.first)


def _already_runs(recipe: Recipe, launcher: Launcher, job: Job) -> bool:
    """Whether the job is still running from an earlier launcher that died. It is then continued,
    and its node 0 is the one that writes to the bucket.

    Raises:
        Failed: the place does not answer, or the job does something else than this one would.
    """
    handle = find_handle(recipe.folder.root, job.name, recipe.launch.kind)
    state = status_or_unknown(launcher, handle) if handle is not None else "failed"
    if state == "unknown":
        raise Failed(
            f"whether {recipe.launch.kind} {handle.id if handle else ''} still does {job.name}"
            " cannot be told now; run the same command again"
        )
    if handle is None or state in FINAL_STATES:
        return False
    check_same_work(recipe.folder.root, handle, state, job, recipe)
    return True


def _runs_elsewhere(launcher: Launcher, job: Job) -> bool:
    """Whether another computer has started this job, which is then followed from here: the folder
    in the bucket is its nodes'.

    Raises:
        Failed: what runs there does something else, or can be followed from there alone.
    """
    if isinstance(launcher, ExclusiveLauncher) and (reason := launcher.busy(job)) is not None:
        raise Failed(reason)
    return isinstance(launcher, AdoptingLauncher) and launcher.runs(job)
