"""Vertex AI's long-running operations, custom jobs, pipeline jobs and schedules. Launchers and
pipelines decide what the jobs contain.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ingot.base.errors import Failed
from ingot.cloud.clients import (
    AIPLATFORM,
    DENIED,
    GoogleClients,
    call_api,
    call_or_none,
    create_once,
    google_errors,
    google_packages,
    list_all,
    message_types,
)
from ingot.config.sections.deployment import Cloud

POLL_S = 5.0
"""Seconds between two polls."""
LIMIT_S = 7200.0
"""Timeout for an operation: the longest that Vertex AI allows a deployment."""


def account_and_network(cloud: Cloud) -> dict[str, Any]:
    """The fields of a custom job and of a pipeline job that say as whom and where in the network it
    runs.
    """
    account, network = cloud.service_account, cloud.network
    fields: dict[str, Any] = {"serviceAccount": account} if account else {}
    if network and "/networkAttachments/" in network:
        fields["pscInterfaceConfig"] = {"networkAttachment": network}
    elif network:
        fields["network"] = network
    return fields


def _having(labels: Mapping[str, str]) -> str:
    """The filter for what has all of these labels."""
    return " AND ".join(f'labels.{key}="{value}"' for key, value in labels.items())


def wait_for_operation(
    google: GoogleClients,
    service: str,
    name: str,
    what: str,
    response: str | None = None,
) -> Any:
    """Poll the operation `name` until it is done; returns its response as a message of the type
    `response`.

    Raises:
        WrongInput, Failed: it ended with an error, or not within LIMIT_S.
    """
    client, deadline = google.client(service), time.monotonic() + LIMIT_S
    while not (operation := call_api(client.get_operation, what, request={"name": name})).done:
        if time.monotonic() > deadline:
            raise Failed(
                f"could not {what}: {name} was not done after {LIMIT_S:g} s; look at it in the"
                " console, then run the same command again"
            )
        time.sleep(POLL_S)
    if operation.error.code:
        with google_errors(what):
            raise google_packages()["exceptions"].from_grpc_status(
                operation.error.code, operation.error.message
            )
    if response is None:
        return None
    kind = getattr(message_types(AIPLATFORM), response)
    raw = kind.pb(kind())
    operation.response.Unpack(raw)
    return kind.wrap(raw)


def running_operations(google: GoogleClients, service: str, thing: str) -> list[str]:
    """Names of the unfinished operations on `thing` (a model, an endpoint); none if it does
    not exist.
    """
    client, found, page = google.client(service), [], ""
    while True:
        answer = call_or_none(
            client.list_operations,
            f"see what is done to {thing}",
            request={"name": thing, "page_token": page},
        )
        if answer is None:
            return []
        found += [operation.name for operation in answer.operations if not operation.done]
        if not (page := answer.next_page_token):
            return found


CUSTOM_JOB_ALIVE = ("QUEUED", "PENDING", "RUNNING", "PAUSED", "UPDATING", "CANCELLING")
"""States of a job that may still run or change, without their prefix."""
_JOB_PREFIX = "JOB_STATE_"


@dataclass(frozen=True)
class CustomJobStatus:
    """The status of a job: `name` is the resource name, `state` is without its prefix, `started` is
    when it first ran, `code` (of google.rpc) and `error` say why it ended.
    """

    name: str
    state: str
    labels: Mapping[str, str]
    created: float
    started: float | None = None
    code: int = 0
    error: str = ""

    @property
    def is_alive(self) -> bool:
        return self.state in CUSTOM_JOB_ALIVE


def custom_job_request(google: GoogleClients, job: Mapping[str, Any]) -> Any:
    """The request that creates `job`, which is in the format of the REST interface. Raises
    ValueError for an unknown field.
    """
    types = message_types(AIPLATFORM)
    return types.CreateCustomJobRequest(
        parent=google.parent, custom_job=types.CustomJob.from_json(json.dumps(job))
    )


def create_custom_job(google: GoogleClients, job: Mapping[str, Any]) -> CustomJobStatus:
    """Create a job. Not retried: the service assigns the name, so a second request could create a
    second job.

    Raises:
        WrongInput: it is refused: no permission, no such machine or region.
        Failed: a quota is used up, or the service failed, in which case the job may exist all the
            same.
    """
    what = f"make the job {job['displayName']}"
    return _custom_job_status(
        call_api(
            google.client("jobs").create_custom_job,
            what,
            again=False,
            denied=DENIED,
            request=custom_job_request(google, job),
        )
    )


def get_custom_job(google: GoogleClients, name: str) -> CustomJobStatus | None:
    """The job's status; None if there is no such job: somebody deleted it."""
    found = call_or_none(google.client("jobs").get_custom_job, f"look at the job {name}", name=name)
    return None if found is None else _custom_job_status(found)


def cancel_custom_job(google: GoogleClients, name: str) -> None:
    """Request cancellation of a job, which takes a while. One that has ended is left as it is."""
    call_api(google.client("jobs").cancel_custom_job, f"cancel the job {name}", name=name)


def labelled_custom_jobs(google: GoogleClients, labels: Mapping[str, str]) -> list[CustomJobStatus]:
    """All jobs of project and region with these labels, newest first."""
    wanted = _having(labels)
    found = list_all(
        google.client("jobs").list_custom_jobs,
        f"look for jobs with {wanted}",
        request={"parent": google.parent, "filter": wanted},
    )
    return sorted(map(_custom_job_status, found), key=lambda job: job.created, reverse=True)


def _custom_job_status(job: Any) -> CustomJobStatus:
    return CustomJobStatus(
        job.name,
        job.state.name.removeprefix(_JOB_PREFIX),
        dict(job.labels),
        job.create_time.timestamp() if job.create_time else 0.0,
        job.start_time.timestamp() if job.start_time else None,
        job.error.code,
        job.error.message,
    )


