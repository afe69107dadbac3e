"""`ingot submit`: the whole pipeline on Vertex AI. Checks what can be wrong before anything is
spent, sends recipe and specification, and follows.

Nothing here remembers a submission but a note in the run folder: the same command again finds the
pipeline that runs, and follows it.
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
from ingot.base.remote.replica import push
from ingot.base.storage import write_atomic
from ingot.cloud.clients import GoogleClients
from ingot.cloud.instances import label, resource_name
from ingot.cloud.regions import region_mismatch
from ingot.cloud.vertex import jobs as pipelines
from ingot.config.recipe import Recipe
from ingot.launch.run_folder_sync import pull_results
from ingot.pipeline.kubeflow import compiled, text_of
from ingot.pipeline.plan import VERBS, Plan, plan, reasons

LOOK_S = 15.0
"""Between two looks at a pipeline."""
NOTE = "pipeline.json"
SHOWN = ("recipe.yaml", "metrics.jsonl", "events.jsonl", "tensorboard", "reports", "logs")
"""Of a run folder: what there is to look at."""
CONSOLE = "https://console.cloud.google.com/vertex-ai"
_FIELDS = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 7))


@dataclass(frozen=True)
class Submission:
    """What is sent: the plan, the specification, and the pipeline job that is asked for, as the
    REST interface takes it.
    """

    google: GoogleClients
    plan: Plan
    spec: dict[str, Any]
    job: dict[str, Any]

    @property
    def mark(self) -> str:
        """Equal for equal submissions."""
        return fingerprint(self.job)[:12]

    @property
    def spec_address(self) -> str:
        return f"{self.plan.root}/specs/{fingerprint(text_of(self.spec))}.yaml"

    def link(self, id: str) -> str:
        runs = f"{CONSOLE}/locations/{self.google.cloud.region}/pipelines/runs"
        return f"{runs}/{id}?project={self.google.project}"


def prepared(recipe: Recipe) -> Submission:
    """The submission of a recipe; nothing is asked of Google.

    Raises:
        WrongInput: names all that keeps the recipe from becoming a pipeline.
    """
    if found := reasons(recipe):
        raise WrongInput(f"{recipe.name} cannot be submitted: {'; '.join(found)}")
    google, cloud = GoogleClients(recipe.cloud), recipe.cloud
    wanted = plan(recipe)
    spec = compiled(wanted)
    job: dict[str, Any] = {
        "displayName": resource_name(f"ingot-{recipe.name}"),
        "pipelineSpec": spec,
        "labels": {
            **{label(key): label(value) for key, value in cloud.labels.items()},
            **_labels(recipe),
        },
        "runtimeConfig": {
            "gcsOutputDirectory": wanted.root,
            "parameterValues": {"recipe": wanted.address, "replica": wanted.replica},
            "failurePolicy": "PIPELINE_FAILURE_POLICY_FAIL_FAST",
        },
    }
    if cloud.service_account:
        job["serviceAccount"] = cloud.service_account
    if cloud.network:
        job |= (
            {"pscInterfaceConfig": {"networkAttachment": cloud.network}}
            if "/networkAttachments/" in cloud.network
            else {"network": cloud.network}
        )
    return Submission(google, wanted, spec, job)


def rendered(submission: Submission, cron: str | None = None) -> str:
    """The specification, and the request without it, as text. Asks nothing of Google."""
    shown = {**submission.job, "pipelineSpec": f"(above, {submission.spec_address})"}
    google = submission.google
    address = google.address(f"{google.cloud.region}-aiplatform.googleapis.com")
    what, body = (
        ("pipelineJobs", shown)
        if cron is None
        else ("schedules", _schedule(submission, checked(cron), shown))
    )
    return (
        f"{text_of(submission.spec)}---\n# POST"
        f" {address}/v1/{google.parent}/{what}\n{json.dumps(body, indent=2, sort_keys=True)}\n"
    )


def submit(recipe: Recipe, submission: Submission) -> tuple[str, bool]:
    """Send everything and start the pipeline; its id, and whether it was running already.

    Raises:
        WrongInput, Failed: something is missing, or another pipeline of this run goes on.
    """
    google, note = submission.google, recipe.folder.root / "jobs" / NOTE
    _look(recipe, google)
    last = _noted(note)
    if last is not None and last["mark"] == submission.mark:
        standing = pipelines.get_pipeline_job(google, last["id"])
        if standing is not None and standing.is_alive:
            return last["id"], True
        id = (
            last["id"] if standing is None else _new_id(submission)
        )  # one that never came to be gets its name now
    else:
        id = _new_id(submission)
    if others := [
        other for other in pipelines.running_pipeline_jobs(google, _labels(recipe)) if other != id
    ]:
        raise Failed(
            f"the pipeline {others[0]} of {recipe.name} goes on, and two would write one run: wait"
            f" for it or cancel it, {submission.link(others[0])}"
        )
    _send(recipe, submission)
    write_atomic(note, json.dumps({"schema": 1, "id": id, "mark": submission.mark}) + "\n")
    pipelines.create_pipeline_job(google, id, submission.job)
    return id, False


def schedule(recipe: Recipe, submission: Submission, cron: str) -> pipelines.ScheduleStatus:
    """Start the pipeline again and again at the times of `cron`; in the place of what was scheduled
    for this run before.
    """
    wanted = _schedule(submission, checked(cron), submission.job)
    _look(recipe, submission.google)
    _send(recipe, submission)
    return pipelines.put_schedule(submission.google, wanted)


def follow(submission: Submission, id: str, root: Path | None = None) -> None:
    """Tell each step as it begins and ends, until the pipeline is over. A gate that keeps the live
    model is a good end. What there is to look at then comes to the run folder `root`, if one is
    given.

    Raises:
        Failed: a step failed, with its name and its error, or somebody cancelled the pipeline.
    """
    told: dict[int, str] = {}
    trouble = ""
    while True:
        try:
            standing = pipelines.get_pipeline_job(submission.google, id)
        except Failed as error:
            if str(error) != trouble:
                say(f"warning: {error}")
            trouble = str(error)
            time.sleep(LOOK_S)
            continue
        if standing is None:
            raise Failed(f"the pipeline {id} is gone: somebody deleted it; submit it again")
        for task in standing.tasks:
            if task.name in VERBS and told.get(task.id) != task.state:
                told[task.id] = task.state
                state = task.state.lower().replace("_", " ")
                say(f"{task.name}: {state}{f' ({task.error})' if task.error else ''}")
        if not standing.is_alive:
            if root is not None:
                _bring_back(submission.plan.replica, root)
            return _judge(submission, standing)
        time.sleep(LOOK_S)


def _bring_back(replica: str, root: Path) -> None:
    try:
        pull_results(replica, root, parts=SHOWN)
        say(
            f"its metrics and reports are in {root} (`ingot show run {root}`); model and data stay"
            f" in {replica}"
        )
    except IngotError as error:
        say(f"warning: {error}; what the pipeline made lies in {replica}")


def cancel(recipe: Recipe) -> list[str]:
    """End what runs of this recipe's pipeline; the ids. What its jobs elsewhere do ends with their
    containers.
    """
    google = GoogleClients(recipe.cloud)
    found = pipelines.running_pipeline_jobs(google, _labels(recipe))
    for id in found:
        pipelines.cancel_pipeline_job(google, id)
    return found


def checked(cron: str) -> str:
    """Five fields, with a time zone before them if one is wanted: `TZ=Europe/Berlin 0 3 * * 1`.
    Raises WrongInput when it is none.
    """
    found = re.fullmatch(r"((?:CRON_)?TZ=[\w/+-]+ )?(\S+) (\S+) (\S+) (\S+) (\S+)", cron.strip())
    if found is None or not all(
        _in_range(field, *bounds) for field, bounds in zip(found.groups()[1:], _FIELDS, strict=True)
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


def _look(recipe: Recipe, google: GoogleClients) -> None:
    """What only Google can tell: credentials, the bucket and its region."""
    google.client("pipelines")
    if reason := region_mismatch(recipe.cloud):
        raise WrongInput(reason)


def _send(recipe: Recipe, submission: Submission) -> None:
    """The recipe and the specification by their content, and the run folder where the bucket has
    none of this run: what lies there is newer.
    """
    wanted = submission.plan
    for address, text in (
        (wanted.address, wanted.recipe),
        (submission.spec_address, text_of(submission.spec)),
    ):
        folder, _, name = address.rpartition("/")
        open_bucket(folder).put(name, text.encode())
    if open_bucket(wanted.replica).stat(INDEX) is not None:
        say(f"{wanted.replica} has this run already, and the pipeline goes on from there")
    elif recipe.folder.steps.is_dir():
        push(recipe.folder.root, wanted.replica)


def _judge(submission: Submission, standing: pipelines.PipelineJobStatus) -> None:
    failed = next(
        (task for task in standing.tasks if task.name in VERBS and task.state == "FAILED"), None
    )
    link = submission.link(standing.id)
    if standing.state == "SUCCEEDED":
        ran = {task.name for task in standing.tasks if task.state == "SUCCEEDED"}
        say(
            "the gate passed the model, and the step deploy is done; its log says what it changed"
            if "deploy" in ran
            else "the gate keeps the live model; nothing was registered"
        )
    elif standing.state == "CANCELLED":
        raise Failed(f"the pipeline {standing.id} was cancelled; submit it again to go on: {link}")
    elif failed is not None:
        raise Failed(f"{failed.name} failed: {failed.error or standing.error}; see its log, {link}")
    else:
        raise Failed(
            f"the pipeline {standing.id} is {standing.state.lower()}:"
            f" {standing.error or 'no reason is given'}; see {link}"
        )


def _new_id(submission: Submission) -> str:
    """Lower case letters, digits, hyphens, at most 128."""
    return f"{submission.job['displayName']}-{datetime.now(UTC):%Y%m%d%H%M%S}-{submission.mark}"


def _noted(path: Path) -> dict[str, str] | None:
    try:
        found = json.loads(path.read_bytes())
        return {"id": str(found["id"]), "mark": str(found["mark"])}
    except (OSError, ValueError, KeyError, TypeError):
        return None
