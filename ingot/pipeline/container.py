"""One step of the compiled pipeline, in its container: fetch recipe and run folder, start the
verb's command line, send what it made.

A container remembers nothing and shares no disk: each start works in a folder of its own. Where the
step's place is another service, the command line is `ingot launch VERB`, which submits and waits,
and the nodes there work from the replica themselves.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ingot.base.errors import EXIT_DONE, EXIT_KEEP, Failed, IngotError, WrongInput
from ingot.base.markers import fingerprint
from ingot.base.progress import say
from ingot.base.remote.bucket import open_bucket
from ingot.base.remote.replica import push
from ingot.base.reports import VerbOutcome, read_record
from ingot.cloud.clients import GoogleClients
from ingot.cloud.secrets import resolve_secrets
from ingot.cloud.vertex.tensorboard import upload_metrics
from ingot.config.load import load_recipe
from ingot.config.recipe import Recipe
from ingot.launch.job import Job
from ingot.launch.places.local import foreground
from ingot.launch.run_folder_sync import RunFolderPusher, pull_run_folder
from ingot.pipeline.incremental import perform, what_it_reads
from ingot.pipeline.plan import DEPLOYS, KEEPS
from ingot.pipeline.steps import DEPLOY, step_of

RECIPE = "pipeline.yaml"


class Done(NamedTuple):
    """What a step hands to the next: where the run lies, a fingerprint of what was made, and of the
    gate what it decided.
    """

    replica: str
    fingerprint: str
    decision: str


def do(verb: str, recipe: str, replica: str, place: str, submission: str) -> Done:
    """Do `verb` of the recipe that lies at the address `recipe`, on the run folder that `replica`
    holds.

    `place`: overrides of the recipe, one a line, that say where else it runs; none where it runs
    here. `submission` names the run of the pipeline. What goes wrong has been told by the verb
    itself, and ends this process with its exit code, by which the step is tried again.
    """
    try:
        with _folder():
            return _do(verb, recipe, replica, place.splitlines(), submission)
    except IngotError as error:
        say(f"error: {error}")
        sys.exit(error.exit_code)


def _do(verb: str, address: str, replica: str, place: list[str], submission: str) -> Done:
    folder, _, name = address.rpartition("/")
    Path(RECIPE).write_bytes(open_bucket(folder).get(name))
    recipe = load_recipe([RECIPE], place, environ={}, dotenv=None)
    root = recipe.folder.root
    os.environ.update(resolve_secrets(GoogleClients(recipe.cloud), recipe.cloud.secrets))
    pull_run_folder(
        replica, root, "submit" if place and verb in ("train", "evaluate") else verb, recipe
    )
    job = _job(verb, place, _options(verb, recipe, submission))
    with (
        contextlib.nullcontext()
        if place
        else _shown(recipe, Job(verb, job.argv, run_folder_url=replica))
    ):
        code = (
            _deploy(recipe, job) if verb == "deploy" else foreground(job, results=sys.stdout).code
        )
    if place:
        push(root, replica)
    if code not in (EXIT_DONE, EXIT_KEEP):
        raise _Ended(f"{verb} ended with exit code {code}, see above", code)
    record = read_record(recipe.folder.steps, verb)
    if record is None:
        raise Failed(f"{verb} ended well and left no record in {replica}; see its log")
    decision = {EXIT_DONE: DEPLOYS, EXIT_KEEP: KEEPS}[record.exit_code] if verb == "gate" else ""
    return Done(replica, record.outputs, decision)


@contextlib.contextmanager
def _shown(recipe: Recipe, job: Job) -> Iterator[None]:
    """While entered, what is made here goes to the replica and to TensorBoard. The nodes of another
    place do that themselves: there is one writer.
    """
    trains = job.name == "train"
    with (
        RunFolderPusher(job.run_folder_url or "", recipe.folder.root, 0),
        (
            upload_metrics(GoogleClients(recipe.cloud), recipe.name, recipe.folder.metrics)
            if trains
            else contextlib.nullcontext()
        ),
    ):
        yield


class _Ended(IngotError):
    """The verb failed, and said why."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@contextlib.contextmanager
def _folder() -> Iterator[None]:
    """A working folder of this start, gone afterwards."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="ingot-") as path:
        os.chdir(path)
        try:
            yield
        finally:
            os.chdir(before)


def _job(verb: str, place: list[str], options: list[str]) -> Job:
    """A training is supervised, here as elsewhere."""
    launched = ("launch",) if place or verb == "train" else ()
    return Job(verb, (*launched, verb, RECIPE, *place, *options))


def _options(verb: str, recipe: Recipe, submission: str) -> list[str]:
    """With `pipeline.cache: false` all is done again; so is a query always, since nothing but its
    rows tells whether the tables behind it changed. Where they did not, the documents come out the
    same, and the steps after it are skipped.
    """
    if verb == "train":
        return _of_training(recipe, submission)
    queries = verb == "ingest" and any(source.startswith("bigquery:") for source in recipe.sources)
    return ["--again"] if queries or (verb != "deploy" and not recipe.pipeline.cache) else []


def _of_training(recipe: Recipe, submission: str) -> list[str]:
    """Each training has a folder of its own for its checkpoints, named by all that it reads. So one
    that is tried again goes on where it was, and another, such as that of next week's data, begins
    anew; without a cache so does each run of the pipeline.
    """
    which = fingerprint(
        [what_it_reads(step_of("train"), recipe, {}), None if recipe.pipeline.cache else submission]
    )[:12]
    folder = f"{recipe.checkpoint.upload}/{which}"
    options = [f"checkpoint.upload={folder}"]
    if recipe.pipeline.cache:
        return options
    if open_bucket(folder).list("step-"):
        (recipe.folder.steps / "train.json").unlink(
            missing_ok=True
        )  # of the training before, which would say that all is done
        return options
    return [*options, "--fresh"]


def _deploy(recipe: Recipe, job: Job) -> int:
    """No step of `ingot run`, so that its record is kept here."""

    def do() -> VerbOutcome:
        ended = foreground(job, results=sys.stdout)
        if ended.code != EXIT_DONE:
            raise _Ended(f"deploy ended with exit code {ended.code}, see above", ended.code)
        registered = read_record(recipe.folder.steps, "register")
        if registered is None:
            raise WrongInput(
                f"{recipe.folder.root} has nothing that was registered; run the step register first"
            )
        return VerbOutcome(
            f"{registered.result} deployed",
            registered.where,
            fingerprint(["deploy", registered.outputs]),
        )

    return perform(DEPLOY, recipe, do, {}, again=not recipe.pipeline.cache).exit_code
