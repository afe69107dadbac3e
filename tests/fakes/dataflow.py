"""Jobs of Dataflow with their state: `install(server)` answers on a `tests.fakes.google.Server`. A
list has summaries only, page by page.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.fakes.google import Refused, Server
from tests.lazy import lazy

types = lazy("google.cloud.dataflow_v1beta3")

STATES = lazy("google.cloud.dataflow_v1beta3", "JobState")
OVER = [
    lazy("google.cloud.dataflow_v1beta3", "JobState", name)
    for name in ("JOB_STATE_DONE", "JOB_STATE_FAILED", "JOB_STATE_CANCELLED")
]


@dataclass
class State:
    """`jobs` by id, `cancelled` the ids of those that were asked to end."""

    server: Server
    project: str = "proj"
    region: str = "us-central1"
    page: int = 2
    """Jobs of one answer."""
    jobs: dict[str, types.Job] = field(default_factory=dict)
    cancelled: list[str] = field(default_factory=list)

    def make(
        self,
        id: str,
        name: str,
        labels: Mapping[str, str],
        state: STATES | None = None,
    ) -> None:
        state = STATES.JOB_STATE_RUNNING if state is None else state
        self.jobs[id] = types.Job(id=id, name=name, labels=dict(labels), current_state=state)

    def list(self, request: types.ListJobsRequest) -> types.ListJobsResponse:
        self._check(request.project_id, request.location)
        active = [
            job
            for job in self.jobs.values()
            if request.filter != types.ListJobsRequest.Filter.ACTIVE
            or job.current_state not in OVER
        ]
        start = int(request.page_token or 0)
        summaries = [
            types.Job(id=job.id, name=job.name, current_state=job.current_state)
            for job in active[start : start + self.page]
        ]
        return types.ListJobsResponse(
            jobs=summaries,
            next_page_token=str(start + self.page) if len(active) > start + self.page else "",
        )

    def get(self, request: types.GetJobRequest) -> types.Job:
        self._check(request.project_id, request.location)
        job = self._of(request.job_id)
        tells_all = request.view in (types.JobView.JOB_VIEW_DESCRIPTION, types.JobView.JOB_VIEW_ALL)
        return (
            job
            if tells_all
            else types.Job(id=job.id, name=job.name, current_state=job.current_state)
        )

    def update(self, request: types.UpdateJobRequest) -> types.Job:
        self._check(request.project_id, request.location)
        job = self._of(request.job_id)
        if request.job.requested_state != STATES.JOB_STATE_CANCELLED or job.current_state in OVER:
            raise Refused(
                400,
                f"The job {job.id} is in {job.current_state.name} and cannot become"
                f" {request.job.requested_state.name}.",
            )
        job.current_state = STATES.JOB_STATE_CANCELLING
        self.cancelled.append(job.id)
        return job

    def _of(self, id: str) -> types.Job:
        if id not in self.jobs:
            raise Refused(
                404, f"({id}): Information about job {id} could not be found in our system."
            )
        return self.jobs[id]

    def _check(self, project: str, region: str) -> None:
        if (project, region) != (self.project, self.region):
            raise Refused(404, f"no such place: {project}, {region}")


def install(server: Server) -> State:
    state = State(server)
    server.on("JobsV1Beta3.ListJobs", state.list)
    server.on("JobsV1Beta3.GetJob", state.get)
    server.on("JobsV1Beta3.UpdateJob", state.update)
    return state
