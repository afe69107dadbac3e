"""Jobs of Dataflow: found by their labels, and cancelled. They are made by Beam itself, in its own environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ingot.cloud.clients import Google, ask, messages

MODULE = "google.cloud.dataflow_v1beta3"
OVER = ("JOB_STATE_DONE", "JOB_STATE_FAILED", "JOB_STATE_CANCELLED", "JOB_STATE_UPDATED", "JOB_STATE_DRAINED")


@dataclass(frozen=True)
class Dataflow:
    """A job: its id, name and state, as the service names it."""

    id: str
    name: str
    state: str


def active(google: Google, labels: Mapping[str, str]) -> list[Dataflow]:
    """Jobs of the recipe's region with all of these labels that are not over."""
    types = messages(MODULE)
    request = types.ListJobsRequest(project_id=google.project, location=google.cloud.region, filter=types.ListJobsRequest.Filter.ACTIVE)
    jobs = ask(google.client("dataflow jobs").list_jobs, "list Dataflow jobs", request=request)
    found = [job for job in jobs if labels.items() <= dict(job.labels).items()]
    return [Dataflow(job.id, job.name, job.current_state.name) for job in found if job.current_state.name not in OVER]


def cancel(google: Google, job: Dataflow) -> None:
    """Ask the service to end a job; it takes its machines down within minutes."""
    types = messages(MODULE)
    wanted = types.Job(requested_state=types.JobState.JOB_STATE_CANCELLED)
    request = types.UpdateJobRequest(project_id=google.project, location=google.cloud.region, job_id=job.id, job=wanted)
    ask(google.client("dataflow jobs").update_job, f"cancel the Dataflow job {job.name}", denied="ask for the role Dataflow Developer", request=request)
