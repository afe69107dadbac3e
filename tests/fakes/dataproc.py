"""Dataproc Serverless with its state: `install(server)` answers for batches on a
`tests.fakes.google.Server`.

A batch is PENDING, then RUNNING, then at its end, as time passes. What Google documents of ids,
runtimes, images, properties, labels, networks
and times to live is checked. Where `submit` is given, it really runs: whatever it returns as exit
code decides how the batch ends.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests import gcs
from tests.fakes.google import Refused, Server
from tests.lazy import lazy

types = lazy("google.cloud.dataproc_v1")

RUNTIMES = ("1.1", "1.2", "2.0", "2.1", "2.2", "2.3", "3.0")
BATCH_ID = re.compile(r"[a-z0-9][a-z0-9-]{2,61}[a-z0-9]")
IMAGE = re.compile(r"[a-z0-9.-]+\.[a-z]+(/[a-z0-9._-]+){2,}(:[\w.-]{1,128}|@sha256:[0-9a-f]{64})")
LABEL_KEY, LABEL_VALUE = re.compile(r"[a-z][a-z0-9_-]{0,62}"), re.compile(r"[a-z0-9_-]{0,63}")
ACCOUNT = re.compile(r"[a-z0-9-]+@[a-z0-9.-]+\.gserviceaccount\.com")
TAG = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
THEIRS = ("spark.master", "spark.submit.deployMode", "spark.kubernetes")
"""Properties that the service sets itself."""
STATES = lazy("google.cloud.dataproc_v1", "Batch", "State")


@dataclass
class Running:
    """A batch, and when it was made."""

    batch: Any
    created: float
    code: int | None = None
    cancelled: float | None = None
    started: bool = False


@dataclass
class State:
    """`batches` by id. `pending_s` and `running_s` are how long these states last; `fails` is why
    batches fail that nothing really runs.
    """

    server: Server
    bucket: gcs.Server | None = None
    """Where a batch's files must be, and where its output goes."""
    project: str = "proj"
    region: str = "us-central1"
    subnetworks: tuple[str, ...] = ("default", "private")
    batches: dict[str, Running] = field(default_factory=dict)
    pending_s: float = 0.2
    running_s: float = 0.2
    ending_s: float = 0.2
    page: int = 2
    """Batches of one answer."""
    fails: str = ""
    submit: Callable[[Any], tuple[int, bytes]] | None = None

    @property
    def parent(self) -> str:
        return f"projects/{self.project}/locations/{self.region}"

    @property
    def alive(self) -> list[str]:
        """Ids of what is not over."""
        return [
            name
            for name, running in self.batches.items()
            if self.look(running).state in (STATES.PENDING, STATES.RUNNING, STATES.CANCELLING)
        ]

    def look(self, running: Running) -> Any:
        """The batch as it is now."""
        batch, now = running.batch, time.monotonic() - running.created
        if running.cancelled is not None:
            batch.state = (
                STATES.CANCELLED
                if time.monotonic() - running.cancelled > self.ending_s
                else STATES.CANCELLING
            )
        elif now < self.pending_s:
            batch.state = STATES.PENDING
        elif self.submit is not None:
            if not running.started:
                running.started = True
                threading.Thread(target=self._run, args=(running,), daemon=True).start()
            batch.state = (
                STATES.RUNNING
                if running.code is None
                else STATES.FAILED
                if running.code
                else STATES.SUCCEEDED
            )
        elif now < self.pending_s + self.running_s:
            batch.state = STATES.RUNNING
        else:
            batch.state = STATES.FAILED if self.fails else STATES.SUCCEEDED
        if batch.state == STATES.FAILED:
            batch.state_message = (
                self.fails or f"Job failed with message [driver exited with {running.code}]"
            )
        if batch.state != STATES.PENDING and self.bucket is not None:
            batch.runtime_info.output_uri = f"gs://{self.bucket.bucket}/google-cloud-dataproc-metainfo/x/jobs/srvls-batch-{batch.uuid}/driveroutput"
        return batch

    def say(self, batch: Any, number: int, text: bytes) -> None:
        """Write some of the driver's output."""
        assert self.bucket is not None
        name = f"{batch.runtime_info.output_uri.split('/', 3)[3]}.{number:09d}"
        self.bucket.write(name, text, {}, {})

    def _run(self, running: Running) -> None:
        assert self.submit is not None
        code, said = self.submit(running.batch)
        self.say(running.batch, 0, said)
        running.code = code


