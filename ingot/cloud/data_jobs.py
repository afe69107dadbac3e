"""Jobs that prepare data as a service: batches of Managed Service for Apache Spark (Dataproc
Serverless), and jobs of Dataflow, which Beam creates itself. What is in one is for the launchers to
say.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ingot.base.errors import Failed, WrongInput
from ingot.cloud.clients import (
    GoogleClients,
    call_api,
    google_errors,
    google_packages,
    message_types,
)

MODULE = "google.cloud.dataflow_v1beta3"
DATAFLOW_FINAL_STATES = (
    "JOB_STATE_DONE",
    "JOB_STATE_FAILED",
    "JOB_STATE_CANCELLED",
    "JOB_STATE_UPDATED",
    "JOB_STATE_DRAINED",
    "JOB_STATE_CANCELLING",
)
"""States in which there is nothing to cancel; one that is being cancelled takes minutes to go."""


@dataclass(frozen=True)
class DataflowJob:
    """A job: its id, name and state, as the service names it."""

    id: str
    name: str
    state: str


def active_dataflow_jobs(
    google: GoogleClients, name: str, labels: Mapping[str, str]
) -> list[DataflowJob]:
    """Jobs of the recipe's region that are not over, whose names begin with `name`, with all of
    these labels.

    A list has summaries only, which tell no labels: each that comes into question is asked for by
    itself.
    """
    types, client, what = (
        message_types(MODULE),
        google.client("dataflow jobs"),
        "list Dataflow jobs",
    )
    place = {"project_id": google.project, "location": google.cloud.region}
    with google_errors(what):  # each page is asked for when it is come to
        jobs = call_api(
            client.list_jobs,
            what,
            request=types.ListJobsRequest(**place, filter=types.ListJobsRequest.Filter.ACTIVE),
        )
        listed = [
            job
            for job in jobs
            if job.name.startswith(name) and job.current_state.name not in DATAFLOW_FINAL_STATES
        ]
    view = types.JobView.JOB_VIEW_DESCRIPTION
    found = [
        call_api(
            client.get_job,
            f"look at the Dataflow job {job.name}",
            request=types.GetJobRequest(**place, job_id=job.id, view=view),
        )
        for job in listed
    ]
    ours = [
        job
        for job in found
        if labels.items() <= dict(job.labels).items()
        and job.current_state.name not in DATAFLOW_FINAL_STATES
    ]
    return [DataflowJob(job.id, job.name, job.current_state.name) for job in ours]


def cancel_dataflow_job(google: GoogleClients, job: DataflowJob) -> None:
    """Ask the service to end a job; it takes its machines down within minutes."""
    types = message_types(MODULE)
    wanted = types.Job(requested_state=types.JobState.JOB_STATE_CANCELLED)
    request = types.UpdateJobRequest(
        project_id=google.project, location=google.cloud.region, job_id=job.id, job=wanted
    )
    call_api(
        google.client("dataflow jobs").update_job,
        f"cancel the Dataflow job {job.name}",
        denied="ask for the role Dataflow Developer",
        request=request,
    )


LOOK_S = 2.0
GONE_S = 600.0
"""How long a cancelled batch may take to end."""
BATCH_FINAL_STATES = ("SUCCEEDED", "FAILED", "CANCELLED")


@dataclass(frozen=True)
class SparkBatch:
    """How a batch stands: `state` as the service names it, what it says to that, and where its
    driver's output lies (gs://, a prefix).
    """

    name: str
    state: str
    message: str
    output: str
    operation: str
    labels: dict[str, str]

    @property
    def is_alive(self) -> bool:
        return self.state not in BATCH_FINAL_STATES


def batch_parent(google: GoogleClients) -> str:
    return f"projects/{google.project}/locations/{google.cloud.region}"


def create_batch(google: GoogleClients, batch_id: str, batch: Any, request_id: str) -> None:
    """Ask for a batch under an id of our own. One of this id that is there already is ours, whose
    answer was lost.
    """
    try:
        call_api(
            google.client("batches").create_batch,
            f"make the Spark batch {batch_id}",
            denied="ask for the roles Dataproc Editor and Service Account User",
            request={
                "parent": batch_parent(google),
                "batch": batch,
                "batch_id": batch_id,
                "request_id": request_id,
            },
        )
    except WrongInput as error:
        if not isinstance(error.__cause__, google_packages()["exceptions"].Conflict):
            raise


def get_batch(google: GoogleClients, batch_id: str) -> SparkBatch | None:
    """None where there is none."""
    try:
        found = call_api(
            google.client("batches").get_batch,
            f"look at the Spark batch {batch_id}",
            request={"name": f"{batch_parent(google)}/batches/{batch_id}"},
        )
    except WrongInput as error:
        if isinstance(error.__cause__, google_packages()["exceptions"].NotFound):
            return None
        raise
    return _batch(found)


def labelled_batches(google: GoogleClients, labels: dict[str, str]) -> list[SparkBatch]:
    """Batches with all of these labels, the newest first."""
    wanted = " AND ".join(f"labels.{name}={value}" for name, value in sorted(labels.items()))
    request, what = (
        {
            "parent": batch_parent(google),
            "filter": wanted,
            "order_by": "create_time desc",
        },
        "list Spark batches",
    )
    with google_errors(what):  # each page is asked for when it is come to
        return [
            _batch(found)
            for found in call_api(google.client("batches").list_batches, what, request=request)
        ]


def cancel_batch(google: GoogleClients, batch_id: str) -> None:
    """End a batch and wait until it is over; nothing where it is. Raises Failed when it does not
    end.
    """
    until = time.monotonic() + GONE_S
    asked = False
    while (standing := get_batch(google, batch_id)) is not None and standing.is_alive:
        if not asked:
            asked = _ask_to_end(google, standing)
        if time.monotonic() > until:
            raise Failed(
                f"the Spark batch {batch_id} was cancelled {GONE_S:g} s ago and still is"
                f" {standing.state}; see it in the console"
            )
        time.sleep(LOOK_S)


def _ask_to_end(google: GoogleClients, standing: SparkBatch) -> bool:
    """By its operation, which alone can be cancelled. False where it has none yet, or has just
    ended.
    """
    if not standing.operation:
        return False
    try:
        call_api(
            google.client("batches").cancel_operation,
            f"cancel {standing.name}",
            request={"name": standing.operation},
        )
    except WrongInput:
        now = get_batch(google, standing.name.rpartition("/")[2])
        if now is not None and now.is_alive:
            raise
    return True


def _batch(batch: Any) -> SparkBatch:
    return SparkBatch(
        batch.name,
        batch.state.name,
        batch.state_message,
        batch.runtime_info.output_uri,
        batch.operation,
        dict(batch.labels),
    )
