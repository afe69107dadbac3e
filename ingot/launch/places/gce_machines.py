"""The machines of one job on Compute Engine as they are requested: names, labels, requests and
start-up script. Nothing is sent from here.

Container-Optimized OS rather than a Deep Learning VM: all software is in the image anyway, this
system is Docker and nothing else, starts in seconds, is the same with and without GPUs, installs
the driver that fits its kernel and the GPU (`cos-extensions`), signs in to Artifact Registry with
the machine's account, and sends the containers' output to Cloud Logging (metadata
`google-logging-enabled`).

Machines have an external address only in the project's default network, where nothing else leads to
Artifact Registry and the bucket. With `cloud.subnetwork` they have none: Private Google Access must
be on there, and Cloud NAT where Hugging Face is to be reached.

Several nodes talk over TCP on `launch.port` and on ports that the system chooses. The system's own
firewall, which lets in SSH alone, is opened by the start-up script; the network's rules stand in
front of it, and one of them must let machines with the tag `ingot` talk to each other. The default
network's do.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ingot.base.markers import fingerprint
from ingot.cloud.clients import GoogleClients, message_types
from ingot.cloud.images import image_of
from ingot.cloud.instances import MODULE, resource_name
from ingot.cloud.machines import accelerators_of, zones_of
from ingot.config.recipe import Recipe
from ingot.launch.job import Job
from ingot.launch.places.node_commands import (
    NODE,
    START,
    boot_note_fields,
    container_command,
    script_template,
    start_labels,
)

SYSTEM = "projects/cos-cloud/global/images/family/cos-stable"
SPARE_S, LEAST_S = 60, 60
"""Seconds of a machine's time lost before its script starts and during deletion; and the shortest
remaining time for which a container is still started.
"""
_NEW_DISKS = ("a3-ultragpu-8g", "a4-highgpu-8g")


@dataclass(frozen=True)
class ComputeCluster:
    """The machines of one start of a job. `start` distinguishes it from a start of the same number
    made by another computer.
    """

    recipe: Recipe
    job: Job
    start: str = "drawn-by-submit"

    @property
    def id(self) -> str:
        """The prefix of its machines' names, unique even if two people have runs of the same name
        in one project.
        """
        replica = fingerprint(self.job.run_folder_url)[:6]
        run = f"ingot-{self.recipe.name}-{self.job.name}-{replica}"
        return resource_name(f"{run}-{self.job.start_number}", room=5)

    def name(self, node: int) -> str:
        return f"{self.id}-{node}"

    @property
    def zones(self) -> list[str]:
        """The zones to try, in order."""
        of_reservation = re.search(r"/zones/([^/]+)/", self.recipe.launch.machine.reservation or "")
        return [of_reservation[1]] if of_reservation else zones_of(self.recipe.cloud)

    @cached_property
    def google(self) -> GoogleClients:
        return GoogleClients(self.recipe.cloud)

    @property
    def limit_s(self) -> int:
        """Seconds after which Compute Engine itself deletes a machine."""
        return int(self.job.time_limit_s or self.recipe.cloud.max_run)

    @property
    def leave_s(self) -> int:
        """Seconds from the start of its script after which the ranks are asked to save and stop."""
        return self.limit_s - round(self.recipe.checkpoint.grace_s) - SPARE_S

    @property
    def image(self) -> str:
        return self.job.image or image_of(self.recipe.cloud, "train")

    def labels(self, node: int) -> dict[str, str]:
        return {**start_labels(self.recipe, self.job), NODE: str(node), START: self.start}

    def machine(self, node: int, zone: str) -> Any:
        """The request for one machine, a message `Instance`."""
        compute = message_types(MODULE)
        machine = self.recipe.launch.machine
        cloud = self.recipe.cloud
        accelerator, count = accelerators_of(machine)
        attached = accelerator is not None and machine.type.startswith(("n1-", "custom-"))
        metadata = {
            "startup-script": self.script(zone),
            "google-logging-enabled": "true",
            "block-project-ssh-keys": "true",
            NODE: str(node),
        }
        return compute.Instance(
            name=self.name(node),
            labels=self.labels(node),
            tags=compute.Tags(items=["ingot"]),
            machine_type=f"zones/{zone}/machineTypes/{machine.type}",
            guest_accelerators=(
                [
                    compute.AcceleratorConfig(
                        accelerator_type=f"projects/{self.google.project}/zones/{zone}/acceleratorTypes/{accelerator}",
                        accelerator_count=count,
                    )
                ]
                if attached
                else []
            ),
            disks=[self._disk(compute, node, zone)],
            network_interfaces=[self._network(compute)],
            service_accounts=[
                compute.ServiceAccount(
                    email=cloud.service_account or "default",
                    scopes=["https://www.googleapis.com/auth/cloud-platform"],
                )
            ],
            scheduling=self._scheduling(compute, with_gpus=accelerator is not None),
            reservation_affinity=(
                compute.ReservationAffinity(
                    consume_reservation_type="SPECIFIC_RESERVATION",
                    key="compute.googleapis.com/reservation-name",
                    values=[re.sub("/zones/[^/]+", "", machine.reservation)],
                )
                if machine.reservation
                else None
            ),
            metadata=compute.Metadata(
                items=[compute.Items(key=key, value=value) for key, value in metadata.items()]
            ),
        )

    def _disk(self, compute: Any, node: int, zone: str) -> Any:
        machine = self.recipe.launch.machine
        kind = (
            "hyperdisk-balanced"
            if machine.type in _NEW_DISKS or machine.type.startswith("g4-")
            else "pd-balanced"
        )
        return compute.AttachedDisk(
            boot=True,
            auto_delete=True,
            initialize_params=compute.AttachedDiskInitializeParams(
                source_image=SYSTEM,
                disk_size_gb=machine.disk_gb,
                disk_type=f"zones/{zone}/diskTypes/{kind}",
                labels=self.labels(node),
            ),
        )

    def _scheduling(self, compute: Any, *, with_gpus: bool) -> Any:
        """No automatic restart, since the supervisor restarts. The machine is deleted when its time
        is over, even if this process has died.
        """
        spot = self.recipe.launch.machine.spot
        return compute.Scheduling(
            automatic_restart=False,
            on_host_maintenance="TERMINATE" if with_gpus or spot else "MIGRATE",
            provisioning_model="SPOT" if spot else "STANDARD",
            instance_termination_action="DELETE",
            max_run_duration=compute.Duration(seconds=self.limit_s),
        )

    def _network(self, compute: Any) -> Any:
        cloud, project = self.recipe.cloud, self.google.project
        interface = compute.NetworkInterface(nic_type="GVNIC")
        network = cloud.network or ("" if cloud.subnetwork else "default")
        subnetwork = cloud.subnetwork or ""
        if network:
            interface.network = (
                network if "/" in network else f"projects/{project}/global/networks/{network}"
            )
        if subnetwork:
            interface.subnetwork = (
                subnetwork
                if "/" in subnetwork
                else f"projects/{project}/regions/{cloud.region}/subnetworks/{subnetwork}"
            )
        else:
            interface.access_configs = [
                compute.AccessConfig(name="External NAT", type_="ONE_TO_ONE_NAT")
            ]
        return interface

    def address(self, zone: str) -> str:
        """The zonal DNS name of node 0."""
        domain, _, project = self.google.project.rpartition(":")
        return f"{self.name(0)}.{zone}.c.{project}{f'.{domain}' if domain else ''}.internal"

    def script(self, zone: str) -> str:
        """The start-up script, the same for all nodes. It contains no secret."""
        job, project = self.job, self.google.project
        registry = self.image.partition("/")[0]
        environment = {
            **job.environment,
            "GOOGLE_CLOUD_PROJECT": project,
            "PET_NNODES": str(job.nodes),
            "PET_NPROC_PER_NODE": str(job.processes),
            "PET_MASTER_ADDR": self.address(zone),
            "PET_MASTER_PORT": str(self.recipe.launch.port),
        }
        return script_template("gce.sh.jinja").render(
            **boot_note_fields(job),
            cluster=self.id,
            nodes=job.nodes,
            project=project,
            zone=zone,
            compute=self.google.address("compute.googleapis.com"),
            gpus=accelerators_of(self.recipe.launch.machine)[1],
            image=self.image,
            registry=registry if registry.endswith((".pkg.dev", "gcr.io")) else "",
            leave_s=self.leave_s,
            least_s=LEAST_S,
            environment=environment,
            command=shlex.join(container_command(self.recipe, job)),
        )
