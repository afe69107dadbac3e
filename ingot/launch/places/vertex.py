"""Custom jobs of Vertex AI, one per start of a job: node 0 is worker pool 0, the others are pool 1.
The service neither retries nor restarts anything.

A job is labelled with the run, the verb, the start, what it does and a unique mark: if the answer
to its creation is lost, it is found by them, so that no start creates two.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
import uuid
from typing import Any

from ingot.base.errors import Failed, IngotError, WrongInput
from ingot.base.progress import duration, say
from ingot.base.runfolder import folder_lock
from ingot.cloud.clients import GoogleClients, http_status_of
from ingot.cloud.images import image_of
from ingot.cloud.instances import resource_name
from ingot.cloud.machines import accelerators_of, machine_type, vertex_accelerator
from ingot.cloud.prices import time_limit_s
from ingot.cloud.vertex import jobs
from ingot.cloud.vertex.jobs import CustomJobStatus
from ingot.cloud.vertex.tensorboard import tensorboard_name
from ingot.config.recipe import Recipe
from ingot.launch.handles import find_handle, jobs_folder, store_handle
from ingot.launch.job import Handle, Job, JobLog, JobState
from ingot.launch.places.logs import VertexLog
from ingot.launch.places.node_commands import (
    ATTEMPT,
    container_command,
    errors_of,
    job_labels,
    machine_reasons,
    other_work,
    start_labels,
    work_label,
)
from ingot.launch.rendezvous import (
    EXIT,
    Rendezvous,
    SignalsByNote,
    clear_rendezvous,
    state_by_notes,
)

KIND = "vertex"
MARK = "ingot-mark"
"""A unique label by which a job is found if the answer to its creation was lost."""
FIND_TIMEOUT_S, FIND_POLL_S = 20.0, 2.0
"""How long such a job is looked for, and the pause between two queries."""
QUOTA = 429
CANCEL_TIMEOUT_S = 600.0
"""How long a cancelled job may take to end."""
STATES: dict[str, JobState] = {
    "QUEUED": "queued",
    "PENDING": "queued",
    "PAUSED": "queued",
    "RUNNING": "running",
    "UPDATING": "running",
    "CANCELLING": "running",
    "SUCCEEDED": "succeeded",
    "FAILED": "failed",
    "PARTIALLY_SUCCEEDED": "failed",
    "CANCELLED": "cancelled",
    "EXPIRED": "preempted",
}
PREEMPTED = re.compile(
    r"preempt|stockout|resources are insufficient|insufficient (resources|capacity)|enough"
    r" resources|out of capacity|timed? ?out|evicted",
    re.I,
)
"""Error texts of a job that the service ended or could not start for lack of machines or time."""
INTERNAL = 13
"""The code of google.rpc for an error of the service itself."""
HYPERDISK_ONLY = ("a3-ultragpu", "a4", "g4", "ct6e")
"""Prefixes of machine types that support Hyperdisk only."""
PLANES: dict[str, str] = {
    "1": "1x1",
    "4": "2x2",
    "8": "2x4",
    "16": "4x4",
    "32": "4x8",
    "64": "8x8",
    "128": "8x16",
    "256": "16x16",
}
CUBES: dict[str, str] = {
    "4": "2x2x1",
    "8": "2x2x2",
    "16": "2x2x4",
    "32": "2x4x4",
    "64": "4x4x4",
    "128": "4x4x8",
    "256": "4x8x8",
}
"""TPU topologies by the number of chips: planes of v5e and v6e, cubes of v5p."""


class VertexLauncher(SignalsByNote):
    """`launch.kind: vertex`."""

    poll_s = 10.0
    shares_disk, paid_by_use = False, False

    def __init__(self, recipe: Recipe) -> None:
        self._recipe, self._root = recipe, recipe.folder.root
        self._google = GoogleClients(recipe.cloud)

    def can(self, job: Job) -> list[str]:
        """See `Launcher`."""
        launch, cloud = self._recipe.launch, self._recipe.cloud
        reasons = machine_reasons(self._recipe, job)
        if cloud.network and not re.fullmatch(
            r"projects/[0-9]+/global/networks/[^/]+|projects/[^/]+/regions/[^/]+/networkAttachments/[^/]+",
            cloud.network,
        ):
            reasons.append(
                f"cloud.network {cloud.network} must be projects/NUMBER/global/networks/NAME for"
                " Vertex AI (gcloud projects describe PROJECT --format='value(projectNumber)'), or"
                " a network attachment by its whole name"
            )
        # Without one, a custom job runs as a service agent, which can read no secret and write to
        # no TensorBoard.
        reasons += [
            f"cloud.{knob} needs an account of its own on Vertex AI; set cloud.service_account"
            for knob in ("tensorboard", "secrets")
            if getattr(cloud, knob) and not cloud.service_account
        ]
        if launch.machine.reservation and "/" not in launch.machine.reservation and not cloud.zone:
            reasons.append(
                f"launch.machine.reservation {launch.machine.reservation} lies in a zone; set"
                " cloud.zone, or give its whole name"
            )
        return reasons + errors_of(
            lambda: self._google.project,
            lambda: self._image(job),
            lambda: self._limit_s(job),
            lambda: self._topology(job),
        )

    def render(self, job: Job) -> str:
        """See `Launcher`: the request as JSON."""
        address = self._google.address(f"{self._recipe.cloud.region}-aiplatform.googleapis.com")
        body = json.dumps(self.custom_job(job), indent=2, sort_keys=True)
        return f"# POST {address}/v1/{self._google.parent}/customJobs\n{body}\n"

    def busy(self, job: Job) -> str | None:
        """See `ExclusiveLauncher`: a job of this run and verb that does something else."""
        alive = self._alive(job)
        return other_work(self._recipe, job, alive[0].name, alive[0].labels) if alive else None

    def runs(self, job: Job) -> bool:
        """See `AdoptingLauncher`."""
        return bool(self._alive(job))

    def _alive(self, job: Job) -> list[CustomJobStatus]:
        """The jobs of this run and verb that have not ended, the newest first."""
        labels = job_labels(self._recipe, job.name, job.run_folder_url)
        regions = {self._recipe.cloud.region: self._google}
        if (handle := find_handle(self._root, job.name, KIND)) is not None:
            regions.setdefault(_region(handle.id), self._google_of(handle.id))
        return [
            found
            for google in regions.values()
            for found in jobs.labelled_custom_jobs(google, labels)
            if found.is_alive
        ]

    def _google_of(self, name: str) -> GoogleClients:
        """The clients of a job's region: `cloud.region` may have been changed since."""
        cloud = self._recipe.cloud.model_copy(update={"region": _region(name)})
        return GoogleClients(cloud)

    def submit(self, job: Job) -> Handle:
        """See `Launcher`. If a job of this run and verb is still running from an earlier start, its
        handle is returned; one that does something else is refused.
        """
        if reasons := self.can(job):
            raise WrongInput(f"{job.name} cannot run with launch.kind {KIND}: {'; '.join(reasons)}")
        with folder_lock(jobs_folder(self._root), f"{job.name}.{KIND}.lock"):
            if alive := self._alive(job):
                if reason := other_work(self._recipe, job, alive[0].name, alive[0].labels):
                    raise Failed(reason)
                for older in alive[1:]:
                    jobs.cancel_custom_job(self._google_of(older.name), older.name)
                say(f"{job.name}: it runs already")
                return self._store_handle(job, alive[0])
            clear_rendezvous(job.rendezvous)
            body = self.custom_job(job, mark=uuid.uuid4().hex[:16])
            return self._store_handle(job, self._create(body))

    def status(self, handle: Handle) -> JobState:
        """See `Launcher`. Vertex AI reports nodes that exit with 75 as failed, so their notes
        decide about failures, and how a job ended that somebody deleted; if not all nodes left one,
        it was ended by that.
        """
        found = self._get(handle)
        if found is None:
            return self._by_notes(handle) or "cancelled"
        if found.state == "FAILED" and (found.code == INTERNAL or PREEMPTED.search(found.error)):
            return "preempted"
        state = STATES.get(found.state, "unknown")
        if state == "failed":
            with contextlib.suppress(IngotError):  # it is over, whatever the bucket answers
                return self._by_notes(handle) or state
        return state

    def _by_notes(self, handle: Handle) -> JobState | None:
        """How the job ended; None if not all of its nodes told."""
        rendezvous, nodes = Rendezvous.of(handle), int(handle.about["nodes"])
        left = len(rendezvous.notes(EXIT))
        return state_by_notes(rendezvous, nodes) if left == nodes else None

    def waited_s(self, handle: Handle) -> float | None:
        """See `QueueLauncher`."""
        found = self._get(handle)
        if found is None:
            return 0.0  # it cannot be told any more
        return None if found.started is None else found.started - found.created

    def log(self, handle: Handle) -> JobLog:
        """See `Launcher`."""
        return VertexLog(self._google, handle)

    def cancel(self, handle: Handle) -> None:
        """See `Launcher`."""
        deadline = time.monotonic() + CANCEL_TIMEOUT_S
        if (found := self._get(handle)) is not None and found.is_alive:
            jobs.cancel_custom_job(self._google_of(handle.id), handle.id)
        while (found := self._get(handle)) is not None and found.is_alive:
            if time.monotonic() > deadline:
                raise Failed(
                    f"{handle.id} is {found.state.lower()} still after"
                    f" {duration(CANCEL_TIMEOUT_S)}; look at it: {handle.log}"
                )
            time.sleep(min(self.poll_s, 2.0))

    def _get(self, handle: Handle) -> CustomJobStatus | None:
        return jobs.get_custom_job(self._google_of(handle.id), handle.id)

    def custom_job(self, job: Job, *, mark: str = "") -> dict[str, Any]:
        """The job as the REST interface expects it, without secrets."""
        cloud = self._recipe.cloud
        pool = {
            "machineSpec": self._machine_spec(job),
            "diskSpec": self._disk_spec(),
            "containerSpec": self._container_spec(job),
        }
        # The service counts the hosts of one TPU slice.
        others = job.nodes - 1 if "tpuTopology" not in pool["machineSpec"] else 0
        pools = [
            {**pool, "replicaCount": "1"},
            *([{**pool, "replicaCount": str(others)}] if others else []),
        ]
        spec: dict[str, Any] = {
            "workerPoolSpecs": pools,
            "scheduling": self._scheduling(job),
            "baseOutputDirectory": {"outputUriPrefix": f"{job.run_folder_url}/vertex"},
            **jobs.account_and_network(cloud),
        }
        if cloud.tensorboard:
            spec["tensorboard"] = tensorboard_name(self._google)
        name = f"ingot-{self._recipe.name}-{job.name}-{job.start_number}"
        return {
            "displayName": resource_name(name),
            "jobSpec": spec,
            "labels": {
                **start_labels(self._recipe, job),
                **work_label(self._recipe, job),
                **({MARK: mark} if mark else {}),
            },
        }

    def _scheduling(self, job: Job) -> dict[str, Any]:
        machine = self._recipe.launch.machine
        strategy = "SPOT" if machine.spot else "STANDARD"
        scheduling: dict[str, Any] = {
            "timeout": f"{self._limit_s(job)}s",
            "restartJobOnWorkerRestart": False,
            "disableRetries": True,
            "strategy": "FLEX_START" if machine.flex_start else strategy,
        }
        if machine.flex_start:
            # Waiting is free, so `cloud.max_cost` does not limit it.
            scheduling["maxWaitDuration"] = f"{int(self._recipe.cloud.max_run)}s"
        return scheduling

    def _create(self, body: dict[str, Any]) -> CustomJobStatus:
        """Create a job. If no answer arrives, it is looked up by its mark, since it may exist."""
        try:
            return jobs.create_custom_job(self._google, body)
        except Failed as error:
            if http_status_of(error) == QUOTA:
                raise
            deadline, mark = time.monotonic() + FIND_TIMEOUT_S, {MARK: body["labels"][MARK]}
            while not (found := jobs.labelled_custom_jobs(self._google, mark)):
                if time.monotonic() > deadline:
                    raise
                time.sleep(FIND_POLL_S)
            return found[0]

    def _store_handle(self, job: Job, found: CustomJobStatus) -> Handle:
        region, number = _region(found.name), found.name.rpartition("/")[2]
        link = (
            f"https://console.cloud.google.com/vertex-ai/locations/{region}/training/{number}"
            f"?project={self._google.project}"
        )
        start = found.labels.get(ATTEMPT, job.start_number)
        about = {
            "meet": f"{job.rendezvous.rpartition('-')[0]}-{start}",
            "nodes": str(job.nodes),
        }
        handle = Handle(job.name, KIND, found.name, job.argv, time.time(), link, about)
        return store_handle(self._root, handle, self._recipe)

    def _image(self, job: Job) -> str:
        return job.image or image_of(self._recipe.cloud, "train")

    def _limit_s(self, job: Job) -> int:
        own = job.time_limit_s or self._recipe.cloud.max_run
        return int(min(own, time_limit_s(self._recipe, nodes=job.nodes)))

    def _container_spec(self, job: Job) -> dict[str, Any]:
        program, dash_m, module, *arguments = container_command(self._recipe, job)
        environment = {
            "GOOGLE_CLOUD_PROJECT": self._google.project,
            "PET_NPROC_PER_NODE": str(job.processes),
            **job.environment,
        }
        return {
            "imageUri": self._image(job),
            "command": [program, dash_m, module],
            "args": ["--cluster-spec", *arguments],
            "env": [
                {"name": name, "value": value}
                for name, value in sorted(environment.items())
                if name not in job.secrets
            ],
        }

    def _machine_spec(self, job: Job) -> dict[str, Any]:
        machine, cloud = self._recipe.launch.machine, self._recipe.cloud
        name, count = accelerators_of(machine)
        spec: dict[str, Any] = {"machineType": machine.type}
        if topology := self._topology(job):
            spec["tpuTopology"] = topology
        elif name is not None:
            spec |= {"acceleratorType": vertex_accelerator(name), "acceleratorCount": count}
        if reservation := machine.reservation:
            if "/" not in reservation:
                zone = f"projects/{self._google.project}/zones/{cloud.zone}"
                reservation = f"{zone}/reservations/{reservation}"
            spec["reservationAffinity"] = {
                "reservationAffinityType": "SPECIFIC_RESERVATION",
                "key": "compute.googleapis.com/reservation-name",
                "values": [reservation],
            }
        return spec

    def _topology(self, job: Job) -> str:
        """The topology of a TPU slice, "" for a machine without TPUs. Raises WrongInput if there is
        no slice of this many machines.
        """
        machine = machine_type(self._recipe.launch.machine.type)
        if machine is None or not machine.is_tpu:
            return ""
        chips = machine.accelerators * job.nodes
        table = CUBES if machine.accelerator == "tpu-v5p" else PLANES
        if str(chips) not in table:
            raise WrongInput(
                f"{job.nodes} x {machine.name} are {chips} chips, and a slice has"
                f" {', '.join(table)}; set launch.nodes or launch.machine.type"
            )
        return table[str(chips)]

    def _disk_spec(self) -> dict[str, Any]:
        machine = self._recipe.launch.machine
        kind = "hyperdisk-balanced" if machine.type.startswith(HYPERDISK_ONLY) else "pd-ssd"
        return {"bootDiskType": kind, "bootDiskSizeGb": machine.disk_gb}


def _region(name: str) -> str:
    """The region of a job, `projects/PROJECT/locations/REGION/customJobs/NUMBER`."""
    return name.split("/")[3]
