"""Pipeline jobs of Vertex AI, and schedules that start them: make, look, cancel. What a step means
is the pipeline's to know.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ingot.base.errors import WrongInput
from ingot.cloud.clients import Google, ask, in_words, messages
from ingot.cloud.operations import code_of, wait

_TYPES = "google.cloud.aiplatform_v1"
_PREFIX = "PIPELINE_STATE_"
ALIVE = ("QUEUED", "PENDING", "RUNNING", "PAUSED", "CANCELLING")
"""States of a pipeline job that may still do something, without their prefix."""
_DENIED = "ask for the role Vertex AI User"
_EXISTS = 409


@dataclass(frozen=True)
class Task:
    """One step of a pipeline job: `name` as compiled, `id` of this start of it."""

    id: int
    name: str
    state: str
    error: str = ""


@dataclass(frozen=True)
class Standing:
    """How a pipeline job stands; `id` is the last part of its name."""

    id: str
    state: str
    tasks: tuple[Task, ...] = ()
    error: str = ""

    @property
    def is_alive(self) -> bool:
        return self.state in ALIVE


@dataclass(frozen=True)
class Scheduled:
    """A schedule by its whole name; `next` is when it starts a job, seconds since the epoch, 0
    where that is not known.
    """

    name: str
    next: float


def create(google: Google, id: str, job: Mapping[str, Any]) -> None:
    """Make the pipeline job `id`; one that is there already, since the answer got lost, is as good.

    Raises:
        WrongInput: it is refused.
        Failed: the service breaks down, or a quota is used up.
    """
    types = messages(_TYPES)
    request = types.CreatePipelineJobRequest(
        parent=google.parent,
        pipeline_job=types.PipelineJob.from_json(json.dumps(job)),
        pipeline_job_id=id,
    )
    try:
        ask(
            google.client("pipelines").create_pipeline_job,
            f"submit the pipeline {id}",
            denied=_DENIED,
            request=request,
        )
    except WrongInput as error:
        if code_of(error) != _EXISTS:
            raise


def get(google: Google, id: str) -> Standing | None:
    """None where there is no such job."""
    try:
        return _standing(
            ask(
                google.client("pipelines").get_pipeline_job,
                f"look at the pipeline {id}",
                name=f"{google.parent}/pipelineJobs/{id}",
            )
        )
    except WrongInput as error:
        if code_of(error) == 404:
            return None
        raise


def alive(google: Google, labels: Mapping[str, str]) -> list[str]:
    """Ids of the pipeline jobs with these labels that are not over."""
    wanted = " AND ".join(f'labels.{key}="{value}"' for key, value in labels.items())
    states = " OR ".join(f'state="{_PREFIX}{state}"' for state in ALIVE)
    what = "look for pipelines of this run"
    request = {"parent": google.parent, "filter": f"{wanted} AND ({states})"}
    with in_words(what):
        return [
            job.name.rpartition("/")[2]
            for job in ask(
                google.client("pipelines").list_pipeline_jobs, what, denied=_DENIED, request=request
            )
        ]


def cancel(google: Google, id: str) -> None:
    """Ask for the end of a job; its steps are told to stop."""
    ask(
        google.client("pipelines").cancel_pipeline_job,
        f"cancel the pipeline {id}",
        name=f"{google.parent}/pipelineJobs/{id}",
    )


def put_schedule(google: Google, schedule: Mapping[str, Any]) -> Scheduled:
    """Make the schedule, or put it in the place of the one that has its display name; of several,
    all but one are deleted.

    Raises:
        WrongInput, Failed: as `create` does.
    """
    types, client, name = messages(_TYPES), google.client("schedules"), schedule["displayName"]
    found = _schedules(google, name)
    wanted = types.Schedule.from_json(json.dumps(schedule))
    for other in found[1:]:
        begun = ask(client.delete_schedule, f"delete the schedule {other.name}", name=other.name)
        wait(google, "schedules", begun.operation.name, f"delete the schedule {other.name}")
    if not found:
        made = ask(
            client.create_schedule,
            f"make the schedule {name}",
            again=False,
            denied=_DENIED,
            parent=google.parent,
            schedule=wanted,
        )
    else:
        wanted.name = found[0].name
        mask = {"paths": ["cron", "create_pipeline_job_request", "max_concurrent_run_count"]}
        made = ask(
            client.update_schedule,
            f"change the schedule {name}",
            denied=_DENIED,
            schedule=wanted,
            update_mask=mask,
        )
    return Scheduled(made.name, made.next_run_time.timestamp() if made.next_run_time else 0.0)


def _schedules(google: Google, name: str) -> list[Any]:
    """Oldest first."""
    what = f"look for the schedule {name}"
    with in_words(what):
        request = {"parent": google.parent, "filter": f'display_name="{name}"'}
        return sorted(
            ask(google.client("schedules").list_schedules, what, denied=_DENIED, request=request),
            key=lambda found: found.create_time,
        )


def _standing(job: Any) -> Standing:
    tasks = tuple(
        Task(int(task.task_id), task.task_name, task.state.name, task.error.message)
        for task in job.job_detail.task_details
    )
    return Standing(
        job.name.rpartition("/")[2], job.state.name.removeprefix(_PREFIX), tasks, job.error.message
    )
