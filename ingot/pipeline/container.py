"""Runs one step of the compiled pipeline in its container: fetches recipe and run folder, runs the
verb's command line, uploads the results.

Containers share no disk and keep no state, so each start works in a temporary folder. Where the
step runs on another service, the command line is `ingot launch VERB`, which submits and waits; the
nodes there read and write the replica themselves.
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
from ingot.pipeline.incremental import StepFailed, run_step, step_inputs
from ingot.pipeline.plan import DEPLOYS, KEEPS
from ingot.pipeline.steps import DEPLOY, step_named

RECIPE = "pipeline.yaml"


class StepOutputs(NamedTuple):
    """Outputs passed to the next step: the replica of the run folder, a fingerprint of what was
    made, and the gate's decision.
    """

    replica: str
    fingerprint: str
    decision: str


def run_container_step(
    verb: str, recipe: str, replica: str, place: str, submission: str
) -> StepOutputs:
    """Run `verb` of the recipe at the URL `recipe` on the run folder in `replica`.

    `place`: recipe overrides, one per line, that say on which other service the verb runs; empty
    where it runs in this container. `submission` names the pipeline run. On an error the verb has
    printed its own message; this process ends with its exit code, by which Kubeflow decides about a
    retry.
    """
    try:
        with _working_folder():
            return _run(verb, recipe, replica, place.splitlines(), submission)
    except IngotError as error:
        say(f"error: {error}")
        sys.exit(error.exit_code)


def _run(verb: str, address: str, replica: str, place: list[str], submission: str) -> StepOutputs:
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
        else _uploading(recipe, Job(verb, job.argv, run_folder_url=replica))
    ):
        code = (
            _deploy(recipe, job) if verb == "deploy" else foreground(job, results=sys.stdout).code
        )
    if place:
        push(root, replica)
    if code not in (EXIT_DONE, EXIT_KEEP):
        raise StepFailed(f"{verb} ended with exit code {code}, see above", code)
    record = read_record(recipe.folder.steps, verb)
    if record is None:
        raise Failed(f"{verb} ended well and left no record in {replica}; see its log")
    decision = {EXIT_DONE: DEPLOYS, EXIT_KEEP: KEEPS}[record.exit_code] if verb == "gate" else ""
    return StepOutputs(replica, record.outputs, decision)


@contextlib.contextmanager
def _uploading(recipe: Recipe, job: Job) -> Iterator[None]:
    """Upload results to the replica, and training metrics to TensorBoard, while the context is
    open. Nodes of another service upload themselves, so that the replica has one writer.
    """
    trains = job.name == "train"
    with (
        RunFolderPusher(job.run_folder_url, recipe.folder.root, 0),
        (
            upload_metrics(GoogleClients(recipe.cloud), recipe.name, recipe.folder.metrics)
            if trains
            else contextlib.nullcontext()
        ),
    ):
        yield


@contextlib.contextmanager
def _working_folder() -> Iterator[None]:
    """Change into a temporary working folder, which is removed afterwards."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="ingot-") as path:
        os.chdir(path)
        try:
            yield
        finally:
            os.chdir(before)


def _job(verb: str, place: list[str], options: list[str]) -> Job:
    """Training always runs under the supervisor, so through `launch`."""
    launched = ("launch",) if place or verb == "train" else ()
    return Job(verb, (*launched, verb, RECIPE, *place, *options))


def _options(verb: str, recipe: Recipe, submission: str) -> list[str]:
    """`--again` for every step with `pipeline.cache: false`, and always for BigQuery sources: only
    the rows tell whether the tables behind a query changed. If they did not, the documents come out
    the same and the later steps are skipped.
    """
    if verb == "train":
        return _training_options(recipe, submission)
    queries = verb == "ingest" and any(source.startswith("bigquery:") for source in recipe.sources)
    return ["--again"] if queries or (verb != "deploy" and not recipe.pipeline.cache) else []


def _training_options(recipe: Recipe, submission: str) -> list[str]:
    """Give each training a checkpoint folder named by a fingerprint of its inputs, so that a retry
    resumes while a training on other inputs (such as next week's data) starts anew. Without a cache
    every pipeline run starts anew.
    """
    identity = fingerprint(
        [
            step_inputs(step_named("train"), recipe, {}),
            None if recipe.pipeline.cache else submission,
        ]
    )[:12]
    folder = f"{recipe.checkpoint.upload}/{identity}"
    options = [f"checkpoint.upload={folder}"]
    if recipe.pipeline.cache:
        return options
    if open_bucket(folder).list("step-"):
        (recipe.folder.steps / "train.json").unlink(
            missing_ok=True
        )  # the earlier training's record, by which this one would be skipped
        return options
    return [*options, "--fresh"]


def _deploy(recipe: Recipe, job: Job) -> int:
    """Deploy is no step of `ingot run`, so its record is written here."""

    def work() -> VerbOutcome:
        ended = foreground(job, results=sys.stdout)
        if ended.code != EXIT_DONE:
            raise StepFailed(f"deploy ended with exit code {ended.code}, see above", ended.code)
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

    return run_step(DEPLOY, recipe, work, {}, again=not recipe.pipeline.cache).exit_code
