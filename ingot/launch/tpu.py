"""A TPU VM asked for as a queued resource. Rendered and sent as Google documents it; nothing of it
could be tried on a TPU.

The place keeps no time limit of it: its own start-up script does, and deletes it at the end; so
does every look at the job.
"""

from __future__ import annotations

import json
import re
import shlex
import time
from typing import Any

from ingot.base.errors import WrongInput
from ingot.base.markers import fingerprint
from ingot.base.progress import say
from ingot.cloud import tpus
from ingot.cloud.clients import Google
from ingot.cloud.images import image_of
from ingot.cloud.instances import label, name_of
from ingot.cloud.prices import chips, time_limit_s
from ingot.config.recipe import Recipe
from ingot.launch.attempt import WELL
from ingot.launch.gce_cluster import BOOT, node_command, notes_of, template
from ingot.launch.handles import find, store
from ingot.launch.job import Handle, Job, Log, State
from ingot.launch.meeting import EXIT, HERE, Meeting

KIND = "tpu"
CANCELLED = "cancelled"
MOST_CHIPS, OF_EIGHT = 4, ("v5litepod-", "v6e-")
"""Of one TPU VM, and the generations in which it may have eight: a larger slice has several hosts.
"""
WAITING = ("ACCEPTED", "CREATING", "PROVISIONING", "WAITING_FOR_RESOURCES", "STATE_UNSPECIFIED")


