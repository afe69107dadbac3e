"""Custom jobs of Vertex AI, one for each start of a job: node 0 is pool 0, the others are pool 1.
The place neither retries nor restarts anything.

A job carries the run, the verb, the start and a mark of its own in labels: whatever got lost on the
way, the next look finds it, and no start makes two.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Callable
from typing import Any

from ingot.base.errors import Failed, WrongInput
from ingot.base.lock import folder_lock
from ingot.base.progress import duration, say
from ingot.base.remote.bucket import open_bucket
from ingot.cloud import jobs
from ingot.cloud.clients import Google
from ingot.cloud.images import image_of
from ingot.cloud.instances import label, name_of
from ingot.cloud.jobs import Standing
from ingot.cloud.logs import entries
from ingot.cloud.machines import accelerators_of, check_machine, machine_type, vertex_accelerator
from ingot.cloud.operations import code_of
from ingot.cloud.prices import time_limit_s
from ingot.cloud.tensorboard import board_of
from ingot.config.recipe import Recipe
from ingot.launch.gce_cluster import ATTEMPT, labels_of, node_command
from ingot.launch.handles import jobs_folder, store
from ingot.launch.job import Handle, Job, Log, State
from ingot.launch.meeting import Meeting

KIND = "vertex"
MARK = "ingot-mark"
"""Label that no two jobs share: by it one is found whose making was not answered."""
LOG_S = 10.0
"""Between two questions for what was said: a project may ask sixty times a minute."""
FIND_S, FIND_PAUSE_S = 20.0, 2.0
"""How long a job whose making was not answered is looked for, and the pause between two looks."""
QUOTA = 429
GONE_S = 600.0
"""How long a cancelled job may take to be gone."""
STATES: dict[str, State] = {
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
TAKEN = re.compile(
    r"preempt|stockout|resources are insufficient|insufficient (resources|capacity)|enough"
    r" resources|out of capacity|timed? ?out|evicted",
    re.I,
)
"""In the error of a job that the place ended, or could not begin, for want of machines or time."""
INTERNAL = 13
"""The code of google.rpc for what is the service's own fault."""
NEW_DISKS = ("a3-ultragpu", "a4", "g4", "ct6e")
"""Machines that take Hyperdisk only, by what their types begin with."""
CHIPS: dict[str, str] = {
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
"""How many chips of a TPU lie: in a plane (v5e, v6e), in a cube (v5p)."""


class VertexLauncher:
    """`launch.kind: vertex`."""

    look_s = 10.0

    def __init__(self, recipe: Recipe) -> None:
        self._recipe, self._google, self._root = recipe, Google(recipe.cloud), recipe.folder.root

    def can(self, job: Job) -> list[str]:
        """See `Launcher`."""
        launch, cloud = self._recipe.launch, self._recipe.cloud
        reasons = check_machine(launch.machine)
        accelerators = accelerators_of(launch.machine)[1]
        if accelerators and job.processes > accelerators:
            reasons.append(
                f"{job.processes} processes share {accelerators} accelerators on each machine;"
                " lower launch.processes, or take larger machines"
            )
        if launch.code == "sync":
            reasons.append(
                "launch.code sync copies ingot to hosts that are there already; set it to image and"
                " build one with `ingot images build train`"
            )
        if job.secrets:
            reasons.append(
                f"launch.secrets {job.secrets[0]} cannot be given to a job without writing it down;"
                f" put it into Secret Manager and name it in cloud.secrets: {{{job.secrets[0]}:"
                " secret:NAME}"
            )
        if job.mirror is None or not (job.meet or "").startswith("gs://"):
            reasons.append("the workers share no disk and need a bucket; set cloud.bucket")
        if cloud.network and not re.fullmatch(
            r"projects/[0-9]+/global/networks/[^/]+|projects/[^/]+/regions/[^/]+/networkAttachments/[^/]+",
            cloud.network,
        ):
            reasons.append(
                f"cloud.network {cloud.network} must be projects/NUMBER/global/networks/NAME for"
                " Vertex AI (gcloud projects describe PROJECT --format='value(projectNumber)'), or"
                " a network attachment by its whole name"
            )
        # Without one a custom job runs as an agent of the service's, which may read no secret and
        # write to no TensorBoard.
        for knob in (
            name
            for name in ("tensorboard", "secrets")
            if getattr(cloud, name) and not cloud.service_account
        ):
            reasons.append(
                f"cloud.{knob} needs an account of its own on Vertex AI; set cloud.service_account"
            )
        if launch.machine.reservation and "/" not in launch.machine.reservation and not cloud.zone:
            reasons.append(
                f"launch.machine.reservation {launch.machine.reservation} lies in a zone; set"
                " cloud.zone, or give its whole name"
            )
        looks: tuple[Callable[[Job], object], ...] = (
            lambda _: self._google.project,
            self._image,
            self._limit_s,
            self._topology,
        )
        for look in looks:
            try:
                look(job)
            except WrongInput as error:
                reasons.append(str(error))
        return reasons

    def render(self, job: Job) -> str:
        """See `Launcher`: the request as JSON."""
        address = self._google.address(f"{self._recipe.cloud.region}-aiplatform.googleapis.com")
        body = json.dumps(self.custom_job(job), indent=2, sort_keys=True)
        return f"# POST {address}/v1/{self._google.parent}/customJobs\n{body}\n"

    def submit(self, job: Job) -> Handle:
        """See `Launcher`. A job of this run and verb that is alive already, of an earlier start, is
        not started twice: its handle comes back.
        """
        if reasons := self.can(job):
            raise WrongInput(f"{job.name} cannot run with launch.kind {KIND}: {'; '.join(reasons)}")
        with folder_lock(jobs_folder(self._root), f"{job.name}.{KIND}.lock"):
            alive = [
                found for found in jobs.labelled(self._google, self._labels(job)) if found.is_alive
            ]
            for older in alive[1:]:
                jobs.cancel(self._google, older.name)
            if alive:
                say(f"{job.name}: it runs already")
                return self._stored(job, alive[0])
            place = open_bucket(job.meet or "")
            for blob in place.list():  # of a run that had this name and is gone
                place.delete(blob.name)
            return self._stored(job, self._made(self.custom_job(job, mark=uuid.uuid4().hex[:16])))

    def status(self, handle: Handle) -> State:
        """See `Launcher`."""
        found = jobs.get(self._google, handle.id)
        if found.state == "FAILED" and (found.code == INTERNAL or TAKEN.search(found.error)):
            return "preempted"
        return STATES.get(found.state, "unknown")

    def log(self, handle: Handle) -> Log:
        return VertexLog(self._google, handle)

    def signal(self, handle: Handle, number: int) -> None:
        """By a note, which the nodes look for every few seconds: the service itself can only end a
        job.
        """
        Meeting(handle.about["meet"]).send(number)

    def cancel(self, handle: Handle) -> None:
        """See `Launcher`."""
        until = time.monotonic() + GONE_S
        if jobs.get(self._google, handle.id).is_alive:
            jobs.cancel(self._google, handle.id)
        while (found := jobs.get(self._google, handle.id)).is_alive:
            if time.monotonic() > until:
                raise Failed(
                    f"{handle.id} is {found.state.lower()} still after {duration(GONE_S)}; look at"
                    f" it: {handle.log}"
                )
            time.sleep(min(self.look_s, 2.0))

    def custom_job(self, job: Job, *, mark: str = "") -> dict[str, Any]:
        """The job as the REST interface takes it; no secret stands in it."""
        cloud, launch = self._recipe.cloud, self._recipe.launch
        pool = {
            "machineSpec": self._machine(job),
            "diskSpec": self._disk(),
            "containerSpec": self._container(job),
        }
        # The hosts of one TPU slice are the service's to count.
        others = job.nodes - 1 if "tpuTopology" not in pool["machineSpec"] else 0
        pools = [
            {**pool, "replicaCount": "1"},
            *([{**pool, "replicaCount": str(others)}] if others else []),
        ]
        strategy = (
            "FLEX_START"
            if launch.machine.flex_start
            else "SPOT"
            if launch.machine.spot
            else "STANDARD"
        )
        scheduling = {
            "timeout": f"{self._limit_s(job)}s",
            "restartJobOnWorkerRestart": False,
            "disableRetries": True,
            "strategy": strategy,
            # To wait costs nothing, so that `cloud.max_cost` does not bound it.
            **({"maxWaitDuration": f"{int(cloud.max_run)}s"} if launch.machine.flex_start else {}),
        }
        spec: dict[str, Any] = {
            "workerPoolSpecs": pools,
            "scheduling": scheduling,
            "baseOutputDirectory": {"outputUriPrefix": f"{job.mirror}/vertex"},
        }
        if cloud.service_account:
            spec["serviceAccount"] = cloud.service_account
        if cloud.network:
            spec |= (
                {"pscInterfaceConfig": {"networkAttachment": cloud.network}}
                if "/networkAttachments/" in cloud.network
                else {"network": cloud.network}
            )
        if cloud.tensorboard:
            spec["tensorboard"] = board_of(self._google)
        given = {label(key): label(value) for key, value in cloud.labels.items()}
        labels = {
            **given,
            **self._labels(job),
            ATTEMPT: _attempt(job),
            **({MARK: mark} if mark else {}),
        }
        return {
            "displayName": name_of(f"ingot-{self._recipe.name}-{job.name}-{_attempt(job)}"),
            "jobSpec": spec,
            "labels": labels,
        }

    def _made(self, body: dict[str, Any]) -> Standing:
        """Ask for a job. Where no answer came, or a bad one, it is looked for by its mark: it may
        be there.
        """
        try:
            return jobs.create(self._google, body)
        except Failed as error:
            if code_of(error) == QUOTA:
                raise
            until = time.monotonic() + FIND_S
            while not (found := jobs.labelled(self._google, {MARK: body["labels"][MARK]})):
                if time.monotonic() > until:
                    raise
                time.sleep(FIND_PAUSE_S)
            return found[0]

    def _stored(self, job: Job, found: Standing) -> Handle:
        number = found.name.rpartition("/")[2]
        link = f"https://console.cloud.google.com/vertex-ai/locations/{self._recipe.cloud.region}/training/{number}?project={self._google.project}"
        meet = f"{(job.meet or '').rpartition('-')[0]}-{found.labels.get(ATTEMPT, _attempt(job))}"
        return store(
            self._root,
            Handle(
                job.name,
                KIND,
                found.name,
                job.argv,
                time.time(),
                link,
                {"meet": meet, "nodes": str(job.nodes)},
            ),
            self._recipe,
        )

    def _labels(self, job: Job) -> dict[str, str]:
        return labels_of(self._recipe, job.name, job.mirror or "")

    def _image(self, job: Job) -> str:
        return job.image or image_of(self._recipe.cloud, "train")

    def _limit_s(self, job: Job) -> int:
        return int(
            min(
                job.time_limit_s or self._recipe.cloud.max_run,
                time_limit_s(self._recipe, nodes=job.nodes),
            )
        )

    def _container(self, job: Job) -> dict[str, Any]:
        program, _, _, *arguments = node_command(self._recipe, job)
        environment = {
            "GOOGLE_CLOUD_PROJECT": self._google.project,
            "PET_NPROC_PER_NODE": str(job.processes),
            **job.environment,
        }
        return {
            "imageUri": self._image(job),
            "command": [program, "-m", "ingot.launch.vertex_node"],
            "args": arguments,
            "env": [
                {"name": name, "value": value}
                for name, value in sorted(environment.items())
                if name not in job.secrets
            ],
        }

    def _machine(self, job: Job) -> dict[str, Any]:
        wanted, cloud = self._recipe.launch.machine, self._recipe.cloud
        name, count = accelerators_of(wanted)
        found: dict[str, Any] = {"machineType": wanted.type}
        if topology := self._topology(job):
            found["tpuTopology"] = topology
        elif name is not None:
            found |= {"acceleratorType": vertex_accelerator(name), "acceleratorCount": count}
        if wanted.reservation:
            whole = (
                wanted.reservation
                if "/" in wanted.reservation
                else f"projects/{self._google.project}/zones/{cloud.zone}/reservations/{wanted.reservation}"
            )
            key = "compute.googleapis.com/reservation-name"
            found["reservationAffinity"] = {
                "reservationAffinityType": "SPECIFIC_RESERVATION",
                "key": key,
                "values": [whole],
            }
        return found

    def _topology(self, job: Job) -> str:
        """How the chips of a TPU lie, "" for a machine that is none. Raises WrongInput where there
        is no slice of so many machines.
        """
        known = machine_type(self._recipe.launch.machine.type)
        if known is None or not known.is_tpu:
            return ""
        chips, table = (
            known.accelerators * job.nodes,
            (CUBES if known.accelerator == "tpu-v5p" else CHIPS),
        )
        if str(chips) not in table:
            raise WrongInput(
                f"{job.nodes} x {known.name} are {chips} chips, and a slice has {', '.join(table)};"
                " set launch.nodes or launch.machine.type"
            )
        return table[str(chips)]

    def _disk(self) -> dict[str, Any]:
        machine = self._recipe.launch.machine
        kind = "hyperdisk-balanced" if machine.type.startswith(NEW_DISKS) else "pd-ssd"
        return {"bootDiskType": kind, "bootDiskSizeGb": machine.disk_gb}


class VertexLog:
    """What the workers of a job say, out of Cloud Logging; with several, each line begins with who
    says it.
    """

    def __init__(self, google: Google, handle: Handle) -> None:
        self._google, self._several = google, handle.about.get("nodes", "1") != "1"
        self._filter = (
            f'resource.type="ml_job" AND resource.labels.job_id="{handle.id.rpartition("/")[2]}"'
        )
        self._after, self._next = "", 0.0

    def read(self) -> bytes:
        if time.monotonic() < self._next:
            return b""
        self._next = time.monotonic() + LOG_S
        lines, self._after = entries(self._google, self._filter, self._after)
        return "".join(
            (
                f"[{line.labels.get('task_name', 'service')}] {line.text}\n"
                if self._several
                else f"{line.text}\n"
            )
            for line in lines
        ).encode()


def _attempt(job: Job) -> str:
    """The number of the start, which its meeting place ends with."""
    return (job.meet or "").rpartition("-")[2]
