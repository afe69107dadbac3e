"""A project of Google Cloud as `ingot doctor --cloud` sees it: services, policy, repository,
secrets, subnetworks, machines, quotas, TensorBoard.

`install(server)` answers on a `tests.fakes.google.Server`. Everything that the recipe of the tests
needs is there at first; a test takes one thing away. A service that is off refuses every call of
its interface, as Google does.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ingot.base.remote.service import google_packages
from tests.fakes.google import Refused, Server
from tests.lazy import lazy

aiplatform_v1 = lazy("google.cloud.aiplatform_v1")
artifactregistry_v1 = lazy("google.cloud.artifactregistry_v1")
compute_v1 = lazy("google.cloud.compute_v1")
resourcemanager_v3 = lazy("google.cloud.resourcemanager_v3")
secretmanager_v1 = lazy("google.cloud.secretmanager_v1")
service_usage_v1 = lazy("google.cloud.service_usage_v1")
iam_policy_pb2 = lazy("google.iam.v1.iam_policy_pb2")
policy_pb2 = lazy("google.iam.v1.policy_pb2")

NUMBER = "123456789"
ACCOUNT = "jobs@proj.iam.gserviceaccount.com"
INTERFACES = {
    "Projects.GetProject": "cloudresourcemanager",
    "Projects.GetIamPolicy": "cloudresourcemanager",
    "Projects.TestIamPermissions": "cloudresourcemanager",
    "ServiceUsage.BatchGetServices": "serviceusage",
    "ArtifactRegistry.GetRepository": "artifactregistry",
    "ArtifactRegistry.GetTag": "artifactregistry",
    "SecretManagerService.AccessSecretVersion": "secretmanager",
    "Subnetworks.Get": "compute",
    "MachineTypes.Get": "compute",
    "MachineTypes.List": "compute",
    "AcceleratorTypes.Get": "compute",
    "AcceleratorTypes.List": "compute",
    "Regions.Get": "compute",
    "Projects.Get": "compute",
    "TensorboardService.GetTensorboard": "aiplatform",
}
ON = (
    "cloudbuild",
    "artifactregistry",
    "bigquery",
    "storage",
    "secretmanager",
    "compute",
    "dataproc",
    "aiplatform",
    "iam",
    "cloudresourcemanager",
    "logging",
    "serviceusage",
)
ROLES = (
    "roles/bigquery.jobUser",
    "roles/dataproc.worker",
    "roles/aiplatform.user",
    "roles/secretmanager.secretAccessor",
    "roles/artifactregistry.writer",
    "roles/logging.logWriter",
    "roles/storage.objectUser",
    "roles/compute.instanceAdmin.v1",
    "roles/tpu.admin",
)
MACHINES = {
    "n1-standard-8": (8, ()),
    "n1-standard-16": (16, ()),
    "a2-highgpu-8g": (96, (("nvidia-tesla-a100", 8),)),
    "e2-standard-4": (4, ()),
}


@dataclass
class State:
    """What there is. `lacking`: permissions that the caller has not. `quotas` and `worldwide`:
    limit and usage by metric.
    """

    server: Server
    project: str = "proj"
    region: str = "us-central1"
    on: set[str] = field(default_factory=lambda: set(ON))
    roles: dict[str, list[str]] = field(
        default_factory=lambda: {role: [f"serviceAccount:{ACCOUNT}"] for role in ROLES}
    )
    conditions: dict[str, str] = field(default_factory=dict)
    lacking: set[str] = field(default_factory=set)
    repositories: dict[str, str] = field(default_factory=lambda: {"ingot": "DOCKER"})
    images: set[str] = field(default_factory=lambda: {"ingot-train", "ingot-spark", "ingot-serve"})
    secrets: dict[str, list[bytes]] = field(
        default_factory=lambda: {"hf-token": [b"old", b"hunter2\n"]}
    )
    subnetworks: dict[str, bool] = field(default_factory=lambda: {"sub": True})
    tensorboards: dict[str, str] = field(default_factory=lambda: {"4242": "metrics"})
    machines: dict[str, set[str]] = field(
        default_factory=lambda: {"us-central1-a": set(MACHINES), "us-central1-b": {"n1-standard-8"}}
    )
    accelerators: dict[str, set[str]] = field(
        default_factory=lambda: {
            "us-central1-a": {"nvidia-tesla-t4", "nvidia-tesla-v100"},
            "us-central1-b": {"nvidia-tesla-p100"},
        }
    )
    quotas: dict[str, tuple[float, float]] = field(
        default_factory=lambda: {
            "CPUS": (100, 10),
            "A2_CPUS": (192, 0),
            "NVIDIA_T4_GPUS": (8, 0),
            "NVIDIA_A100_GPUS": (16, 0),
            "PREEMPTIBLE_NVIDIA_T4_GPUS": (4, 0),
            "PREEMPTIBLE_CPUS": (0, 0),
        }
    )
    worldwide: dict[str, tuple[float, float]] = field(
        default_factory=lambda: {"GPUS_ALL_REGIONS": (16, 0)}
    )

    @property
    def parent(self) -> str:
        return f"projects/{self.project}/locations/{self.region}"

    def get_project(self, request: Any) -> Any:
        self._ours(request.name)
        return resourcemanager_v3.Project(
            name=f"projects/{NUMBER}", project_id=self.project, state="ACTIVE"
        )

    def get_policy(self, request: Any) -> Any:
        self._ours(request.resource)
        bindings = []
        for role, members in self.roles.items():
            binding = policy_pb2.Binding(role=role, members=members)
            binding.condition.expression = self.conditions.get(role, "")
            bindings.append(binding)
        return policy_pb2.Policy(version=1, bindings=bindings)

    def test(self, request: Any) -> Any:
        self._ours(request.resource)
        if not request.permissions:
            raise Refused(400, "permissions must be given")
        return iam_policy_pb2.TestIamPermissionsResponse(
            permissions=[name for name in request.permissions if name not in self.lacking]
        )

    def services(self, request: Any) -> Any:
        self._ours(request.parent)
        if not 0 < len(request.names) <= 30:
            raise Refused(400, "between 1 and 30 names")
        found = []
        for name in request.names:
            service = re.fullmatch(
                rf"projects/{self.project}/services/([a-z]+)\.googleapis\.com", name
            )
            if service is None:
                raise Refused(400, f"invalid name {name}")
            found.append(
                service_usage_v1.Service(
                    name=f"projects/{NUMBER}/services/{service[1]}.googleapis.com",
                    state="ENABLED" if service[1] in self.on else "DISABLED",
                )
            )
        return service_usage_v1.BatchGetServicesResponse(services=found)

    def repository(self, request: Any) -> Any:
        name = self._below(request.name, "repositories", self.repositories)
        return artifactregistry_v1.Repository(name=request.name, format_=self.repositories[name])

    def tag(self, request: Any) -> Any:
        found = re.fullmatch(
            rf"{self.parent}/repositories/([^/]+)/packages/([^/]+)/tags/latest", request.name
        )
        if found is None or found[1] not in self.repositories or found[2] not in self.images:
            raise Refused(404, f"Requested entity {request.name} was not found.")
        return artifactregistry_v1.Tag(name=request.name)

    def secret(self, request: Any) -> Any:
        found = re.fullmatch(
            rf"projects/{self.project}/secrets/([\w-]+)/versions/(latest|\d+)", request.name
        )
        if found is None or found[1] not in self.secrets:
            raise Refused(404, f"Secret [{request.name}] not found or has no versions.")
        versions = self.secrets[found[1]]
        number = len(versions) if found[2] == "latest" else int(found[2])
        if not 1 <= number <= len(versions):
            raise Refused(404, f"Secret Version [{request.name}] not found.")
        data = versions[number - 1]
        checksum = int.from_bytes(google_packages().Checksum(data).digest(), "big")
        payload = secretmanager_v1.SecretPayload(data=data, data_crc32c=checksum)
        return secretmanager_v1.AccessSecretVersionResponse(name=request.name, payload=payload)

    def subnetwork(self, request: Any) -> Any:
        self._place(request, request.region, self.region)
        if request.subnetwork not in self.subnetworks:
            raise Refused(404, f"The resource 'subnetworks/{request.subnetwork}' was not found")
        return compute_v1.Subnetwork(
            name=request.subnetwork, private_ip_google_access=self.subnetworks[request.subnetwork]
        )

    def machine(self, request: Any) -> Any:
        self._zone(request, self.machines)
        if request.machine_type not in self.machines[request.zone]:
            raise Refused(404, f"The resource 'machineTypes/{request.machine_type}' was not found")
        return _machine(request.machine_type)

    def machine_list(self, request: Any) -> Any:
        self._zone(request, self.machines)
        return compute_v1.MachineTypeList(
            items=[_machine(name) for name in sorted(self.machines[request.zone])]
        )

    def accelerator(self, request: Any) -> Any:
        self._zone(request, self.accelerators)
        if request.accelerator_type not in self.accelerators[request.zone]:
            raise Refused(
                404, f"The resource 'acceleratorTypes/{request.accelerator_type}' was not found"
            )
        return compute_v1.AcceleratorType(name=request.accelerator_type)

    def accelerator_list(self, request: Any) -> Any:
        self._zone(request, self.accelerators)
        return compute_v1.AcceleratorTypeList(
            items=[
                compute_v1.AcceleratorType(name=name)
                for name in sorted(self.accelerators[request.zone])
            ]
        )

    def region_of(self, request: Any) -> Any:
        self._place(request, request.region, self.region)
        return compute_v1.Region(name=self.region, quotas=_quotas(self.quotas))

    def compute_project(self, request: Any) -> Any:
        self._place(request)
        return compute_v1.Project(name=self.project, quotas=_quotas(self.worldwide))

    def tensorboard(self, request: Any) -> Any:
        name = self._below(request.name, "tensorboards", self.tensorboards)
        return aiplatform_v1.Tensorboard(name=request.name, display_name=self.tensorboards[name])

    def _ours(self, name: str) -> None:
        if name != f"projects/{self.project}":
            raise Refused(403, f"The caller does not have permission, or {name} may not exist")

    def _place(self, request: Any, region: str = "", wanted: str = "") -> None:
        if request.project != self.project or region != wanted:
            raise Refused(
                404, f"The resource 'projects/{request.project}/regions/{region}' was not found"
            )

    def _zone(self, request: Any, there: dict[str, Any]) -> None:
        if request.project != self.project or request.zone not in there:
            raise Refused(
                404, f"The resource 'projects/{request.project}/zones/{request.zone}' was not found"
            )

    def _below(self, name: str, kind: str, there: dict[str, str]) -> str:
        short = name.rpartition("/")[2]
        if name != f"{self.parent}/{kind}/{short}" or short not in there:
            raise Refused(404, f"Requested entity {name} was not found.")
        return short

    def guarded(self, interface: str, handler: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def handle(request: Any) -> Any:
            if interface not in self.on:
                raise Refused(
                    403,
                    f"The {interface} API has not been used in project {NUMBER} before or it is"
                    " disabled. Enable it, then retry.",
                )
            return handler(request)

        return handle


def _machine(name: str) -> compute_v1.MachineType:
    cpus, accelerators = MACHINES[name]
    brought = [
        compute_v1.Accelerators(guest_accelerator_type=kind, guest_accelerator_count=count)
        for kind, count in accelerators
    ]
    return compute_v1.MachineType(name=name, guest_cpus=cpus, accelerators=brought)


def _quotas(values: dict[str, tuple[float, float]]) -> list[compute_v1.Quota]:
    return [
        compute_v1.Quota(metric=metric, limit=limit, usage=usage)
        for metric, (limit, usage) in values.items()
    ]


def install(server: Server) -> State:
    state = State(server)
    handlers = {
        "Projects.GetProject": state.get_project,
        "Projects.GetIamPolicy": state.get_policy,
        "Projects.TestIamPermissions": state.test,
        "ServiceUsage.BatchGetServices": state.services,
        "ArtifactRegistry.GetRepository": state.repository,
        "ArtifactRegistry.GetTag": state.tag,
        "SecretManagerService.AccessSecretVersion": state.secret,
        "Subnetworks.Get": state.subnetwork,
        "MachineTypes.Get": state.machine,
        "MachineTypes.List": state.machine_list,
        "AcceleratorTypes.Get": state.accelerator,
        "AcceleratorTypes.List": state.accelerator_list,
        "Regions.Get": state.region_of,
        "Projects.Get": state.compute_project,
        "TensorboardService.GetTensorboard": state.tensorboard,
    }
    for method, handler in handlers.items():
        server.on(method, state.guarded(INTERFACES[method], handler))
    return state
