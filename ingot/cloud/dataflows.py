"""Jobs of Dataflow: found by their labels, and cancelled. They are made by Beam itself, in its own
environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ingot.cloud.clients import Google, ask, in_words, messages

MODULE = "google.cloud.dataflow_v1beta3"
OVER = (
    "JOB_STATE_DONE",
    "JOB_STATE_FAILED",
    "JOB_STATE_CANCELLED",
    "JOB_STATE_UPDATED",
    "JOB_STATE_DRAINED",
    "JOB_STATE_CANCELLING",
)
"""States in which there is nothing to cancel; one that is being cancelled takes minutes to go."""


@dataclass(frozen=True)
class Dataflow:
    """A job: its id, name and state, as the service names it."""

    id: str
    name: str
    state: str


def active(google: Google, name: str, labels: Mapping[str, str]) -> list[Dataflow]:
    """Jobs of the recipe's region that are not over, whose names begin with `name`, with all of
    these labels.

    A list has summaries only, which tell no labels: each that comes into question is asked for by
    itself.
    """
    types, client, what = messages(MODULE), google.client("dataflow jobs"), "list Dataflow jobs"
    place = {"project_id": google.project, "location": google.cloud.region}
    with in_words(what):  # each page is asked for when it is come to
        jobs = ask(
            client.list_jobs,
            what,
            request=types.ListJobsRequest(**place, filter=types.ListJobsRequest.Filter.ACTIVE),
        )
        listed = [
            job for job in jobs if job.name.startswith(name) and job.current_state.name not in OVER
        ]
    view = types.JobView.JOB_VIEW_DESCRIPTION
    found = [
        ask(
            client.get_job,
            f"look at the Dataflow job {job.name}",
            request=types.GetJobRequest(**place, job_id=job.id, view=view),
        )
        for job in listed
    ]
    ours = [
        job
        for job in found
        if labels.items() <= dict(job.labels).items() and job.current_state.name not in OVER
    ]
    return [Dataflow(job.id, job.name, job.current_state.name) for job in ours]


def cancel(google: Google, job: Dataflow) -> None:
    """Ask the service to end a job; it takes its machines down within minutes."""
    types = messages(MODULE)
    wanted = types.Job(requested_state=types.JobState.JOB_STATE_CANCELLED)
    request = types.UpdateJobRequest(
        project_id=google.project, location=google.cloud.region, job_id=job.id, job=wanted
    )
    ask(
        google.client("dataflow jobs").update_job,
        f"cancel the Dataflow job {job.name}",
        denied="ask for the role Dataflow Developer",
        request=request,
    )
