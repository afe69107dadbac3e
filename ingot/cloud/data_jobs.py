"""Managed jobs that prepare data: batches of Managed Service for Apache Spark (Dataproc
Serverless), and Dataflow jobs, which Beam creates itself. The launchers decide what is in them.
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
    call_or_none,
    create_once,
    list_all,
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
"""States in which there is nothing to cancel; a job that is being cancelled takes minutes
to end.
"""


@dataclass(frozen=True)
class DataflowJob:
    """A job: its id, name and state, under the service's names, and its labels."""

    id: str
    name: str
    state: str
    labels: Mapping[str, str]


def active_dataflow_jobs(
    google: GoogleClients, name: str, labels: Mapping[str, str]
) -> list[DataflowJob]:
    """The active jobs in the recipe's region whose names begin with `name` and which have all of
    these labels.

    A list contains summaries without labels, so each candidate is requested individually.
    """
    types, client = message_types(MODULE), google.client("dataflow jobs")
    place = {"project_id": google.project, "location": google.cloud.region}
    listed = list_all(
        client.list_jobs,
        "list Dataflow jobs",
        request=types.ListJobsRequest(**place, filter=types.ListJobsRequest.Filter.ACTIVE),
    )
    view = types.JobView.JOB_VIEW_DESCRIPTION
    found = [
        call_api(
            client.get_job,
            f"look at the Dataflow job {job.name}",
            request=types.GetJobRequest(**place, job_id=job.id, view=view),
        )
        for job in listed
        if job.name.startswith(name) and job.current_state.name not in DATAFLOW_FINAL_STATES
    ]
    ours = [
        job
        for job in found
        if labels.items() <= dict(job.labels).items()
        and job.current_state.name not in DATAFLOW_FINAL_STATES
    ]
    return [DataflowJob(job.id, job.name, job.current_state.name, dict(job.labels)) for job in ours]


def cancel_dataflow_job(google: GoogleClients, job: DataflowJob) -> None:
    """Cancel a job; its machines are removed within minutes."""
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
    """The status of a batch: `state` under the service's names, its message, and where its driver's
    output is (a gs:// prefix).
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


def create_batch(google: GoogleClients, batch_id: str, batch: Any, request_id: str) -> None:
    """Create a batch under an id of our own. An existing batch of this id is ours: the answer to an
    earlier request was lost.
    """
    create_once(
        google.client("batches").create_batch,
        f"make the Spark batch {batch_id}",
        denied="ask for the roles Dataproc Editor and Service Account User",
        request={
            "parent": google.parent,
            "batch": batch,
            "batch_id": batch_id,
            "request_id": request_id,
        },
    )


def get_batch(google: GoogleClients, batch_id: str) -> SparkBatch | None:
    """The batch; None if there is none."""
    found = call_or_none(
        google.client("batches").get_batch,
        f"look at the Spark batch {batch_id}",
        request={"name": f"{google.parent}/batches/{batch_id}"},
    )
    return None if found is None else _batch(found)


def labelled_batches(google: GoogleClients, labels: dict[str, str]) -> list[SparkBatch]:
    """Batches with all of these labels, newest first."""
    wanted = " AND ".join(f"labels.{name}={value}" for name, value in sorted(labels.items()))
    found = list_all(
        google.client("batches").list_batches,
        "list Spark batches",
        request={"parent": google.parent, "filter": wanted, "order_by": "create_time desc"},
    )
    return list(map(_batch, found))


def cancel_batch(google: GoogleClients, batch_id: str) -> None:
    """Cancel a batch if it is running, and wait until it has ended. Raises Failed if it
    has not ended GONE_S after it was asked to.
    """
    until = time.monotonic() + GONE_S
    requested = False
    while (standing := get_batch(google, batch_id)) is not None and standing.is_alive:
        if not requested and (requested := _cancel_operation(google, standing)):
            until = time.monotonic() + GONE_S  # what was seen is older than the request
        elif time.monotonic() > until:
            raise Failed(
                f"the Spark batch {batch_id} was cancelled {GONE_S:g} s ago and still is"
                f" {standing.state}; see it in the console"
            )
        time.sleep(LOOK_S)


def _cancel_operation(google: GoogleClients, standing: SparkBatch) -> bool:
    """Cancel a batch by its operation, the only way to cancel it. False if it has no
    operation yet.
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
