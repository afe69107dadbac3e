"""Managed Service for Apache Spark (Dataproc Serverless): a batch whose driver works from the run's
replica, and whose executors share the bucket.

The driver is `ingot.launch.node` in the Spark image, started by Spark; the preparing is the same
that Spark does anywhere, with `data.engine.shared` set to the replica. What the batch says lies in
the bucket, where the service puts its driver's output.
"""

from __future__ import annotations

import json
import time
import uuid
from typing import Any

from ingot.base.errors import WrongInput
from ingot.base.lock import folder_lock
from ingot.base.markers import fingerprint
from ingot.base.progress import say
from ingot.base.remote.bucket import open_bucket
from ingot.cloud import batches
from ingot.cloud.clients import Google, messages
from ingot.cloud.images import image_of
from ingot.cloud.instances import label
from ingot.config.recipe import Recipe
from ingot.config.sections.launch import parse_duration
from ingot.launch.gce_cluster import ATTEMPT, labels_of
from ingot.launch.handles import find, jobs_folder, store
from ingot.launch.job import Handle, Job, Log, State
from ingot.launch.meeting import Meeting

KIND = "dataproc"
MODULE = "google.cloud.dataproc_v1"
VERBS = ("ingest", "prepare")
LEAST_S, MOST_S = 600.0, 14 * 86_400.0
"""What the service allows as time to live of a batch."""
TAG = "ingot"
STATES: dict[str, State] = {
    "PENDING": "queued",
    "RUNNING": "running",
    "CANCELLING": "running",
    "CANCELLED": "cancelled",
    "SUCCEEDED": "succeeded",
    "FAILED": "failed",
}
DRIVER = '''"""What Spark starts: a node of an ingot job. The first argument is JSON: variables, and secrets by reference, which are read here."""

import json
import os
import sys
import tempfile

from ingot.cloud.clients import Google
from ingot.cloud.secrets import resolve
from ingot.config.sections.deployment import Cloud
from ingot.launch.node import main

if __name__ == "__main__":
    about = json.loads(sys.argv.pop(1))
    os.environ.update(about["environment"])
    os.environ.update(resolve(Google(Cloud(**about["cloud"])), about["secrets"]))
    os.chdir(tempfile.mkdtemp(prefix="ingot-"))
    sys.exit(main())
'''


