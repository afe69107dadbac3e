"""Managed Service for Apache Spark (Dataproc Serverless): a batch whose driver works from the run
folder's replica, and whose executors share the bucket.

The driver is `ingot.launch.node` in the Spark image, started by Spark; it prepares as on any Spark,
with `data.engine.shared` set to the replica. The log lies in the bucket, where the service puts its
driver's output.
"""

from __future__ import annotations

import json
import time
import uuid
from typing import Any

from ingot.base.errors import Failed, WrongInput
from ingot.base.markers import fingerprint
from ingot.base.progress import say
from ingot.base.remote.bucket import open_bucket
from ingot.base.runfolder import folder_lock
from ingot.cloud import data_jobs
from ingot.cloud.clients import GoogleClients, message_types
from ingot.cloud.images import image_of
from ingot.cloud.instances import label
from ingot.config.recipe import Recipe
from ingot.config.sections.launch import parse_duration
from ingot.launch.handles import find_handle, jobs_folder, store_handle
from ingot.launch.job import Handle, Job, JobLog, JobState
from ingot.launch.places.logs import SparkDriverLog
from ingot.launch.places.node_commands import (
    ATTEMPT,
    errors_of,
    job_labels,
    other_work,
    start_labels,
    work_label,
)
from ingot.launch.rendezvous import SignalsByNote

KIND = "dataproc"
MODULE = "google.cloud.dataproc_v1"
VERBS = ("ingest", "prepare")
LEAST_S, MOST_S = 600.0, 14 * 86_400.0
"""The shortest and longest time to live that the service allows a batch."""
TAG = "ingot"
STATES: dict[str, JobState] = {
    "PENDING": "queued",
    "RUNNING": "running",
    "CANCELLING": "running",
    "CANCELLED": "cancelled",
    "SUCCEEDED": "succeeded",
    "FAILED": "failed",
}
DRIVER = '''"""What Spark starts: a node of an ingot job. The first argument is JSON: variables, and
secrets by reference, which are read here.
"""

import json
import os
import sys
import tempfile

from ingot.base.errors import leave
from ingot.cloud.clients import GoogleClients
from ingot.cloud.secrets import resolve_secrets
from ingot.config.sections.deployment import Cloud
from ingot.launch.node.main import main

if __name__ == "__main__":
    about = json.loads(sys.argv.pop(1))
    os.environ.update(about["environment"])
    os.environ.update(resolve_secrets(GoogleClients(Cloud(**about["cloud"])), about["secrets"]))
    os.chdir(tempfile.mkdtemp(prefix="ingot-"))
    leave(main())
'''


