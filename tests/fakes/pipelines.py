"""Vertex AI's pipeline jobs and schedules, with their state: `install(server)` answers on a
`tests.fakes.google.Server`.

A specification must be one by kfp's own loader. A job does one step more each time it is looked at,
in the order of its graph; what stands under a condition is done only where `decision` says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import yaml

from tests.fakes.google import Refused, Server
from tests.lazy import lazy

types = lazy("google.cloud.aiplatform_v1")
json_format = lazy("google.protobuf.json_format")
components = lazy("kfp.components")

LABEL = re.compile(r"[a-z0-9_-]{0,63}")
ID = re.compile(r"[a-z0-9][a-z0-9-]{0,127}")
TASK = lazy("google.cloud.aiplatform_v1", "PipelineTaskDetail", "State")
JOB = lazy("google.cloud.aiplatform_v1", "PipelineState")
OVER = [
    lazy("google.cloud.aiplatform_v1", "PipelineState", name)
    for name in ("PIPELINE_STATE_SUCCEEDED", "PIPELINE_STATE_FAILED", "PIPELINE_STATE_CANCELLED")
]


@dataclass
class State:
    """`jobs` by id, `schedules` by name. `fails`: errors by step."""

    server: Server
    project: str = "proj"
    region: str = "us-central1"
    decision: str = "deploy"
    fails: dict[str, str] = field(default_factory=dict)
    before_look: Callable[[], None] = lambda: None
    jobs: dict[str, types.PipelineJob] = field(default_factory=dict)
    schedules: dict[str, types.Schedule] = field(default_factory=dict)

    @property
    def parent(self) -> str:
        return f"projects/{self.project}/locations/{self.region}"

    def create(self, request: types.CreatePipelineJobRequest) -> types.PipelineJob:
        self._check_parent(request.parent)
        id = request.pipeline_job_id or f"pipeline-{self.server.number()}"
        if not ID.fullmatch(id):
            raise Refused(400, f"Invalid pipeline_job_id {id}.")
        if id in self.jobs:
            raise Refused(409, f"The PipelineJob {id} already exists.")
        _check(request.pipeline_job)
        kept = types.PipelineJob(request.pipeline_job)
        kept.name, kept.state, kept.create_time = (
            f"{self.parent}/pipelineJobs/{id}",
            JOB.PIPELINE_STATE_PENDING,
            datetime.now(UTC),
        )
        self.jobs[id] = kept
        return kept

    def get(self, request: types.GetPipelineJobRequest) -> types.PipelineJob:
        self.before_look()
        job = self._job(request.name)
        if job.state not in OVER:
            self._go_on(job)
        return job

    def list(self, request: types.ListPipelineJobsRequest) -> types.ListPipelineJobsResponse:
        self._check_parent(request.parent)
        labels = dict(re.findall(r'labels\.([\w-]+)="([^"]*)"', request.filter))
        states = re.findall(r'state="PIPELINE_STATE_(\w+)"', request.filter)
        rest = re.sub(r'labels\.[\w-]+="[^"]*"|state="\w+"|AND|OR|[() ]', "", request.filter)
        if rest:
            raise Refused(400, f"Invalid filter: {rest}")
        found = [
            job
            for job in self.jobs.values()
            if all(job.labels.get(key) == value for key, value in labels.items())
            and (not states or job.state.name.removeprefix("PIPELINE_STATE_") in states)
        ]
        return types.ListPipelineJobsResponse(pipeline_jobs=found)

    def cancel(self, request: types.CancelPipelineJobRequest) -> None:
        job = self._job(request.name)
        if job.state in OVER:
            raise Refused(400, f"{request.name} is over.")
        job.state = JOB.PIPELINE_STATE_CANCELLED

    def create_schedule(self, request: types.CreateScheduleRequest) -> types.Schedule:
        self._check_parent(request.parent)
        return self._keep(f"{self.parent}/schedules/{self.server.number()}", request.schedule)

    def update_schedule(self, request: types.UpdateScheduleRequest) -> types.Schedule:
        if request.schedule.name not in self.schedules:
            raise Refused(404, f"{request.schedule.name} is not found")
        old, new = self.schedules[request.schedule.name], request.schedule
        if not request.update_mask.paths:
            raise Refused(400, "update_mask is missing")
        changed = types.Schedule(old)
        for path in request.update_mask.paths:
            setattr(changed, path, getattr(new, path))
        return self._keep(old.name, changed)

    def list_schedules(self, request: types.ListSchedulesRequest) -> types.ListSchedulesResponse:
        self._check_parent(request.parent)
        wanted = re.fullmatch(r'display_name="([^"]+)"', request.filter)
        if wanted is None:
            raise Refused(400, f"Invalid filter: {request.filter}")
        return types.ListSchedulesResponse(
            schedules=[one for one in self.schedules.values() if one.display_name == wanted[1]]
        )

    def delete_schedule(self, request: types.DeleteScheduleRequest) -> Any:
        if self.schedules.pop(request.name, None) is None:
            raise Refused(404, f"{request.name} is not found")
        return self.server.operation(self.parent, lambda: json_format.ParseDict({}, _empty()))

    def start_scheduled(self, name: str) -> types.PipelineJob:
        """What the service does when the time has come."""
        schedule = self.schedules[name]
        return self.create(schedule.create_pipeline_job_request)

    def _keep(self, name: str, schedule: types.Schedule) -> types.Schedule:
        fields = schedule.cron.split(" ")
        if len(fields) - schedule.cron.startswith(("TZ=", "CRON_TZ=")) != 5:
            raise Refused(400, f"Invalid cron {schedule.cron}")
        if not schedule.display_name or not schedule.max_concurrent_run_count:
            raise Refused(400, "display_name and max_concurrent_run_count are required.")
        inner = schedule.create_pipeline_job_request
        self._check_parent(inner.parent)
        if inner.pipeline_job_id:
            raise Refused(400, "pipeline_job_id must not be set in a schedule.")
        _check(inner.pipeline_job)
        kept = types.Schedule(schedule)
        kept.name, kept.create_time, kept.next_run_time = name, datetime.now(UTC), datetime.now(UTC)
        self.schedules[name] = kept
        return kept

    def _check_parent(self, parent: str) -> None:
        if parent != self.parent:
            raise Refused(
                404,
                f"Location or project of {parent} is not found; this endpoint serves"
                f" {self.region}.",
            )

    def _job(self, name: str) -> types.PipelineJob:
        id = name.rpartition("/")[2]
        if name.rpartition("/pipelineJobs/")[0] != self.parent or id not in self.jobs:
            raise Refused(404, f"The PipelineJob {name} does not exist.")
        return self.jobs[id]

    def _go_on(self, job: types.PipelineJob) -> None:
        details = job.job_detail.task_details
        order = _order(json_format.MessageToDict(types.PipelineJob.pb(job).pipeline_spec))
        if job.state == JOB.PIPELINE_STATE_PENDING:
            job.state = JOB.PIPELINE_STATE_RUNNING
        elif details and details[-1].state == TASK.RUNNING:
            last = details[-1]
            if last.task_name in self.fails:
                last.state, last.error = (
                    TASK.FAILED,
                    {
                        "code": 9,
                        "message": self.fails[last.task_name],
                    },
                )
                job.state, job.error = (
                    JOB.PIPELINE_STATE_FAILED,
                    {
                        "code": 9,
                        "message": f"The DAG failed because {last.task_name} failed.",
                    },
                )
                return
            last.state = TASK.SUCCEEDED
        if len(details) == len(order):
            job.state = JOB.PIPELINE_STATE_SUCCEEDED
            return
        name, is_condition, within = order[len(details)]
        skipped = (within or is_condition) and self.decision != "deploy"
        state = TASK.NOT_TRIGGERED if skipped else TASK.SUCCEEDED if is_condition else TASK.RUNNING
        job.job_detail.task_details.append(
            types.PipelineTaskDetail(task_id=100 + len(details), task_name=name, state=state)
        )


def install(server: Server) -> State:
    state = State(server)
    server.on("PipelineService.CreatePipelineJob", state.create)
    server.on("PipelineService.GetPipelineJob", state.get)
    server.on("PipelineService.ListPipelineJobs", state.list)
    server.on("PipelineService.CancelPipelineJob", state.cancel)
    server.on("ScheduleService.CreateSchedule", state.create_schedule)
    server.on("ScheduleService.UpdateSchedule", state.update_schedule)
    server.on("ScheduleService.ListSchedules", state.list_schedules)
    server.on("ScheduleService.DeleteSchedule", state.delete_schedule)
    return state


def _empty() -> Any:
    from google.protobuf import empty_pb2

    return empty_pb2.Empty()


def _check(job: types.PipelineJob) -> None:
    if not 0 < len(job.display_name) <= 128:
        raise Refused(400, "The display name must have 1 to 128 characters.")
    if len(job.labels) > 64 or not all(
        LABEL.fullmatch(key) and LABEL.fullmatch(value) for key, value in job.labels.items()
    ):
        raise Refused(400, f"Invalid label in {dict(job.labels)}")
    if not job.runtime_config.gcs_output_directory.startswith("gs://"):
        raise Refused(400, "runtime_config.gcs_output_directory is required.")
    if job.network and not re.fullmatch(r"projects/\d+/global/networks/[a-z0-9-]+", job.network):
        raise Refused(
            400,
            f"{job.network} must be of the form"
            " projects/{project_number}/global/networks/{network}.",
        )
    spec = json_format.MessageToDict(types.PipelineJob.pb(job).pipeline_spec)
    if spec.get("schemaVersion") != "2.1.0":
        raise Refused(400, "pipeline_spec.schemaVersion is missing or not supported.")
    try:
        loaded = components.load_component_from_text(yaml.safe_dump(spec)).pipeline_spec
    except Exception as error:
        raise Refused(400, f"pipeline_spec is not valid: {error}") from error
    known = loaded.root.input_definitions.parameters
    if unknown := [name for name in job.runtime_config.parameter_values if name not in known]:
        raise Refused(400, f"The pipeline has no parameter {unknown[0]}.")
    for executor in spec["deploymentSpec"]["executors"].values():
        if not re.match(r"[a-z0-9.-]+/\S+", executor["container"]["image"]):
            raise Refused(400, f"image {executor['container']['image']} is not valid.")


def _order(
    spec: dict[str, Any], dag: str = "", within: bool = False
) -> list[tuple[str, bool, bool]]:
    """Steps as they are done: name, whether it is a condition, whether it stands under one."""
    tasks: dict[str, Any] = (spec["components"][dag] if dag else spec["root"])["dag"]["tasks"]
    found: list[tuple[str, bool, bool]] = []
    done: set[str] = set()
    while left := [name for name in sorted(tasks) if name not in done]:
        ready = next(name for name in left if set(tasks[name].get("dependentTasks", [])) <= done)
        done.add(ready)
        inner = tasks[ready]["componentRef"]["name"]
        is_condition = "condition" in tasks[ready].get("triggerPolicy", {})
        found.append((ready, is_condition, within))
        if "dag" in spec["components"][inner]:
            found += _order(spec, inner, within or is_condition)
    return found
