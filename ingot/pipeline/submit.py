"""`ingot submit`: runs the whole pipeline on Vertex AI. Checks the recipe and the cloud set-up
first, uploads recipe and specification, starts the pipeline and follows it.

The only state is a note in the run folder: the same command finds the running pipeline by it and
follows it.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ingot.base.errors import Failed, IngotError, WrongInput
from ingot.base.markers import fingerprint
from ingot.base.progress import say
from ingot.base.remote.bucket import open_bucket
from ingot.base.remote.index import INDEX
from ingot.base.remote.lease import Lease, lease
from ingot.base.remote.replica import push, replica_url
from ingot.base.storage import write_atomic
from ingot.cloud.clients import GoogleClients
from ingot.cloud.instances import label, resource_name, user_labels
from ingot.cloud.regions import region_mismatch
from ingot.cloud.vertex import jobs as pipelines
from ingot.config.recipe import Recipe
from ingot.launch.run_folder_sync import pull_results
from ingot.pipeline.kubeflow import compile_pipeline, spec_text
from ingot.pipeline.plan import VERBS, PipelinePlan, plan, submission_problems

POLL_S = 15.0
"""Seconds between two polls of a pipeline."""
NOTE = "pipeline.json"
"""The note of the last submission, in `jobs/` of the run folder."""
BROUGHT_BACK = (
    *("recipe.yaml", "metrics.jsonl", "samples.jsonl", "events.jsonl"),
    *("tensorboard", "reports", "logs"),
)
"""The parts of a run folder that are downloaded at the end; model and data stay in the bucket."""
LEFT_THERE = {"ingest": "data/raw", "prepare": "data/columns", "train": "model"}
"""Where the steps whose files stay in the bucket put them, in a run folder."""
CONSOLE = "https://console.cloud.google.com/vertex-ai"
_CRON_RANGES = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 7))


@dataclass(frozen=True)
class Submission:
    """What is sent: the plan, the specification, and the pipeline job as the REST API takes it."""

    google: GoogleClients
    plan: PipelinePlan
    spec: dict[str, Any]
    job: dict[str, Any]

    @property
    def mark(self) -> str:
        """A fingerprint, equal for equal submissions."""
        return fingerprint(self.job)[:12]

    @property
    def spec_address(self) -> str:
        return f"{self.plan.root}/specs/{fingerprint(spec_text(self.spec))}.yaml"

    def link(self, id: str) -> str:
        runs = f"{CONSOLE}/locations/{self.google.cloud.region}/pipelines/runs"
        return f"{runs}/{id}?project={self.google.project}"


def prepare_submission(recipe: Recipe) -> Submission:
    """The submission of a recipe. No Google service is called.

    Raises:
        WrongInput: every reason why the recipe cannot become a pipeline.
    """
    if found := submission_problems(recipe):
        raise WrongInput(f"{recipe.name} cannot be submitted: {'; '.join(found)}")
    google, cloud = GoogleClients(recipe.cloud), recipe.cloud
    planned = plan(recipe)
    spec = compile_pipeline(planned)
    job: dict[str, Any] = {
        "displayName": resource_name(f"ingot-{recipe.name}"),
        "pipelineSpec": spec,
        "labels": {
            **user_labels(cloud),
            **_labels(recipe),
        },
        "runtimeConfig": {
            "gcsOutputDirectory": planned.root,
            "parameterValues": {"recipe": planned.address, **_identity(recipe)},
            "failurePolicy": "PIPELINE_FAILURE_POLICY_FAIL_FAST",
        },
        **pipelines.account_and_network(cloud),
    }
    return Submission(google, planned, spec, job)


def render_submission(submission: Submission, cron: str | None = None) -> str:
    """The specification and the request that carries it, as text. No Google service is called."""
    shown = {**submission.job, "pipelineSpec": f"(above, {submission.spec_address})"}
    google = submission.google
    address = google.address(f"{google.cloud.region}-aiplatform.googleapis.com")
    what, body = (
        ("pipelineJobs", shown)
        if cron is None
        else ("schedules", _schedule(submission, check_cron(cron), shown))
    )
    return (
        f"{spec_text(submission.spec)}---\n# POST"
        f" {address}/v1/{google.parent}/{what}\n{json.dumps(body, indent=2, sort_keys=True)}\n"
    )


def submit(recipe: Recipe, submission: Submission) -> tuple[str, bool]:
    """Upload everything and start the pipeline; returns its id, and whether it was running already.

    Raises:
        WrongInput, Failed: something is missing, or another pipeline of this run is running or
            being submitted.
    """
    _check_cloud(recipe, submission.google)
    # Held from asking what is running until the pipeline is there, however long uploading takes.
    locks = open_bucket(f"{submission.plan.root}/locks/{recipe.name}")
    with lease(locks, f"ingot submit of {recipe.name}") as held:
        return _submit(recipe, submission, held)


def _submit(recipe: Recipe, submission: Submission, held: Lease) -> tuple[str, bool]:
    google, note = submission.google, recipe.folder.root / "jobs" / NOTE
    last = _read_note(note)
    if last is not None and last["mark"] == submission.mark:
        job = pipelines.get_pipeline_job(google, last["id"])
        if job is not None and job.is_alive:
            return last["id"], True
        id = (
            last["id"] if job is None else _new_id(submission)
        )  # a submission that was interrupted before the pipeline was created keeps its id
    else:
        id = _new_id(submission)
    if others := [
        other
        for other in pipelines.running_pipeline_jobs(google, _labels(recipe), _identity(recipe))
        if other != id
    ]:
        raise Failed(
            f"the pipeline {others[0]} of {recipe.name} goes on, and two would write one run: wait"
            f" for it or cancel it, {submission.link(others[0])}"
        )
    _upload(recipe, submission)
    write_atomic(note, json.dumps({"schema": 1, "id": id, "mark": submission.mark}) + "\n")
    held.check()
    pipelines.create_pipeline_job(google, id, submission.job)
    return id, False


def schedule(recipe: Recipe, submission: Submission, cron: str) -> pipelines.ScheduleStatus:
    """Start the pipeline repeatedly at the times of `cron`; replaces an earlier schedule of this
    run.
    """
    request = _schedule(submission, check_cron(cron), submission.job)
    _check_cloud(recipe, submission.google)
    _upload(recipe, submission)
    return pipelines.put_schedule(submission.google, request, _identity(recipe))


def follow(submission: Submission, id: str, root: Path | None = None) -> None:
    """Print each step as it starts and ends, until the pipeline has ended; a gate that keeps the
    live model is a success. Metrics, reports and logs are then downloaded to the run folder `root`,
    if one is given.

    Raises:
        Failed: a step failed (with its name and error), or the pipeline was cancelled.
    """
    shown: dict[int, str] = {}
    last_error = ""
    while True:
        try:
            job = pipelines.get_pipeline_job(submission.google, id)
        except Failed as error:
            if str(error) != last_error:
                say(f"warning: {error}")
            last_error = str(error)
            time.sleep(POLL_S)
            continue
        if job is None:
            raise Failed(f"the pipeline {id} is gone: somebody deleted it; submit it again")
        for task in job.tasks:
            if task.name in VERBS and shown.get(task.id) != task.state:
                shown[task.id] = task.state
                state = task.state.lower().replace("_", " ")
                say(f"{task.name}: {state}{f' ({task.error})' if task.error else ''}")
        if not job.is_alive:
            if root is not None:
                _bring_back(submission.plan.replica, root)
            return _report_end(submission, job)
        time.sleep(POLL_S)


def _bring_back(replica: str, root: Path) -> None:
    """Where a model or data lie here, the records of the steps that made them stay, too: sizes are
    all that a record knows its files by, so that the pipeline's would vouch for ours.
    """
    ours = [
        f"reports/steps/{step}.json" for step in LEFT_THERE if (root / LEFT_THERE[step]).exists()
    ]
    try:
        pull_results(replica, root, parts=BROUGHT_BACK, untouched=ours)
        say(
            f"its metrics and reports are in {root} (`ingot show run {root}`); model and data stay"
            f" in {replica}"
        )
    except IngotError as error:
        say(f"warning: {error}; what the pipeline made lies in {replica}")


def cancel(recipe: Recipe) -> list[str]:
    """Cancel the running pipelines of this recipe; returns their ids. Jobs that they launched on
    other services end with their containers.
    """
    google = GoogleClients(recipe.cloud)
    found = pipelines.running_pipeline_jobs(google, _labels(recipe), _identity(recipe))
    for id in found:
        pipelines.cancel_pipeline_job(google, id)
    return found


def check_cron(cron: str) -> str:
    """A cron expression of five fields, optionally after a time zone: `TZ=Europe/Berlin 0 3 * * 1`.

    Raises:
        WrongInput: it is not one.
    """
    found = re.fullmatch(r"((?:CRON_)?TZ=[\w/+-]+ )?(\S+) (\S+) (\S+) (\S+) (\S+)", cron.strip())
    if found is None or not all(
        _in_range(field, *bounds)
        for field, bounds in zip(found.groups()[1:], _CRON_RANGES, strict=True)
    ):
        raise WrongInput(
            f"--schedule {cron!r} is no time; give minute, hour, day, month and day of the week,"
            ' such as "0 3 * * 1" for Mondays at three'
        )
    return cron.strip()


def _in_range(field: str, least: int, most: int) -> bool:
    for part in field.split(","):
        found = re.fullmatch(r"(?:\*|(\d+)(?:-(\d+))?)(?:/([1-9]\d*))?", part)
        if found is None or not all(
            least <= int(number) <= most for number in found.groups()[:2] if number
        ):
            return False
    return True


def _schedule(submission: Submission, cron: str, job: dict[str, Any]) -> dict[str, Any]:
    return {
        "displayName": submission.job["displayName"],
        "cron": cron,
        "maxConcurrentRunCount": "1",
        "createPipelineJobRequest": {"parent": submission.google.parent, "pipelineJob": job},
    }


def _labels(recipe: Recipe) -> dict[str, str]:
    return {"ingot-run": label(recipe.name), "ingot-verb": "pipeline"}


def _identity(recipe: Recipe) -> dict[str, str]:
    """The parameter by which a pipeline is this run's: somebody else's in the same project may have
    its name.
    """
    return {"replica": replica_url(recipe.cloud.bucket or "", recipe.name)}


def _check_cloud(recipe: Recipe, google: GoogleClients) -> None:
    """Check what only Google knows: credentials, the bucket and its region."""
    google.client("pipelines")
    if reason := region_mismatch(recipe.cloud):
        raise WrongInput(reason)


def _upload(recipe: Recipe, submission: Submission) -> None:
    """Upload recipe and specification under names made of their content, and the run folder unless
    the bucket already has one of this run, which is newer.
    """
    planned = submission.plan
    for address, text in (
        (planned.address, planned.recipe),
        (submission.spec_address, spec_text(submission.spec)),
    ):
        folder, _, name = address.rpartition("/")
        open_bucket(folder).put(name, text.encode())
    if open_bucket(planned.replica).stat(INDEX) is not None:
        say(f"{planned.replica} has this run already, and the pipeline goes on from there")
    elif recipe.folder.steps.is_dir():
        push(recipe.folder.root, planned.replica)


def _report_end(submission: Submission, job: pipelines.PipelineJobStatus) -> None:
    failed = next(
        (task for task in job.tasks if task.name in VERBS and task.state == "FAILED"), None
    )
    link = submission.link(job.id)
    if job.state == "SUCCEEDED":
        ran = {task.name for task in job.tasks if task.state == "SUCCEEDED"}
        say(
            "the gate passed the model, and the step deploy is done; its log says what it changed"
            if "deploy" in ran
            else "the gate keeps the live model; nothing was registered"
        )
    elif job.state == "CANCELLED":
        raise Failed(f"the pipeline {job.id} was cancelled; submit it again to go on: {link}")
    elif failed is not None:
        raise Failed(f"{failed.name} failed: {failed.error or job.error}; see its log, {link}")
    else:
        raise Failed(
            f"the pipeline {job.id} is {job.state.lower()}:"
            f" {job.error or 'no reason is given'}; see {link}"
        )


def _new_id(submission: Submission) -> str:
    """A new pipeline id: lower case letters, digits and hyphens, at most 128 characters."""
    return f"{submission.job['displayName']}-{datetime.now(UTC):%Y%m%d%H%M%S}-{submission.mark}"


def _read_note(path: Path) -> dict[str, str] | None:
    try:
        found = json.loads(path.read_bytes())
        return {"id": str(found["id"]), "mark": str(found["mark"])}
    except (OSError, ValueError, KeyError, TypeError):
        return None
