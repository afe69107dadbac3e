"""Custom jobs of Vertex AI, and what Cloud Logging has of them: `install(server)` answers on a
`tests.fakes.google.Server`.

Jobs take time by polls, may be refused and may fail; machines, accelerators, regions, labels and
names are checked as Google documents them.
With `workers` a folder, containers really run: each a process of this interpreter in a folder of
its own, told its place by $CLUSTER_SPEC.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ingot.launch.node.ranks import free_port
from tests.fakes.google import Refused, Server
from tests.lazy import lazy

types = lazy("google.cloud.aiplatform_v1")
code_pb2 = lazy("google.rpc.code_pb2")

BRINGING = {
    "a2-highgpu-1g": ("NVIDIA_TESLA_A100", 1),
    "a2-highgpu-8g": ("NVIDIA_TESLA_A100", 8),
    "g2-standard-8": ("NVIDIA_L4", 1),
    "a3-highgpu-8g": ("NVIDIA_H100_80GB", 8),
}
PLAIN = re.compile(r"(n1|n2|e2|c2|c3)-(standard|highmem|highcpu)-\d+")
TPU = re.compile(r"ct(5lp|5p|6e)-(hightpu|standard)-\d+t")
LABEL = re.compile(r"[a-z0-9_-]{0,63}")
STATE = lazy("google.cloud.aiplatform_v1", "JobState")
OVER = [
    lazy("google.cloud.aiplatform_v1", "JobState", name)
    for name in (
        "JOB_STATE_SUCCEEDED",
        "JOB_STATE_FAILED",
        "JOB_STATE_CANCELLED",
        "JOB_STATE_EXPIRED",
    )
]


@dataclass
class State:
    """`jobs` by resource name. A job goes one state further each time it is looked at: queued,
    pending, then running for `runs` looks.
    """

    server: Server
    project: str = "proj"
    region: str = "us-central1"
    workers: Path | None = None
    runs: int = 1
    quota: int = 10**6
    """Machines that may run at once."""
    endings: list[tuple[Any, int, str]] = field(default_factory=list)
    """How the next jobs end instead of well: state, code of google.rpc, message."""
    page: int = 2
    """Jobs, or entries of the log, of one answer."""
    jobs: dict[str, types.CustomJob] = field(default_factory=dict)
    entries: list[dict[str, Any]] = field(default_factory=list)
    processes: dict[str, list[subprocess.Popen[bytes]]] = field(default_factory=dict)
    _looks: dict[str, int] = field(default_factory=dict)
    _ends: dict[str, tuple[Any, int, str]] = field(default_factory=dict)

    @property
    def parent(self) -> str:
        return f"projects/{self.project}/locations/{self.region}"

    @property
    def alive(self) -> list[types.CustomJob]:
        return [job for job in self.jobs.values() if job.state not in OVER]

    def say(
        self, number: str, text: str, *, at: str = "", task: str = "workerpool0-0", **payload: Any
    ) -> None:
        """An entry in the log of a job."""
        self.entries.append(
            {
                "insertId": f"e{len(self.entries)}",
                "timestamp": at or datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
                "resource": {"type": "ml_job", "labels": {"job_id": number, "task_name": task}},
                **(payload or {"jsonPayload": {"message": text}}),
            }
        )

    def take(self, name: str, message: str = "The replica workerpool0-0 was preempted.") -> None:
        """The place takes the job's machines away, at once."""
        self._kill(name)
        self._end(self.jobs[name], (STATE.JOB_STATE_FAILED, code_pb2.ABORTED, message))

    def create(self, request: types.CreateCustomJobRequest) -> types.CustomJob:
        if request.parent != self.parent:
            raise Refused(
                404,
                f"Location or project of {request.parent} is not found; this endpoint serves"
                f" {self.region}.",
            )
        job = request.custom_job
        _check(job)
        machines = sum(pool.replica_count for pool in job.job_spec.worker_pool_specs)
        if (
            machines
            + sum(
                pool.replica_count
                for other in self.alive
                for pool in other.job_spec.worker_pool_specs
            )
            > self.quota
        ):
            raise Refused(
                429,
                "The following quota metrics exceed quota limits:"
                f" aiplatform.googleapis.com/custom_model_training_cpus in {self.region}",
            )
        name = f"{self.parent}/customJobs/{5_000_000_000 + self.server.number()}"
        kept = types.CustomJob(job)
        kept.name, kept.state, kept.create_time = name, STATE.JOB_STATE_QUEUED, datetime.now(UTC)
        self.jobs[name] = kept
        if self.endings:
            self._ends[name] = self.endings.pop(0)
        return kept

    def get(self, request: types.GetCustomJobRequest) -> types.CustomJob:
        if request.name not in self.jobs:
            raise Refused(404, f"The CustomJob {request.name} does not exist.")
        job = self.jobs[request.name]
        self._go_on(job)
        return job

    def list(self, request: types.ListCustomJobsRequest) -> types.ListCustomJobsResponse:
        wanted = dict(
            part.removeprefix("labels.").split("=", 1) for part in request.filter.split(" AND ")
        )
        found = [
            job
            for job in self.jobs.values()
            if job.name.startswith(f"{request.parent}/")
            and all(job.labels.get(key) == json.loads(value) for key, value in wanted.items())
        ]
        start = int(request.page_token or 0)
        more = str(start + self.page) if len(found) > start + self.page else ""
        return types.ListCustomJobsResponse(
            custom_jobs=found[start : start + self.page], next_page_token=more
        )

    def cancel(self, request: types.CancelCustomJobRequest) -> None:
        job = self.jobs.get(request.name)
        if job is None:
            raise Refused(404, f"The CustomJob {request.name} does not exist.")
        if job.state in OVER:
            raise Refused(
                400,
                f"The CustomJob {request.name} is in state {job.state.name} and cannot be"
                " cancelled.",
            )
        job.state = STATE.JOB_STATE_CANCELLING

    def logged(
        self, match: re.Match[str], query: Mapping[str, str], body: Mapping[str, Any]
    ) -> dict[str, Any]:
        if (
            body["resourceNames"] != [f"projects/{self.project}"]
            or body["orderBy"] != "timestamp asc"
        ):
            raise Refused(400, "resourceNames or orderBy is wrong")
        found = re.fullmatch(
            r'resource\.type="ml_job" AND resource\.labels\.job_id="(\d+)"(?: AND'
            r' timestamp>="([^"]+)")?',
            body["filter"],
        )
        if found is None:
            raise Refused(400, f"Unparseable filter: {body['filter']}")
        mine = [
            entry for entry in self.entries if entry["resource"]["labels"]["job_id"] == found[1]
        ]
        if found[2]:
            mine = [
                entry
                for entry in mine
                if datetime.fromisoformat(entry["timestamp"]) >= datetime.fromisoformat(found[2])
            ]
        mine.sort(key=lambda entry: datetime.fromisoformat(entry["timestamp"]))
        start = int(body.get("pageToken", 0))
        more = {"nextPageToken": str(start + self.page)} if len(mine) > start + self.page else {}
        return {"entries": mine[start : start + self.page], **more} if mine else {}

    def _go_on(self, job: types.CustomJob) -> None:
        if job.state == STATE.JOB_STATE_CANCELLING:
            self._kill(job.name)
            self._end(job, (STATE.JOB_STATE_CANCELLED, 0, ""))
        elif job.state == STATE.JOB_STATE_QUEUED:
            job.state = STATE.JOB_STATE_PENDING
        elif job.state == STATE.JOB_STATE_PENDING:
            job.state, job.start_time = STATE.JOB_STATE_RUNNING, datetime.now(UTC)
            self._start(job)
        elif job.state == STATE.JOB_STATE_RUNNING:
            self._looks[job.name] = self._looks.get(job.name, 0) + 1
            if self.workers is not None:
                self._judge(job)
            elif self._looks[job.name] >= self.runs:
                self._end(job, self._ends.get(job.name, (STATE.JOB_STATE_SUCCEEDED, 0, "")))

    def _judge(self, job: types.CustomJob) -> None:
        """The first worker that fails ends the job, as Vertex AI has it."""
        codes = [process.poll() for process in self.processes[job.name]]
        failed = next(((number, code) for number, code in enumerate(codes) if code), None)
        if failed is not None:
            self._kill(job.name)
            which = "workerpool0-0" if failed[0] == 0 else f"workerpool1-{failed[0] - 1}"
            self._end(
                job,
                (
                    STATE.JOB_STATE_FAILED,
                    3,
                    f"The replica {which} exited with a non-zero status of {failed[1]}.",
                ),
            )
        elif all(code == 0 for code in codes):
            self._end(job, (STATE.JOB_STATE_SUCCEEDED, 0, ""))

    def _end(self, job: types.CustomJob, ending: tuple[Any, int, str]) -> None:
        job.state, job.end_time = ending[0], datetime.now(UTC)
        if ending[1]:
            job.error = {"code": ending[1], "message": ending[2]}

    def _start(self, job: types.CustomJob) -> None:
        if self.workers is None:
            return
        pools = {
            f"workerpool{number}": pool
            for number, pool in enumerate(job.job_spec.worker_pool_specs)
        }
        port = free_port()
        cluster = {name: [f"127.0.0.1:{port}"] * pool.replica_count for name, pool in pools.items()}
        self.processes[job.name] = []
        for name, pool in pools.items():
            for index in range(pool.replica_count):
                folder = self.workers / job.name.rpartition("/")[2] / f"{name}-{index}"
                folder.mkdir(parents=True)
                spec = {
                    "cluster": cluster,
                    "environment": "cloud",
                    "task": {"type": name, "index": index},
                    "job": "{}",
                }
                own = {variable.name: variable.value for variable in pool.container_spec.env}
                command = [
                    sys.executable if part == "python" else part
                    for part in [*pool.container_spec.command, *pool.container_spec.args]
                ]
                with (folder / "log").open("wb") as log:
                    self.processes[job.name].append(
                        subprocess.Popen(
                            command,
                            cwd=folder,
                            env={**os.environ, **own, "CLUSTER_SPEC": json.dumps(spec)},
                            stdin=subprocess.DEVNULL,
                            stdout=log,
                            stderr=log,
                            start_new_session=True,
                        )
                    )

    def _kill(self, name: str) -> None:
        for process in self.processes.get(name, []):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def close(self) -> None:
        for name in self.processes:
            self._kill(name)


