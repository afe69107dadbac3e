"""`ingot launch ...`: a verb as a job that can be found again, a training supervised; and status,
logs and cancel of jobs.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from ingot.cli.options import Again, AsJson, DryRun, Fresh, Recipes, RunOrRecipe
from ingot.cli.output import print_json

if TYPE_CHECKING:
    from ingot.config.recipe import Recipe
    from ingot.config.values import Values
    from ingot.launch.job import Job, JobState, Launcher
    from ingot.launch.job_control import SubmittedJob
    from ingot.launch.places.local import JobExit, LocalLauncher

launch = typer.Typer(
    no_args_is_help=True,
    help=(
        "Run a verb as a job; a training is watched, and started again when it fails."
        " `launch.detach=true` needs no terminal."
    ),
)

Handled = Annotated[
    bool, typer.Option("--handled", hidden=True)
]  # the parent process keeps the handle
Named = Annotated[
    str | None,
    typer.Option(
        "--job",
        metavar="VERB",
        help="Of this verb; the last one started when left out.",
        show_default=False,
    ),
]


def _fresh(verb: str) -> Callable[..., int]:
    def launch_verb(
        context: typer.Context,
        arguments: Recipes,
        fresh: Fresh = False,
        dry_run: DryRun = False,
        handled: Handled = False,
    ) -> int:
        options = ["--fresh"] * fresh + ["--debug"] * bool(context.obj)
        return _launch(verb, arguments, options, dry_run=dry_run, handled=handled)

    return launch_verb


def _again(verb: str) -> Callable[..., int]:
    def launch_verb(
        context: typer.Context,
        arguments: Recipes,
        again: Again = False,
        dry_run: DryRun = False,
        handled: Handled = False,
    ) -> int:
        options = ["--again"] * again + ["--debug"] * bool(context.obj)
        return _launch(verb, arguments, options, dry_run=dry_run, handled=handled)

    return launch_verb


VERBS = {
    "train": "Train under supervision: what dies or hangs is started again from the newest"
    " checkpoint.",
    "run": "Do all steps in order, the training under supervision.",
    "ingest": "Read the sources, as a job; without restarts.",
    "prepare": "Tokenize, as a job; without restarts.",
    "evaluate": "Measure a model, as a job; without restarts.",
    "gate": "Decide, as a job; without restarts.",
    "register": "Keep the model as a version, as a job; without restarts.",
}
for _verb, _help in VERBS.items():
    _trains = _verb in ("train", "run")
    launch.command(
        _verb,
        help=_help,
        epilog=f"Example: ingot launch {_verb} quickstart{' launch.detach=true' * _trains}",
    )((_fresh if _trains else _again)(_verb))


def _launch(
    verb: str, arguments: list[str], options: list[str], *, dry_run: bool, handled: bool
) -> int:
    from ingot.cli.check.recipe import ALL, check, read_checked
    from ingot.launch.job import Job
    from ingot.launch.places.local import LocalLauncher
    from ingot.pipeline.steps import STEPS

    verbs = ALL if verb == "run" else (verb,)
    recipe, values = read_checked(arguments, verb, verbs)
    # With --handled, the parent process has checked already.
    lacking = [] if handled else check(recipe, values, verbs, dry_run=dry_run)
    asked, recipe = (recipe, values), recipe.at(verb)
    here = LocalLauncher(recipe.folder.root)
    shared = any(step.verb == verb and step.distributed for step in STEPS)
    if recipe.launch.detach:
        # The detached process is the supervisor itself.
        job = Job(verb, ("launch", verb, *arguments, "launch.detach=false", *options, "--handled"))
        return _show(here, job, lacking, asked) if dry_run else _submit(job, recipe, here)
    # `run` itself stays here; steps that several nodes can share run where the recipe says.
    if recipe.launch.kind != "local" and verb != "run":
        from ingot.launch.job import launcher_of
        from ingot.launch.run_job import job_of

        job = job_of(recipe, verb, distributed=shared, options=options)
        if dry_run:
            return _show(launcher_of(recipe), job, lacking, asked)
        return _here(job, recipe, here, handled=handled)
    if verb == "run" and not dry_run:  # what it needs was checked here, or by our parent process
        options = [*options, "--checked"]
    job = Job(
        verb,
        (verb, *arguments, *options),
        recipe.launch.processes if shared else 1,
        environment=recipe.launch.variables,
    )
    return (
        _show(here, job, lacking, asked) if dry_run else _here(job, recipe, here, handled=handled)
    )


def _show(
    launcher: LocalLauncher | Launcher,
    job: Job,
    lacking: Sequence[str],
    asked: tuple[Recipe, Values],
) -> int:
    """Print what would be started, and what prevents that at present; of a training also what is
    known of it.
    """
    from ingot.base.progress import say
    from ingot.cli.plan import tell_dry_run

    told = [reason for reason in launcher.can(job) if not any(reason in line for line in lacking)]
    for reason in (*told, *lacking):
        say(f"note: as things are it could not be started: {reason}")
    print(launcher.render(job), end="", flush=True)
    if job.name in ("train", "run"):
        tell_dry_run(*asked)
    return 0


def _submit(job: Job, recipe: Recipe, launcher: LocalLauncher) -> int:
    from ingot.base.progress import say
    from ingot.base.runfolder import RUN_LOCK, in_use, lock_holder

    root = recipe.folder.root
    if (holder := lock_holder(root, RUN_LOCK) or lock_holder(root)) is not None:
        raise in_use(root, holder)
    handle = launcher.submit(job)
    say(
        f"{job.name}: process {handle.id} goes on by itself; `ingot launch logs {root} --follow`"
        " shows what it says"
    )
    print(handle.to_json(), end="")
    return 0


def _here(job: Job, recipe: Recipe, launcher: LocalLauncher, *, handled: bool) -> int:
    """Run the job in the foreground, under a handle; a remote job is waited for here."""
    from ingot.base.errors import EXIT_FAILED, IngotError
    from ingot.base.progress import say
    from ingot.base.runfolder import RUN_LOCK, check_no_other_run, folder_lock

    check_no_other_run(recipe.folder.root)
    with (
        folder_lock(recipe.folder.root, RUN_LOCK)
        if job.name == "train"
        else contextlib.nullcontext()
    ):
        handle = None if handled else launcher.begin(job)
        if handle is not None:
            say(
                f"{job.name}: process {handle.id}; `ingot launch status {recipe.folder.root}` and"
                " `cancel` find it from elsewhere"
            )
        code = EXIT_FAILED
        try:
            code = _done(job, recipe).code
        except IngotError as error:
            code = error.exit_code
            raise
        finally:
            if handle is not None:
                launcher.end(handle, code)
    return code


def _done(job: Job, recipe: Recipe) -> JobExit:
    from ingot.launch.places.local import foreground
    from ingot.launch.supervisor.supervise import supervise

    supervised = job.name == "train"
    if recipe.launch.kind != "local" and job.name != "run":
        from ingot.launch.run_job import run_job

        return run_job(recipe, job, supervised=supervised)
    return (
        supervise(job, recipe, results=sys.stdout)
        if supervised
        else foreground(job, results=sys.stdout)
    )


@launch.command(epilog="Example: ingot launch status runs/quickstart")
def status(run: RunOrRecipe, as_json: AsJson = False) -> int:
    """The jobs of a run: queued, running, suspended, succeeded, failed, preempted, cancelled or
    unknown; and how far a training is.
    """
    from ingot.base.progress import duration

    jobs = _jobs(run, None)
    if as_json:
        told = [
            {
                "name": job.handle.name,
                "kind": job.handle.kind,
                "id": job.handle.id,
                "state": job.state(),
                "started": job.handle.started,
                "where": job.where,
                "progress": job.progress().removeprefix(", "),
            }
            for job in jobs
        ]
        print_json("launch status", jobs=told)
        return 0
    for job in jobs:
        state = job.state()
        more = f", for {duration(time.time() - job.handle.started)}" if state == "running" else ""
        if state == "running" and job.handle.name in ("train", "run"):
            more += job.progress()
        print(f"{job.handle.name:<10}{state:<11}{job.where}{more}")
    return 0


@launch.command(epilog="Example: ingot launch logs runs/quickstart --follow")
def logs(
    run: RunOrRecipe,
    follow: Annotated[bool, typer.Option("--follow", help="Go on until the job ends.")] = False,
    job: Named = None,
) -> int:
    """What a job has said that is detached, or runs elsewhere."""
    from ingot.base.errors import WrongInput
    from ingot.launch.job import FINAL_STATES

    found = _jobs(run, job)
    told = next((each for each in found if each.has_log), None)
    if told is None:
        raise WrongInput(
            f"{found[0].handle.name} was started in a terminal, where its messages are; with"
            " launch.detach=true they are kept"
        )
    log = told.log()
    # Past what outlives its reader: who only reads ends with whoever it reads for.
    out = open(sys.stdout.fileno(), "wb", closefd=False)  # noqa: SIM115
    while True:
        state = told.state()  # queried before reading, so that no output is missed
        # A killed local process stays `unknown` for ever; another place may only be temporarily
        # unreachable.
        over = state in FINAL_STATES or (state == "unknown" and told.handle.kind == "local")
        while text := log.read():
            out.write(text)
        out.flush()
        if over or not follow:
            return 0
        time.sleep(told.poll_s)


@launch.command(epilog="Example: ingot launch cancel runs/quickstart")
def cancel(run: RunOrRecipe, job: Named = None) -> int:
    """Ask a job to stop, and wait for it: a training saves a checkpoint first, and the same command
    goes on from there.
    """
    from ingot.base.errors import Failed
    from ingot.base.progress import say
    from ingot.launch.job import FINAL_STATES

    found = [(each, each.state()) for each in _jobs(run, job)]
    running = [each for each, state in found if state not in (*FINAL_STATES, "unknown")]
    running += [each for each, state in found if state == "unknown" and _may_run(each, found)]
    if not running:
        states = ", ".join(f"{each.handle.name} {state}" for each, state in found)
        raise Failed(f"nothing runs there: {states}")
    for each in running if job is not None else _of_one(running):
        if each.state() in FINAL_STATES:
            continue  # already ended by the process that waited for it
        each.cancel()
        say(f"{each.handle.name}: {each.state()}")
    return 0


def _may_run(job: SubmittedJob, found: Sequence[tuple[SubmittedJob, JobState]]) -> bool:
    """Whether a job of which nothing is known may run: a place may not answer now, while a local
    process that is not found has died. One whose verb was started again since is left alone: its
    place may be gone for ever.
    """
    return job.handle.kind != "local" and not any(
        other.handle.started > job.handle.started
        and other.handle.name in (job.handle.name, "run")
        and (other.handle.kind != "local" or state == "running")
        for other, state in found
    )


def _of_one(running: list[SubmittedJob]) -> list[SubmittedJob]:
    """The process that waits for the newest job, and that job itself if it is remote: under `run`,
    the job of one of its steps.
    """
    first = running[0].handle
    return [
        each
        for each in running
        if each.handle.name == first.name or (first.name == "run" and each.handle.kind != "local")
    ]


def _jobs(run: Sequence[str], name: str | None) -> list[SubmittedJob]:
    """The jobs of a run, newest first; a process that waits for a job precedes it."""
    from ingot.base.errors import WrongInput
    from ingot.cli.console import run_folder
    from ingot.launch.job_control import submitted_jobs

    root = run_folder(*run).root
    jobs = submitted_jobs(root)
    found = [job for job in jobs if name in (None, job.handle.name)]
    if not found:
        others = f", only of {', '.join(job.handle.name for job in jobs)}" if jobs else ""
        raise WrongInput(
            f"{root} has no job{f' of {name}' if name else ''}{others}; start one with `ingot"
            f" launch {name or 'train'} RECIPE.yaml`"
        )
    return found