class DataprocLauncher:
    """`launch.kind: dataproc`, or `pipeline.steps.prepare.launch: dataproc`; for `ingest` and
    `prepare`.
    """

    look_s = 5.0

    def __init__(self, recipe: Recipe) -> None:
        self._recipe, self._google, self._root = recipe, Google(recipe.cloud), recipe.folder.root

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
        if job.mirror is None or job.meet is None:
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
        reasons += self._wrong_properties()
        try:
            image_of(recipe.cloud, "spark")
        except WrongInput as error:
            reasons.append(str(error))
        return reasons

    def render(self, job: Job) -> str:
        """See `Launcher`: the request as JSON, and the driver's script."""
        batch = self._batch(job, self._script())
        about = messages("google.protobuf.json_format").MessageToDict(type(batch).pb(batch))
        request = {
            "parent": batches.parent(self._google),
            "batchId": f"{self._name(job)}-...",
            "batch": about,
        }
        return (
            f"# {self._script()}\n{DRIVER}\n# {MODULE}:"
            f" CreateBatch\n{json.dumps(request, indent=2, sort_keys=True)}\n"
        )

    def submit(self, job: Job) -> Handle:
        """See `Launcher`. The handle is stored before the batch is asked for: killed in between,
        the next command looks for it.

        A batch of this run and verb that is alive already, of an earlier command, is not made
        twice: its handle comes back.
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
            handle = self._stored(job, f"{self._name(job)}-{request_id.hex[:10]}", job.meet or "")
            batches.create(self._google, handle.id, self._batch(job, script), str(request_id))
            return handle

    def _running(self, job: Job) -> Handle | None:
        """By the handle, or where that lies on another machine by the labels."""
        known = find(self._root, job.name, KIND)
        if known is not None and self.status(known) in ("queued", "running"):
            return known
        alive = [
            found
            for found in batches.labelled(
                self._google, labels_of(self._recipe, job.name, job.mirror or "")
            )
            if found.is_alive
        ]
        if not alive:
            return None
        meet = f"{(job.meet or '').rpartition('-')[0]}-{alive[0].labels[ATTEMPT]}"
        return self._stored(job, alive[0].name.rpartition("/")[2], meet)

    def _stored(self, job: Job, name: str, meet: str) -> Handle:
        about = {"meet": meet, "region": self._recipe.cloud.region}
        return store(
            self._root,
            Handle(job.name, KIND, name, job.argv, time.time(), self._address(name), about),
            self._recipe,
        )

    def status(self, handle: Handle) -> State:
        """See `Launcher`. A batch that never came to be has failed."""
        standing = batches.get(self._google, handle.id)
        return "failed" if standing is None else STATES.get(standing.state, "unknown")

    def log(self, handle: Handle) -> Log:
        return DriverLog(self._google, handle.id)

    def signal(self, handle: Handle, number: int) -> None:
        """By a note in the bucket, which the driver looks for: the service itself can only end a
        batch.
        """
        Meeting(handle.about["meet"]).send(number)

    def cancel(self, handle: Handle) -> None:
        batches.cancel(self._google, handle.id)

    def _batch(self, job: Job, script: str) -> Any:
        recipe, types, cloud = self._recipe, messages(MODULE), self._recipe.cloud
        given = {
            "environment": self._variables(job),
            "secrets": dict(cloud.secrets),
            "cloud": {"project": self._google.project, "region": cloud.region},
        }
        if cloud.endpoint is not None:
            given["cloud"]["endpoint"] = cloud.endpoint
        node = [
            "--meet",
            job.meet or "",
            "--mirror",
            job.mirror or "",
            "--root",
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
                main_python_file_uri=script, args=[json.dumps(given, sort_keys=True), *node]
            ),
            runtime_config=types.RuntimeConfig(
                version=recipe.pipeline.spark.version,
                container_image=job.image or image_of(cloud, "spark"),
                properties=self._properties(job),
            ),
            environment_config=types.EnvironmentConfig(execution_config=execution),
            labels=self._labels(job),
        )

    def _argv(self, job: Job) -> list[str]:
        """The master is the service's; the executors share the replica's bucket."""
        knobs = self._recipe.data.engine
        own = {"partitions": knobs.partitions, "conf": knobs.conf} if knobs.kind == "spark" else {}
        return [
            *job.argv,
            f"data.engine={json.dumps({'kind': 'spark', 'shared': job.mirror, **own})}",
        ]

    def _labels(self, job: Job) -> dict[str, str]:
        given = {label(name): label(value) for name, value in self._recipe.cloud.labels.items()}
        return {
            **given,
            **labels_of(self._recipe, job.name, job.mirror or ""),
            ATTEMPT: (job.meet or "").rpartition("-")[2],
        }

    def _variables(self, job: Job) -> dict[str, str]:
        return {
            name: value
            for name, value in sorted(job.environment.items())
            if name not in job.secrets
        }

    def _properties(self, job: Job) -> dict[str, str]:
        executors = {
            f"spark.executorEnv.{name}": value for name, value in self._variables(job).items()
        }
        return {**executors, **self._recipe.pipeline.spark.properties}

    def _wrong_properties(self) -> list[str]:
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
        """Named by its content: another version of ingot has another, and batches that run are not
        disturbed.
        """
        return f"{self._google.bucket}/ingot/drivers/{fingerprint(DRIVER)[:16]}.py"

    def _name(self, job: Job) -> str:
        """What an id begins with: lower case letters, digits, hyphens, 63 characters at most with
        what follows.
        """
        return f"ingot-{label(self._recipe.name).replace('_', '-')[:34].strip('-')}-{job.name}"

    def _address(self, name: str) -> str:
        cloud = self._recipe.cloud
        return f"https://console.cloud.google.com/dataproc/batches/{cloud.region}/{name}?project={self._google.project}"


class DriverLog:
    """The driver's output, which the service writes into objects of growing number."""

    def __init__(self, google: Google, batch_id: str) -> None:
        self._google, self._id, self._output = google, batch_id, ""
        self._read: dict[str, int] = {}

    def read(self) -> bytes:
        if not self._output:
            standing = batches.get(self._google, self._id)
            self._output = standing.output if standing is not None else ""
        if not self._output:
            return b""
        folder, _, start = self._output.rpartition("/")
        bucket, said = open_bucket(folder), b""
        for blob in bucket.list(start):
            have = self._read.get(blob.name, 0)
            if blob.bytes > have:
                said += bucket.get(blob.name)[have:]
                self._read[blob.name] = blob.bytes
        return said