def install(server: Server) -> State:
    state = State(server)
    server.on("JobService.CreateCustomJob", state.create)
    server.on("JobService.GetCustomJob", state.get)
    server.on("JobService.ListCustomJobs", state.list)
    server.on("JobService.CancelCustomJob", state.cancel)
    server.on_path("post", "/v2/entries:list", state.logged)
    return state


def _check(job: types.CustomJob) -> None:
    if not 0 < len(job.display_name) <= 128:
        raise Refused(400, "The display name must have 1 to 128 characters.")
    if len(job.labels) > 64 or not all(
        LABEL.fullmatch(key) and LABEL.fullmatch(value) for key, value in job.labels.items()
    ):
        raise Refused(400, f"Invalid label in {dict(job.labels)}")
    pools = job.job_spec.worker_pool_specs
    if not pools:
        raise Refused(400, "worker_pool_specs must not be empty.")
    if pools[0].replica_count != 1:
        raise Refused(400, "The primary worker pool must have exactly one replica.")
    for pool in pools:
        _check_pool(pool)
    spec, scheduling = job.job_spec, job.job_spec.scheduling
    if spec.tensorboard and not (
        spec.service_account and spec.base_output_directory.output_uri_prefix
    ):
        raise Refused(
            400, "service_account and base_output_directory must be set when tensorboard is."
        )
    if spec.network and not re.fullmatch(r"projects/\d+/global/networks/[a-z0-9-]+", spec.network):
        raise Refused(
            400,
            f"{spec.network} must be of the form"
            " projects/{project_number}/global/networks/{network}.",
        )
    if scheduling.timeout is None or scheduling.timeout.total_seconds() > 30 * 86_400:
        raise Refused(400, "scheduling.timeout is not valid")
    if scheduling.strategy != types.Scheduling.Strategy.FLEX_START and scheduling.max_wait_duration:
        raise Refused(400, "max_wait_duration is for FLEX_START only.")


