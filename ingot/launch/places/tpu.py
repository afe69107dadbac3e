"""A TPU VM requested as a queued resource, following Google's documentation; not tested on a TPU.

The service enforces no time limit: the VM's start-up script does, and deletes the VM at the end, as
does each query of the job, also when the script does not come to its end. A TPU VM of the same run
that another computer asked for prevents a start.
"""

from __future__ import annotations

import json
import re
import shlex
import time
import uuid
from typing import Any

from ingot.base.errors import EXIT_FAILED, Failed, IngotError, WrongInput
from ingot.base.markers import fingerprint
from ingot.base.progress import duration, say
from ingot.base.runfolder import folder_lock
from ingot.cloud import tpus
from ingot.cloud.clients import GoogleClients
from ingot.cloud.images import image_of
from ingot.cloud.instances import resource_name
from ingot.cloud.prices import time_limit_s, tpu_chips
from ingot.config.recipe import Recipe
from ingot.launch.handles import find_handle, jobs_folder, store_handle
from ingot.launch.job import Handle, Job, JobLog, JobState
from ingot.launch.places.logs import TpuLog
from ingot.launch.places.node_commands import (
    UNACCELERATED,
    boot_note_fields,
    bucket_reasons,
    container_command,
    errors_of,
    job_labels,
    not_come_up,
    script_template,
    start_labels,
)
from ingot.launch.rendezvous import (
    ARRIVED,
    BOOT,
    CANCELLED,
    EXIT,
    MADE,
    Rendezvous,
    SignalsByNote,
    clear_rendezvous,
    state_by_notes,
    taken_away,
)

KIND = "tpu"
MAX_CHIPS, EIGHT_CHIP_TYPES = 4, ("v5litepod-", "v6e-")
"""Maximum number of chips of one TPU VM, and the generations in which it may have eight; larger
slices have several hosts.
"""
SAVE_S, SPARE_S, LEAST_S = 300, 60, 60
"""Seconds that the container has to save after its time limit; what the VM may take beyond them to
be gone; and the shortest remaining time for which a container is still started.
"""
WAITING = ("ACCEPTED", "CREATING", "PROVISIONING", "WAITING_FOR_RESOURCES", "STATE_UNSPECIFIED")