_PIPELINE_PREFIX = "PIPELINE_STATE_"
PIPELINE_JOB_ALIVE = ("QUEUED", "PENDING", "RUNNING", "PAUSED", "CANCELLING")
"""States of a pipeline job that may still run or change, without their prefix."""


@dataclass(frozen=True)
class PipelineTask:
    """One task of a pipeline job: `name` as compiled, `id` of this execution."""

    id: int
    name: str
    state: str
    error: str = ""


@dataclass(frozen=True)
class PipelineJobStatus:
    """The status of a pipeline job; `id` is the last part of its name."""

    id: str
    state: str
    tasks: tuple[PipelineTask, ...] = ()
    error: str = ""

    @property
    def is_alive(self) -> bool:
        return self.state in PIPELINE_JOB_ALIVE


@dataclass(frozen=True)
class ScheduleStatus:
    """A schedule by its full name; `next` is its next start in seconds since the epoch, 0
    if unknown.
    """

    name: str
    next: float


def create_pipeline_job(google: GoogleClients, id: str, job: Mapping[str, Any]) -> None:
    """Create the pipeline job `id`. An existing one is ours: an earlier answer was lost.

    Raises:
        WrongInput: it is refused.
        Failed: the service failed, or a quota is used up.
    """
    types = message_types(AIPLATFORM)
    request = types.CreatePipelineJobRequest(
        parent=google.parent,
        pipeline_job=types.PipelineJob.from_json(json.dumps(job)),
        pipeline_job_id=id,
    )
    create_once(
        google.client("pipelines").create_pipeline_job,
        f"submit the pipeline {id}",
        denied=DENIED,
        request=request,
    )


def get_pipeline_job(google: GoogleClients, id: str) -> PipelineJobStatus | None:
    """The pipeline job's status; None if there is no such job."""
    found = call_or_none(
        google.client("pipelines").get_pipeline_job,
        f"look at the pipeline {id}",
        name=f"{google.parent}/pipelineJobs/{id}",
    )
    return None if found is None else _pipeline_job_status(found)


def running_pipeline_jobs(
    google: GoogleClients, labels: Mapping[str, str], parameters: Mapping[str, str]
) -> list[str]:
    """Ids of the unfinished pipeline jobs with these labels, and these among their parameters."""
    states = " OR ".join(f'state="{_PIPELINE_PREFIX}{state}"' for state in PIPELINE_JOB_ALIVE)
    found = list_all(
        google.client("pipelines").list_pipeline_jobs,
        "look for pipelines of this run",
        denied=DENIED,
        request={"parent": google.parent, "filter": f"{_having(labels)} AND ({states})"},
    )
    return [job.name.rpartition("/")[2] for job in found if _has_parameters(job, parameters)]


def cancel_pipeline_job(google: GoogleClients, id: str) -> None:
    """Request cancellation of a job; its tasks are told to stop."""
    call_api(
        google.client("pipelines").cancel_pipeline_job,
        f"cancel the pipeline {id}",
        name=f"{google.parent}/pipelineJobs/{id}",
    )


def put_schedule(
    google: GoogleClients, schedule: Mapping[str, Any], parameters: Mapping[str, str]
) -> ScheduleStatus:
    """Create the schedule, or update the one with its display name whose pipelines have these among
    their parameters; if there are several, all but one are deleted.

    Raises:
        WrongInput, Failed: as `create_pipeline_job`.
    """
    types = message_types(AIPLATFORM)
    client = google.client("schedules")
    name = schedule["displayName"]
    found = _schedules(google, name, parameters)
    wanted = types.Schedule.from_json(json.dumps(schedule))
    for other in found[1:]:
        begun = call_api(
            client.delete_schedule, f"delete the schedule {other.name}", name=other.name
        )
        wait_for_operation(
            google, "schedules", begun.operation.name, f"delete the schedule {other.name}"
        )
    if not found:
        made = call_api(
            client.create_schedule,
            f"make the schedule {name}",
            again=False,
            denied=DENIED,
            parent=google.parent,
            schedule=wanted,
        )
    else:
        wanted.name = found[0].name
        mask = {"paths": ["cron", "create_pipeline_job_request", "max_concurrent_run_count"]}
        made = call_api(
            client.update_schedule,
            f"change the schedule {name}",
            denied=DENIED,
            schedule=wanted,
            update_mask=mask,
        )
    return ScheduleStatus(made.name, made.next_run_time.timestamp() if made.next_run_time else 0.0)


def _schedules(google: GoogleClients, name: str, parameters: Mapping[str, str]) -> list[Any]:
    """The schedules with this display name and these parameters, oldest first."""
    listed = list_all(
        google.client("schedules").list_schedules,
        f"look for the schedule {name}",
        denied=DENIED,
        request={"parent": google.parent, "filter": f'display_name="{name}"'},
    )
    found = [
        one
        for one in listed
        if _has_parameters(one.create_pipeline_job_request.pipeline_job, parameters)
    ]
    return sorted(found, key=lambda one: one.create_time)


def _has_parameters(job: Any, parameters: Mapping[str, str]) -> bool:
    return parameters.items() <= dict(job.runtime_config.parameter_values).items()


def _pipeline_job_status(job: Any) -> PipelineJobStatus:
    tasks = tuple(
        PipelineTask(int(task.task_id), task.task_name, task.state.name, task.error.message)
        for task in job.job_detail.task_details
    )
    return PipelineJobStatus(
        job.name.rpartition("/")[2],
        job.state.name.removeprefix(_PIPELINE_PREFIX),
        tasks,
        job.error.message,
    )