def _check_pool(pool: types.WorkerPoolSpec) -> None:
    machine, container = pool.machine_spec, pool.container_spec
    name, accelerator, count = (
        machine.machine_type,
        machine.accelerator_type.name,
        machine.accelerator_count,
    )
    if name in BRINGING:
        if (accelerator, count) != BRINGING[name]:
            raise Refused(400, f"Machine type {name} must have accelerator {BRINGING[name]}.")
    elif TPU.fullmatch(name):
        if not re.fullmatch(r"\d+(x\d+){1,2}", machine.tpu_topology) or count:
            raise Refused(400, f"Machine type {name} must have a tpu_topology.")
    elif not PLAIN.fullmatch(name):
        raise Refused(400, f'Machine type "{name}" is not supported.')
    elif count and not name.startswith("n1-"):
        raise Refused(400, f"Accelerators are not supported on {name}.")
    if bool(count) != (
        machine.accelerator_type != types.AcceleratorType.ACCELERATOR_TYPE_UNSPECIFIED
    ):
        raise Refused(400, "accelerator_type and accelerator_count go together.")
    if not re.match(r"[a-z0-9.-]+/[^\s]+", container.image_uri):
        raise Refused(400, f"image_uri {container.image_uri} is not valid.")
    if (
        pool.disk_spec.boot_disk_type not in ("pd-ssd", "pd-standard", "hyperdisk-balanced")
        or not 100 <= pool.disk_spec.boot_disk_size_gb <= 64_000
    ):
        raise Refused(400, "disk_spec is not valid.")
    if machine.reservation_affinity.values and not all(
        re.fullmatch(r"projects/[^/]+/zones/[^/]+/reservations/[^/]+", value)
        for value in machine.reservation_affinity.values
    ):
        raise Refused(400, "reservation_affinity.values must be whole resource names.")