class TpuLauncher:
    """One job, one TPU VM of one host."""

    look_s = 15.0

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.google = recipe, Google(recipe.cloud)

    @property
    def _zone(self) -> str:
        return self.recipe.cloud.zone or f"{self.recipe.cloud.region}-a"

    def can(self, job: Job) -> list[str]:
        kind, reasons = self.recipe.launch.tpu.type, []
        most = 8 if kind.startswith(OF_EIGHT) else MOST_CHIPS
        if (count := chips(kind)) is None:
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
        if job.image is None and self.recipe.cloud.images.train is None:
            reasons.append(
                "a TPU needs an image with torch_tpu, which the project's own has not; build one"
                " and set launch.image"
            )
        if job.secrets:
            reasons.append(
                f"launch.secrets {job.secrets[0]} cannot be given to a machine without writing it"
                " down; put it into Secret Manager and name it in cloud.secrets:"
                f" {{{job.secrets[0]}: secret:NAME}}"
            )
        if job.mirror is None or not (job.meet or "").startswith("gs://"):
            reasons.append("a TPU VM shares no disk and needs a bucket; set cloud.bucket")
        try:
            _ = self.google.project, time_limit_s(self.recipe, nodes=1)
        except WrongInput as error:
            reasons.append(str(error))
        return reasons

    def render(self, job: Job) -> str:
        wanted = self._wanted(job)
        script = wanted["tpu"]["nodeSpec"][0]["node"]["metadata"].pop("startup-script")
        path = f"projects/{self.google.project}/locations/{self._zone}/queuedResources?queuedResourceId={self._id(job)}"
        return (
            "# Not tried on a TPU: none could be had. The image needs torch_tpu.\n# POST"
            f" {self.google.address(tpus.HOST)}/v2/{path}\n{json.dumps(wanted, indent=2, sort_keys=True)}\n#"
            f" startup-script\n{script}"
        )

    def submit(self, job: Job) -> Handle:
        if reasons := self.can(job):
            raise WrongInput(f"{job.name} cannot run with launch.kind {KIND}: {'; '.join(reasons)}")
        root = self.recipe.folder.root
        known = find(root, job.name, KIND)
        if known is not None and known.id != self._id(job):
            if self.status(known) in ("queued", "running"):
                return known
            tpus.delete(self.google, known.about["zone"], known.id)
        say(
            "warning: nothing of launch.kind tpu could be tried on a TPU; the image needs torch_tpu"
        )
        about = {"zone": self._zone, "meet": job.meet or ""}
        handle = store(
            root,
            Handle(job.name, KIND, self._id(job), job.argv, time.time(), "", about),
            self.recipe,
        )
        try:
            tpus.create(self.google, self._zone, handle.id, self._wanted(job))
        except BaseException:
            tpus.delete(self.google, self._zone, handle.id)
            raise
        return handle

    def _id(self, job: Job) -> str:
        return name_of(
            f"ingot-{self.recipe.name}-{job.name}-{fingerprint(job.mirror)[:6]}-{(job.meet or '').rpartition('-')[2]}"
        )

    def _wanted(self, job: Job) -> dict[str, Any]:
        """The queued resource as it is asked for."""
        cloud, launch, project = self.recipe.cloud, self.recipe.launch, self.google.project
        labels = {
            **{label(key): label(value) for key, value in cloud.labels.items()},
            "ingot-run": label(self.recipe.name),
            "ingot-verb": label(job.name),
        }
        network = {"enableExternalIps": cloud.subnetwork is None}
        if cloud.network:
            network["network"] = cloud.network  # type: ignore[assignment]
        if cloud.subnetwork:
            network["subnetwork"] = cloud.subnetwork  # type: ignore[assignment]
        node: dict[str, Any] = {
            "acceleratorType": launch.tpu.type,
            "runtimeVersion": launch.tpu.runtime,
            "networkConfig": network,
            "labels": labels,
            "metadata": {"startup-script": self._script(job)},
            "serviceAccount": {
                **({"email": cloud.service_account} if cloud.service_account else {}),
                "scope": ["https://www.googleapis.com/auth/cloud-platform"],
            },
        }
        wanted: dict[str, Any] = {
            "tpu": {
                "nodeSpec": [
                    {
                        "parent": f"projects/{project}/locations/{self._zone}",
                        "nodeId": self._id(job),
                        "node": node,
                    }
                ]
            }
        }
        if launch.machine.spot:
            wanted["spot"] = {}
        # How long it may wait for capacity.
        wanted["queueingPolicy"] = {"validUntilDuration": f"{round(launch.start_s)}s"}
        return wanted

    def _script(self, job: Job) -> str:
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
        return template("tpu.sh.jinja").render(
            **notes_of(job),
            id=self._id(job),
            registry=registry if re.search(r"(\.pkg\.dev|gcr\.io)$", registry) else "",
            image=image,
            environment=environment,
            limit_s=round(job.time_limit_s or self.recipe.cloud.max_run),
            resource=f"{self.google.address(tpus.HOST)}/v2/projects/{self.google.project}/locations/{self._zone}/queuedResources/{self._id(job)}",
            command=shlex.join(node_command(self.recipe, job)),
        )

    def status(self, handle: Handle) -> State:
        """The TPU is deleted as soon as the job is over."""
        state = tpus.state(self.google, handle.about["zone"], handle.id)
        told = self._judge(handle, state)
        if told not in ("queued", "running") and state is not None:
            tpus.delete(self.google, handle.about["zone"], handle.id)
        return told

    def _judge(self, handle: Handle, state: str | None) -> State:
        meeting = Meeting(handle.about["meet"])
        if meeting.notes(CANCELLED):
            return "cancelled"
        if ends := meeting.notes(EXIT):
            return (
                "succeeded"
                if all(int(note["code"]) in WELL for note in ends.values())
                else "failed"
            )
        if state in WAITING:
            return "queued"
        if state == "ACTIVE":
            return "running" if meeting.notes(HERE) else "queued"
        return "failed" if state == "FAILED" else "preempted"

    def log(self, handle: Handle) -> Log:
        return _Notes(Meeting(handle.about["meet"]))

    def signal(self, handle: Handle, number: int) -> None:
        Meeting(handle.about["meet"]).send(number)

    def cancel(self, handle: Handle) -> None:
        Meeting(handle.about["meet"]).leave(0, CANCELLED)
        tpus.delete(self.google, handle.about["zone"], handle.id)


class _Notes:
    """How far the TPU VM has come, and how it ended: the rest of its log stays on it, and in
    `RUN/logs` of the replica what ranks write there.
    """

    def __init__(self, meeting: Meeting) -> None:
        self._meeting, self._told = meeting, set[str]()

    def read(self) -> bytes:
        said = [str(note["phase"]) for note in self._meeting.notes(BOOT).values()]
        said += [
            str(note.get("how") or f"ended with exit code {note['code']}")
            for note in self._meeting.notes(EXIT).values()
        ]
        new = [text for text in said if text not in self._told]
        self._told.update(new)
        return "".join(f"ingot: {text}\n" for text in new).encode()