def install(server: Server, bucket: gcs.Server | None = None) -> State:
    state = State(server, bucket)

    def create(request: Any) -> Any:
        if request.parent != state.parent:
            raise Refused(403, f"Permission denied on resource {request.parent}")
        if not BATCH_ID.fullmatch(request.batch_id):
            raise Refused(400, f"batch_id must match {BATCH_ID.pattern}: {request.batch_id}")
        _check(state, request.batch)
        if request.batch_id in state.batches:
            raise Refused(
                409,
                "Already exists: Failed to create batch: Batch"
                f" {request.parent}/batches/{request.batch_id}",
            )
        batch = types.Batch(request.batch)
        batch.name, batch.uuid = f"{state.parent}/batches/{request.batch_id}", str(server.number())
        operation = server.operation(
            state.parent.replace("/locations/", "/regions/"), lambda: batch, polls=10**6
        )
        batch.operation = operation.name
        state.batches[request.batch_id] = Running(batch, time.monotonic())
        return operation

    def find(request: Any) -> Any:
        name = request.name.removeprefix(f"{state.parent}/batches/")
        if name not in state.batches:
            raise Refused(404, f"Not found: Batch {request.name}")
        return state.look(state.batches[name])

    def listed(request: Any) -> Any:
        wanted = (
            [item.removeprefix("labels.").split("=") for item in request.filter.split(" AND ")]
            if request.filter
            else []
        )
        found = [state.look(running) for running in state.batches.values()]
        matching = [
            batch
            for batch in reversed(found)
            if all(batch.labels.get(name) == value for name, value in wanted)
        ]
        start = int(request.page_token or 0)
        more = str(start + state.page) if len(matching) > start + state.page else ""
        return types.ListBatchesResponse(
            batches=matching[start : start + state.page], next_page_token=more
        )

    def cancel(match: re.Match[str], query: dict[str, str], body: Any) -> Any:
        for running in state.batches.values():
            if running.batch.operation == match[1]:
                if state.look(running).state in (STATES.SUCCEEDED, STATES.FAILED):
                    raise Refused(400, "Operation is already done")
                running.cancelled = running.cancelled or time.monotonic()
                return {}
        raise Refused(404, f"Not found: {match[1]}")

    server.on("BatchController.CreateBatch", create)
    server.on("BatchController.GetBatch", find)
    server.on("BatchController.ListBatches", listed)
    server.on_path("post", r"/v1/(projects/[^/]+/regions/[^/]+/operations/[^/:]+):cancel", cancel)
    return state


def _check(state: State, batch: Any) -> None:
    """What the service refuses."""
    spark, runtime, execution = (
        batch.pyspark_batch,
        batch.runtime_config,
        batch.environment_config.execution_config,
    )
    if "pyspark_batch" not in batch:
        raise Refused(400, "Batch must have a batch config")
    main = re.fullmatch(r"gs://([^/]+)/(.+\.py)", spark.main_python_file_uri)
    if main is None:
        raise Refused(400, f"main_python_file_uri must be a .py file: {spark.main_python_file_uri}")
    if state.bucket is not None and (
        main[1] != state.bucket.bucket or main[2] not in state.bucket.objects
    ):
        raise Refused(400, f"File not found: {spark.main_python_file_uri}")
    if runtime.version not in RUNTIMES:
        raise Refused(400, f"Unsupported runtime version: {runtime.version}")
    if runtime.container_image and not IMAGE.fullmatch(runtime.container_image):
        raise Refused(400, f"Invalid container image: {runtime.container_image}")
    for name in runtime.properties:
        if not name.startswith(("spark.", "dataproc.")) or name.startswith(THEIRS):
            raise Refused(400, f"Attempted to set unsupported properties: [{name}]")
    for name, value in batch.labels.items():
        if not LABEL_KEY.fullmatch(name) or not LABEL_VALUE.fullmatch(value):
            raise Refused(400, f"Invalid label {name}={value}")
    if len(batch.labels) > 32:
        raise Refused(400, "more than 32 labels")
    _check_execution(state, execution)


def _check_execution(state: State, execution: Any) -> None:
    if execution.service_account and not ACCOUNT.fullmatch(execution.service_account):
        raise Refused(400, f"Invalid service account: {execution.service_account}")
    if execution.network_uri and execution.subnetwork_uri:
        raise Refused(400, "network_uri and subnetwork_uri are mutually exclusive")
    if execution.subnetwork_uri:
        found = re.fullmatch(
            r"projects/[^/]+/regions/([^/]+)/subnetworks/([^/]+)", execution.subnetwork_uri
        )
        if found is None or found[1] != state.region or found[2] not in state.subnetworks:
            raise Refused(
                400, f"Subnetwork {execution.subnetwork_uri} was not found in region {state.region}"
            )
    if not 600 <= execution.ttl.total_seconds() <= 14 * 86_400:
        raise Refused(
            400, f"ttl must be between 10 minutes and 14 days: {execution.ttl.total_seconds()}s"
        )
    if any(not TAG.fullmatch(tag) for tag in execution.network_tags):
        raise Refused(400, f"Invalid network tags: {list(execution.network_tags)}")
    if execution.staging_bucket and not re.fullmatch(
        r"[a-z0-9][a-z0-9._-]+", execution.staging_bucket
    ):
        raise Refused(400, f"Invalid bucket name: {execution.staging_bucket}")
