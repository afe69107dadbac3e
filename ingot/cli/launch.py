"""`ingot launch ...`: a verb as a job that can be found again, a training supervised; and status, logs and cancel of jobs."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ingot.config.recipe import Recipe
    from ingot.launch.job import Handle, Job
    from ingot.launch.local import LocalLauncher

launch = typer.Typer(
    no_args_is_help=True, help="Run a verb as a job; a training is watched, and started again when it fails. `launch.detach=true` needs no terminal."
)

Arguments = Annotated[
    list[str], typer.Argument(metavar="RECIPE.yaml... KEY=VALUE...", help="Recipe files and overrides; later ones win.", show_default=False)
]
RunOrRecipe = Annotated[str, typer.Argument(metavar="RUN|RECIPE.yaml", help="A run folder, or the recipe that makes it.", show_default=False)]
Fresh = Annotated[bool, typer.Option("--fresh", help="Train from the first step; old checkpoints are set aside.")]
Again = Annotated[bool, typer.Option("--again", help="Do it although nothing changed.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be started, and start nothing.")]
Handled = Annotated[bool, typer.Option("--handled", hidden=True)]  # whoever started us keeps the handle
Named = Annotated[str | None, typer.Option("--job", metavar="VERB", help="Of this verb; the last one started when left out.", show_default=False)]
FOLLOW_S = 0.2
OTHERS = {"ingest": "Read the sources", "prepare": "Tokenize", "evaluate": "Measure a model", "gate": "Decide", "register": "Keep the model as a version"}


@launch.command(epilog="Example: ingot launch train recipes/quickstart.yaml launch.detach=true")
def train(context: typer.Context, arguments: Arguments, fresh: Fresh = False, dry_run: DryRun = False, handled: Handled = False) -> int:
    """Train under supervision: what dies or hangs is started again from the newest checkpoint."""
    return _launch("train", arguments, ["--fresh"] * fresh + ["--debug"] * bool(context.obj), dry_run=dry_run, handled=handled)


@launch.command(epilog="Example: ingot launch run recipes/quickstart.yaml launch.detach=true")
def run(context: typer.Context, arguments: Arguments, fresh: Fresh = False, dry_run: DryRun = False, handled: Handled = False) -> int:
    """Do all steps in order, the training under supervision."""
    return _launch("run", arguments, ["--fresh"] * fresh + ["--debug"] * bool(context.obj), dry_run=dry_run, handled=handled)


def _other(verb: str) -> Callable[..., int]:
    def once(context: typer.Context, arguments: Arguments, again: Again = False, dry_run: DryRun = False, handled: Handled = False) -> int:
        return _launch(verb, arguments, ["--again"] * again + ["--debug"] * bool(context.obj), dry_run=dry_run, handled=handled)

    return once


for _verb, _help in OTHERS.items():
    launch.command(_verb, help=f"{_help}, as a job; without restarts.", epilog=f"Example: ingot launch {_verb} recipes/quickstart.yaml")(_other(_verb))


def _launch(verb: str, arguments: list[str], options: list[str], *, dry_run: bool, handled: bool) -> int:
    from ingot.cli.arguments import read_recipe
    from ingot.launch.job import Job
    from ingot.launch.local import LocalLauncher
    from ingot.pipeline.steps import STEPS

    recipe = read_recipe(arguments)
    launcher = LocalLauncher(recipe.folder.root)
    shared = any(step.verb == verb and step.distributed for step in STEPS)
    job = Job(verb, (verb, *arguments, *options), recipe.launch.processes if shared else 1)
    if recipe.launch.detach:
        # What goes on without a terminal is the supervisor itself.
        job = Job(verb, ("launch", verb, *arguments, "launch.detach=false", *options, "--handled"))
    if dry_run:
        print(launcher.render(job), end="")
        return 0
    return _submit(job, recipe, launcher) if recipe.launch.detach else _here(job, recipe, launcher, handled=handled)


def _submit(job: Job, recipe: Recipe, launcher: LocalLauncher) -> int:
    from ingot.base.errors import Failed
    from ingot.base.lock import lock_holder
    from ingot.base.progress import say

    root = recipe.folder.root
    if (holder := lock_holder(root, "run-lock") or lock_holder(root)) is not None:
        raise Failed(f"{root} is in use by process {holder}; wait for it, stop it, or choose another `name`")
    handle = launcher.submit(job)
    say(f"{job.name}: process {handle.id} goes on by itself; `ingot launch logs {root} --follow` shows what it says")
    print(handle.to_json(), end="")
    return 0


def _here(job: Job, recipe: Recipe, launcher: LocalLauncher, *, handled: bool) -> int:
    """Do the job in the foreground, under a handle."""
    from ingot.base.errors import EXIT_FAILED, IngotError
    from ingot.base.lock import folder_lock
    from ingot.base.progress import say
    from ingot.launch.local import foreground
    from ingot.launch.supervise import supervise

    supervised = job.name == "train"
    with folder_lock(recipe.folder.root, "run-lock") if supervised else contextlib.nullcontext():
        handle = None if handled else launcher.begin(job)
        if handle is not None:
            say(f"{job.name}: process {handle.id}; `ingot launch status {recipe.folder.root}` and `cancel` find it from elsewhere")
        code = EXIT_FAILED
        try:
            code = (supervise(job, recipe, results=sys.stdout) if supervised else foreground(job, results=sys.stdout)).code
        except IngotError as error:
            code = error.exit_code
            raise
        finally:
            if handle is not None:
                launcher.end(handle, code)
    return code


@launch.command(epilog="Example: ingot launch status runs/quickstart")
def status(run: RunOrRecipe) -> int:
    """The jobs of a run: queued, running, succeeded, failed, preempted, cancelled or unknown; and how far a training is."""
    from ingot.base.heartbeat import heartbeat_file, read_beats
    from ingot.base.progress import duration

    launcher, handles = _jobs(run, None)
    for handle in handles:
        state = launcher.status(handle)
        more = ""
        if state == "running" and handle.name in ("train", "run"):
            beats = read_beats(heartbeat_file(launcher.folder / "heartbeats"))
            beat = max(beats, key=lambda beat: beat.mono, default=None)
            more = f", {beat.step:,} steps done, {beat.phase}" if beat else ""
        since = f", for {duration(time.time() - handle.started)}" if state == "running" else ""
        print(f"{handle.name:<10}{state:<11}process {handle.id}{since}{more}")
    return 0


@launch.command(epilog="Example: ingot launch logs runs/quickstart --follow")
def logs(
    run: RunOrRecipe, follow: Annotated[bool, typer.Option("--follow", help="Go on until the job ends.")] = False, job: Named = None,
) -> int:
    """What a detached job has said."""
    from ingot.base.errors import WrongInput

    launcher, handles = _jobs(run, job)
    handle = handles[0]
    if not handle.log:
        raise WrongInput(f"{handle.name} was started in a terminal, where its messages are; with launch.detach=true they are kept")
    with launcher.logs(handle).open("rb") as stream:
        while True:
            over = launcher.status(handle) != "running"  # asked before reading, so that nothing it said is left out
            while text := stream.read(1 << 16):
                sys.stdout.buffer.write(text)
            sys.stdout.buffer.flush()
            if over or not follow:
                return 0
            time.sleep(FOLLOW_S)


@launch.command(epilog="Example: ingot launch cancel runs/quickstart")
def cancel(run: RunOrRecipe, job: Named = None) -> int:
    """Ask a job to stop, and wait for it: a training saves a checkpoint first, and the same command goes on from there."""
    from ingot.base.errors import Failed
    from ingot.base.progress import say

    launcher, handles = _jobs(run, job)
    running = [handle for handle in handles if launcher.status(handle) == "running"]
    if not running:
        raise Failed(f"nothing runs there: {', '.join(f'{handle.name} {launcher.status(handle)}' for handle in handles)}")
    for handle in running if job is not None else running[:1]:
        launcher.cancel(handle, grace_s=_grace_s(launcher.folder))
        say(f"{handle.name}: {launcher.status(handle)}")
    return 0


def _jobs(run: str, name: str | None) -> tuple[LocalLauncher, list[Handle]]:
    """The jobs of a run, the last one first."""
    from ingot.base.errors import WrongInput
    from ingot.cli.look import run_folder
    from ingot.launch.local import LocalLauncher

    launcher = LocalLauncher(run_folder(run).root)
    handles = launcher.handles()
    found = [handle for handle in handles if name in (None, handle.name)]
    if not found:
        others = f", only of {', '.join(handle.name for handle in handles)}" if handles else ""
        raise WrongInput(f"{launcher.folder} has no job{f' of {name}' if name else ''}{others}; start one with `ingot launch {name or 'train'} RECIPE.yaml`")
    return launcher, found


def _grace_s(folder: Path) -> float:
    """What a job of this run may take to stop: all that its ranks may, and a minute for what waits for them."""
    from ingot.cli.arguments import read_recipe
    from ingot.config.work import Checkpoint

    resolved = folder / "recipe.yaml"
    return 60.0 + (read_recipe([str(resolved)]).checkpoint if resolved.exists() else Checkpoint()).grace_s