class TpuLauncher(SignalsByNote):
    """One job, one TPU VM of one host."""

    poll_s = 15.0
    shares_disk, paid_by_use = False, False

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.google = recipe, GoogleClients(recipe.cloud)

    @property
    def _zone(self) -> str:
        return self.recipe.cloud.zone or f"{self.recipe.cloud.region}-a"

    def can(self, job: Job) -> list[str]:
        """See `Launcher`."""
        kind, reasons = self.recipe.launch.tpu.type, []
        most = 8 if kind.startswith(EIGHT_CHIP_TYPES) else MAX_CHIPS
        if (count := tpu_chips(kind)) is None:
            reasons.append(
                f"launch.tpu.type {kind} is none; write a generation and a number, such as"
                " v5litepod-8"
            )
        elif count > most:
            reasons.append(
                f"launch.tpu.type {kind} has {count} chips on several hosts, and this drives one"
                f" host of up to {most}; take a smaller one"
            )
        if job.nodes > 1:
            reasons.append(
                f"{job.nodes} nodes are asked for and a TPU VM is one; set launch.nodes=1"
            )
        if job.name in UNACCELERATED:
            reasons.append(
                f"{job.name} uses no accelerator, and a TPU VM is one; set"
                f" pipeline.steps.{job.name}.launch to local"
            )
        if job.image is None and self.recipe.cloud.images.train is None:
            reasons.append(
                "a TPU needs an image with torch_tpu, which the project's own has not; build one"
                " and set launch.image"
            )
        reasons += bucket_reasons(job)
        return reasons + errors_of(
            lambda: self.google.project, lambda: time_limit_s(self.recipe, nodes=1)
        )

    def render(self, job: Job) -> str:
        """See `Launcher`: the request as JSON, and the start-up script."""
        id = self._id(job, "drawn-by-submit")
        request = self._request(job, id)
        script = request["tpu"]["nodeSpec"][0]["node"]["metadata"].pop("startup-script")
        address = f"{self.google.address(tpus.HOST)}/v2/{self._location}/queuedResources"
        body = json.dumps(request, indent=2, sort_keys=True)
        return (
            "# Not tried on a TPU: none could be had. The image needs torch_tpu.\n"
            f"# POST {address}?queuedResourceId={id}\n{body}\n"
            f"# startup-script\n{script}"
        )

    @property
    def _location(self) -> str:
        return f"projects/{self.google.project}/locations/{self._zone}"

    def busy(self, job: Job) -> str | None:
        """See `ExclusiveLauncher`: a TPU VM of this run and verb that this run folder did not ask
        for.
        """
        known = find_handle(self.recipe.folder.root, job.name, KIND)
        labels = job_labels(self.recipe, job.name, job.run_folder_url)
        for found in tpus.labelled(self.google, self._zone, labels):
            if found.is_alive and (known is None or found.id != known.id):
                return (
                    f"the TPU {found.id} in {self._zone} works on this run and was started"
                    " elsewhere; cancel it there, or delete it"
                )
        return None

    def submit(self, job: Job) -> Handle:
        """See `Launcher`. If a job of this name is already running, its handle is returned. Raises
        Failed if it is running and was started elsewhere.
        """
        if reasons := self.can(job):
            raise WrongInput(f"{job.name} cannot run with launch.kind {KIND}: {'; '.join(reasons)}")
        root = self.recipe.folder.root
        with folder_lock(jobs_folder(root), f"{job.name}.{KIND}.lock"):
            known = find_handle(root, job.name, KIND)
            if known is not None:
                is_this_start = known.about["meet"] == job.rendezvous
                if not is_this_start and self.status(known) in ("queued", "running"):
                    return known
                tpus.delete(self.google, known.about["zone"], known.id)
            if reason := self.busy(job):
                raise Failed(reason)
            clear_rendezvous(job.rendezvous)
            say(
                "warning: nothing of launch.kind tpu could be tried on a TPU; the image needs"
                " torch_tpu"
            )
            about = {
                "zone": self._zone,
                "meet": job.rendezvous,
                "limit_s": str(self._limit_s(job)),
            }
            id = self._id(job, uuid.uuid4().hex[:8])
            handle = Handle(job.name, KIND, id, job.argv, time.time(), "", about)
            store_handle(root, handle, self.recipe)
            try:
                tpus.create(self.google, self._zone, id, self._request(job, id))
            except BaseException:
                try:
                    tpus.delete(self.google, self._zone, id)
                except IngotError as error:  # why there is no job is told by the first error
                    say(
                        f"warning: {error}; the TPU {id} may be left: `ingot launch cancel {root}`"
                        " deletes it, as the same command does"
                    )
                raise
            return handle

    def _id(self, job: Job, drawn: str) -> str:
        """No two starts have the same one, even of the same number on two computers: what has it is
        this start's, and may be followed and deleted.
        """
        replica = fingerprint(job.run_folder_url)[:6]
        run = f"ingot-{self.recipe.name}-{job.name}-{replica}"
        return resource_name(f"{run}-{job.start_number}-{drawn}")

    def _request(self, job: Job, id: str) -> dict[str, Any]:
        """The queued resource."""
        cloud, launch = self.recipe.cloud, self.recipe.launch
        network: dict[str, Any] = {"enableExternalIps": cloud.subnetwork is None}
        if cloud.network:
            network["network"] = cloud.network
        if cloud.subnetwork:
            network["subnetwork"] = cloud.subnetwork
        node: dict[str, Any] = {
            "acceleratorType": launch.tpu.type,
            "runtimeVersion": launch.tpu.runtime,
            "networkConfig": network,
            "labels": start_labels(self.recipe, job),
            "metadata": {"startup-script": self._script(job, id)},
            "serviceAccount": {
                **({"email": cloud.service_account} if cloud.service_account else {}),
                "scope": ["https://www.googleapis.com/auth/cloud-platform"],
            },
        }
        spec = {"parent": self._location, "nodeId": id, "node": node}
        return {
            "tpu": {"nodeSpec": [spec]},
            **({"spot": {}} if launch.machine.spot else {}),
            # How long the request may wait for capacity.
            "queueingPolicy": {"validUntilDuration": f"{round(launch.start_s)}s"},
        }

    def _limit_s(self, job: Job) -> int:
        return round(job.time_limit_s or self.recipe.cloud.max_run)

    def _script(self, job: Job, id: str) -> str:
        image = job.image or image_of(self.recipe.cloud, "train")
        registry = image.partition("/")[0]
        environment = {
            **job.environment,
            "GOOGLE_CLOUD_PROJECT": self.google.project,
            "PET_NNODES": "1",
            "PET_NODE_RANK": "0",
            "PET_NPROC_PER_NODE": str(job.processes),
            "PET_MASTER_PORT": str(self.recipe.launch.port),
        }
        address = f"{self.google.address(tpus.HOST)}/v2/{self._location}/queuedResources"
        return script_template("tpu.sh.jinja").render(
            **boot_note_fields(job),
            id=id,
            registry=registry if re.search(r"(\.pkg\.dev|gcr\.io)$", registry) else "",
            image=image,
            environment=environment,
            limit_s=self._limit_s(job),
            save_s=SAVE_S,
            gone_s=self._limit_s(job) + SAVE_S + SPARE_S,
            least_s=LEAST_S,
            resource=f"{address}/{id}",
            command=shlex.join(container_command(self.recipe, job)),
        )

    def status(self, handle: Handle) -> JobState:
        """See `Launcher`. The TPU VM is deleted as soon as the job is over."""
        resource_state = tpus.state(self.google, handle.about["zone"], handle.id)
        state = self._judge(handle, resource_state)
        if state not in ("queued", "running") and resource_state is not None:
            tpus.delete(self.google, handle.about["zone"], handle.id)
        return state

    def _judge(self, handle: Handle, resource_state: str | None) -> JobState:
        rendezvous = Rendezvous.of(handle)
        if rendezvous.notes(CANCELLED):
            return "cancelled"
        if exits := rendezvous.notes(EXIT):
            if taken_away(rendezvous, exits):
                return "preempted"
            return state_by_notes(rendezvous, 1)
        if resource_state in WAITING:
            return "queued"
        if resource_state == "ACTIVE":
            arrived = bool(rendezvous.notes(ARRIVED))
            if reason := self._overdue(handle, rendezvous, arrived=arrived):
                rendezvous.leave(0, EXIT, rank=0, code=EXIT_FAILED, how=reason)
                return "failed"
            return "running" if arrived else "queued"
        return "failed" if resource_state == "FAILED" else "preempted"

    def _overdue(self, handle: Handle, rendezvous: Rendezvous, *, arrived: bool) -> str | None:
        """Why a VM that is there is not waited for any longer, which the supervisor reports. Its
        time counts from when it was first seen, which a note keeps for the next process.
        """
        if not (made := rendezvous.notes(MADE)):
            rendezvous.leave(0, MADE)
            return None
        there_s = time.time() - float(made[0]["t_wall"])
        if not arrived and there_s > self.recipe.launch.start_s:
            return not_come_up(self.recipe, handle.id, 0, rendezvous.notes(BOOT).get(0))
        limit_s = float(handle.about["limit_s"])
        if there_s > limit_s + SAVE_S + 2 * SPARE_S:
            return (
                f"{handle.id} was still there {duration(there_s - limit_s)} after its"
                f" {duration(limit_s)}, at which it deletes itself; see its log"
            )
        return None

    def log(self, handle: Handle) -> JobLog:
        """See `Launcher`."""
        return TpuLog(Rendezvous.of(handle))

    def cancel(self, handle: Handle) -> None:
        """See `Launcher`."""
        Rendezvous.of(handle).leave(0, CANCELLED)
        tpus.delete(self.google, handle.about["zone"], handle.id)