class DataprocLauncher(SignalsByNote):
    """`launch.kind: dataproc`, or `pipeline.steps.prepare.launch: dataproc`; for `ingest` and
    `prepare`.
    """

    poll_s = 5.0
    shares_disk, paid_by_use = False, True

    def __init__(self, recipe: Recipe) -> None:
        self._recipe, self._root = recipe, recipe.folder.root
        self._google = GoogleClients(recipe.cloud)

    def can(self, job: Job) -> list[str]:
        """See `Launcher`."""
        recipe, reasons = self._recipe, list[str]()
        if job.name not in VERBS:
            reasons.append(
                f"Spark does {' and '.join(VERBS)}, not {job.name}; choose another launch.kind"
                " for it"
            )
        if job.nodes > 1:
            reasons.append(
                f"launch.nodes is {job.nodes}, and Spark chooses its executors by"
                " pipeline.spark.properties; set launch.nodes=1"
            )
        if not job.run_folder_url or not job.rendezvous:
            reasons.append("there is no bucket to work from; set cloud.bucket")
        if job.secrets:
            reasons.append(
                f"launch.secrets ({', '.join(job.secrets)}) cannot be handed to a batch; put them"
                " into Secret Manager, and set cloud.secrets"
            )
        if not LEAST_S <= (limit := self._limit_s(job)) <= MOST_S:
            reasons.append(
                f"a batch may live from {LEAST_S / 60:g} minutes to {MOST_S / 86_400:g} days, and"
                f" is given {limit:g} s; set cloud.max_run"
            )
        if (kind := recipe.data.engine.kind) == "beam":
            reasons.append(
                f"data.engine.kind is {kind}, and this place is Spark; remove it, or use dataflow"
            )
        reasons += self._property_reasons()
        return reasons + errors_of(lambda: image_of(recipe.cloud, "spark"))

    def render(self, job: Job) -> str:
        """See `Launcher`: the request as JSON, and the driver's script."""
        batch = self._batch(job, self._script())
        body = message_types("google.protobuf.json_format").MessageToDict(type(batch).pb(batch))
        request = {
            "parent": self._google.parent,
            "batchId": f"{self._name(job)}-...",
            "batch": body,
        }
        return (
            f"# {self._script()}\n{DRIVER}\n# {MODULE}:"
            f" CreateBatch\n{json.dumps(request, indent=2, sort_keys=True)}\n"
        )

    def submit(self, job: Job) -> Handle:
        """See `Launcher`. The handle is stored before the batch is requested, so that the next
        command can find it if this process is killed in between.

        If a batch of this run and verb is still running from an earlier command, its handle is
        returned; one that does something else is refused.
        """
        if reasons := self.can(job):
            raise WrongInput(
                f"{job.name} cannot run on Managed Service for Apache Spark: {'; '.join(reasons)}"
            )
        with folder_lock(jobs_folder(self._root), f"{job.name}.{KIND}.lock"):
            if (running := self._running(job)) is not None:
                say(f"{job.name}: it runs already")
                return running
            script, request_id = self._script(), uuid.uuid4()
            open_bucket(script.rpartition("/")[0]).put(script.rpartition("/")[2], DRIVER.encode())
            handle = self._store_handle(
                job, f"{self._name(job)}-{request_id.hex[:10]}", job.rendezvous
            )
            data_jobs.create_batch(
                self._google, handle.id, self._batch(job, script), str(request_id)
            )
            return handle

    def _running(self, job: Job) -> Handle | None:
        """The batch that is already running: found by its handle, or by its labels if the handle is
        on another machine.
        """
        known = find_handle(self._root, job.name, KIND)
        if known is not None and self.status(known) in ("queued", "running"):
            return known
        if not (alive := self._alive(job)):
            return None
        if reason := other_work(self._recipe, job, alive[0].name, alive[0].labels):
            raise Failed(reason)
        meet = f"{job.rendezvous.rpartition('-')[0]}-{alive[0].labels[ATTEMPT]}"
        return self._store_handle(job, alive[0].name.rpartition("/")[2], meet)

    def busy(self, job: Job) -> str | None:
        """See `ExclusiveLauncher`: a batch of this run and verb that does something else."""
        alive = self._alive(job)
        return other_work(self._recipe, job, alive[0].name, alive[0].labels) if alive else None

    def runs(self, job: Job) -> bool:
        """See `AdoptingLauncher`."""
        return bool(self._alive(job))

    def _alive(self, job: Job) -> list[data_jobs.SparkBatch]:
        labels = job_labels(self._recipe, job.name, job.run_folder_url)
        return [
            found for found in data_jobs.labelled_batches(self._google, labels) if found.is_alive
        ]

    def _store_handle(self, job: Job, name: str, meet: str) -> Handle:
        about = {"meet": meet, "region": self._recipe.cloud.region}
        link = self._console_link(name)
        handle = Handle(job.name, KIND, name, job.argv, time.time(), link, about)
        return store_handle(self._root, handle, self._recipe)

    def status(self, handle: Handle) -> JobState:
        """See `Launcher`. A batch that was never created has failed."""
        batch = data_jobs.get_batch(self._google, handle.id)
        return "failed" if batch is None else STATES.get(batch.state, "unknown")

    def log(self, handle: Handle) -> JobLog:
        """See `Launcher`."""
        return SparkDriverLog(self._google, handle.id)

    def cancel(self, handle: Handle) -> None:
        """See `Launcher`."""
        data_jobs.cancel_batch(self._google, handle.id)

    def _batch(self, job: Job, script: str) -> Any:
        recipe, types, cloud = self._recipe, message_types(MODULE), self._recipe.cloud
        for_driver = {
            "environment": job.public_environment,
            "secrets": dict(cloud.secrets),
            "cloud": {"project": self._google.project, "region": cloud.region},
        }
        if cloud.endpoint is not None:
            for_driver["cloud"]["endpoint"] = cloud.endpoint
        node = [
            "--rendezvous",
            job.rendezvous,
            "--run-folder-url",
            job.run_folder_url,
            "--run-folder",
            f"{recipe.output}/{recipe.name}",
            "--",
            *self._argv(job),
        ]
        execution = types.ExecutionConfig(
            service_account=cloud.service_account or "",
            ttl={"seconds": int(self._limit_s(job))},
            network_tags=[TAG],
            staging_bucket=cloud.bucket or "",
        )
        if cloud.subnetwork:
            execution.subnetwork_uri = self._resource(
                cloud.subnetwork, f"regions/{cloud.region}/subnetworks"
            )
        elif cloud.network:
            execution.network_uri = self._resource(cloud.network, "global/networks")
        return types.Batch(
            pyspark_batch=types.PySparkBatch(
                main_python_file_uri=script, args=[json.dumps(for_driver, sort_keys=True), *node]
            ),
            runtime_config=types.RuntimeConfig(
                version=recipe.pipeline.spark.version,
                container_image=job.image or image_of(cloud, "spark"),
                properties=self._properties(job),
            ),
            environment_config=types.EnvironmentConfig(execution_config=execution),
            labels={**start_labels(self._recipe, job), **work_label(self._recipe, job)},
        )

    def _argv(self, job: Job) -> list[str]:
        """The service sets Spark's master; the executors share the replica's bucket."""
        knobs = self._recipe.data.engine
        own = {"partitions": knobs.partitions, "conf": knobs.conf} if knobs.kind == "spark" else {}
        return [
            *job.argv,
            f"data.engine={json.dumps({'kind': 'spark', 'shared': job.run_folder_url, **own})}",
        ]

    def _properties(self, job: Job) -> dict[str, str]:
        executors = {
            f"spark.executorEnv.{name}": value for name, value in job.public_environment.items()
        }
        return {**executors, **self._recipe.pipeline.spark.properties}

    def _property_reasons(self) -> list[str]:
        wrong = [
            name
            for name in self._recipe.pipeline.spark.properties
            if not name.startswith(("spark.", "dataproc."))
        ]
        return [
            f"pipeline.spark.properties has {name}, which is none of Spark's; write spark.NAME"
            for name in wrong
        ]

    def _limit_s(self, job: Job) -> float:
        return float(
            parse_duration(
                job.time_limit_s if job.time_limit_s is not None else self._recipe.cloud.max_run
            )
        )

    def _resource(self, name: str, kind: str) -> str:
        return name if "/" in name else f"projects/{self._google.project}/{kind}/{name}"

    def _script(self) -> str:
        """Named by its content, so that another version of ingot does not change the driver of a
        running batch.
        """
        return f"{self._google.bucket}/ingot/drivers/{fingerprint(DRIVER)[:16]}.py"

    def _name(self, job: Job) -> str:
        """The prefix of an id: lower case letters, digits, hyphens; the whole id has at most 63
        characters.
        """
        return f"ingot-{label(self._recipe.name).replace('_', '-')[:34].strip('-')}-{job.name}"

    def _console_link(self, name: str) -> str:
        cloud = self._recipe.cloud
        batches = f"https://console.cloud.google.com/dataproc/batches/{cloud.region}"
        return f"{batches}/{name}?project={self._google.project}"
