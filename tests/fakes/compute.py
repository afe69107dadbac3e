"""Compute Engine as a launcher meets it: machines that take time to come up, zones without room,
quotas, names that are taken, time limits that delete, Spot machines that are taken away. Its clock
is the wall clock and what `advance` adds.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from ingot.cloud.machines import ACCELERATORS, machine_type
from tests.fakes.google import Refused, Server
from tests.lazy import lazy

compute = lazy("google.cloud.compute_v1")

RUNNING = ("PROVISIONING", "STAGING", "RUNNING")
NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
LABEL_KEY, LABEL_VALUE = re.compile(r"[a-z][a-z0-9_-]{0,62}"), re.compile(r"[a-z0-9_-]{0,63}")


@dataclass
class Stored:
    """A machine: what was asked for, and how it stands."""

    wanted: Any
    zone: str
    id: int
    made: float
    state: str = "PROVISIONING"
    serial: str = ""

    @property
    def spot(self) -> bool:
        return bool(self.wanted.scheduling.provisioning_model == "SPOT")

    @property
    def metadata(self) -> dict[str, str]:
        return {item.key: item.value for item in self.wanted.metadata.items}

    @property
    def limit_s(self) -> float:
        return float(self.wanted.scheduling.max_run_duration.seconds) or float("inf")

    def shown(self) -> Any:
        shown = compute.Instance()
        shown._pb.MergeFrom(self.wanted._pb)
        shown.id, shown.status, shown.zone = (
            self.id,
            self.state,
            f"https://www.googleapis.com/compute/v1/projects/p/zones/{self.zone}",
        )
        return shown


@dataclass
class _Operation:
    message: Any
    polls: int
    finish: Callable[[], None]


@dataclass
class Compute:
    """`rooms`: how many machines more a zone has, where that is limited; `quota`: how many more a
    region's quota allows. `on_running` is called with a machine that has come up, `on_end` with one
    that is gone. `entries` are Cloud Logging's.
    """

    server: Server
    project: str = "p"
    zones: tuple[str, ...] = (
        "us-central1-a",
        "us-central1-b",
        "us-central1-c",
        "us-central1-f",
        "europe-west4-a",
    )
    machines: dict[tuple[str, str], Stored] = field(default_factory=dict)
    rooms: dict[str, int] = field(default_factory=dict)
    quota: int | None = None
    lacking: dict[str, set[str]] = field(default_factory=dict)
    polls: int = 1
    ahead_s: float = 0.0
    on_running: Callable[[Stored], None] = lambda machine: None
    on_end: Callable[[Stored], None] = lambda machine: None
    inserted: list[Stored] = field(default_factory=list)
    entries: list[dict[str, Any]] = field(default_factory=list)
    operations: dict[str, _Operation] = field(default_factory=dict)
    by_request: dict[str, Any] = field(default_factory=dict)

    def now(self) -> float:
        return time.time() + self.ahead_s

    def advance(self, seconds: float) -> None:
        """Time passes, and what is over by then is deleted, whoever looks."""
        with self.server.lock:
            self.ahead_s += seconds
            self._let_pass()

    def _let_pass(self) -> None:
        for machine in list(self.machines.values()):
            if self.now() - machine.made >= machine.limit_s:
                self._end(machine)

    def preempt(self, name: str) -> None:
        """A Spot machine is taken away."""
        with self.server.lock:
            machine = next(
                machine for machine in self.machines.values() if machine.wanted.name == name
            )
            assert machine.spot, f"{name} is no Spot machine"
            self._end(machine)

    def _end(self, machine: Stored) -> None:
        """As `instanceTerminationAction` says; without one a machine stops, and stays there."""
        if machine.wanted.scheduling.instance_termination_action == "DELETE":
            self._gone(machine)
        else:
            machine.state = "TERMINATED"

    def _gone(self, machine: Stored) -> None:
        if self.machines.pop((machine.zone, machine.wanted.name), None) is not None:
            machine.state = "TERMINATED"
            self.on_end(machine)

    def names(self) -> list[str]:
        """Of the machines that there are."""
        with self.server.lock:
            self._let_pass()
            return sorted(name for _, name in self.machines)

    def say(self, name: str, *lines: str) -> None:
        """A container on this machine says something, and Cloud Logging has it."""
        machine = next(machine for machine in self.inserted if machine.wanted.name == name)
        for line in lines:
            self.entries.append(
                {
                    "insertId": f"e{len(self.entries)}",
                    "timestamp": (
                        datetime.fromtimestamp(self.now(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
                    ),
                    "logName": f"projects/{self.project}/logs/cos_containers",
                    "jsonPayload": {"message": line},
                    "resource": {
                        "type": "gce_instance",
                        "labels": {"instance_id": str(machine.id), "zone": machine.zone},
                    },
                }
            )

    def insert(self, request: Any) -> Any:
        zone, wanted = request.zone, request.instance_resource
        self._check_place(request.project, zone)
        if request.request_id and request.request_id in self.by_request:
            return self.by_request[request.request_id]
        self._check(wanted, zone)
        if (zone, wanted.name) in self.machines:
            raise Refused(
                409,
                f"The resource 'projects/{self.project}/zones/{zone}/instances/{wanted.name}'"
                " already exists",
            )
        machine = Stored(wanted, zone, 10**15 + self.server.number(), self.now())
        self.machines[zone, wanted.name] = machine
        error = self._no_room(zone)

        def finish() -> None:
            if error is not None:
                self.machines.pop((zone, wanted.name), None)
            elif machine.state in RUNNING:
                machine.state = "RUNNING"
                self.inserted.append(machine)
                self.on_running(machine)

        operation = self._operation(zone, "insert", finish, error)
        if request.request_id:
            self.by_request[request.request_id] = operation
        return operation

    def _no_room(self, zone: str) -> tuple[int, str, str] | None:
        """An insert that is accepted and comes to nothing."""
        if self.quota is not None:
            self.quota -= 1
            if self.quota < 0:
                return (
                    403,
                    "QUOTA_EXCEEDED",
                    f"Quota 'CPUS' exceeded.  Limit: 24.0 in region {zone.rpartition('-')[0]}.",
                )
        if zone in self.rooms:
            self.rooms[zone] -= 1
            if self.rooms[zone] < 0:
                return (
                    503,
                    "ZONE_RESOURCE_POOL_EXHAUSTED",
                    (
                        f"The zone 'projects/{self.project}/zones/{zone}' does not have enough"
                        " resources available to fulfill the request.  Try a different zone, or try"
                        " again later."
                    ),
                )
        return None

    def _check_place(self, project: str, zone: str) -> None:
        if project != self.project:
            raise Refused(
                403, f"Required 'compute.instances.create' permission for 'projects/{project}'"
            )
        if zone not in self.zones:
            raise Refused(400, f"Invalid value for field 'zone': '{zone}'. Unknown zone.")

    def _check(self, wanted: Any, zone: str) -> None:
        """What Compute Engine refuses at once."""
        if not NAME.fullmatch(wanted.name):
            raise Refused(
                400,
                f"Invalid value for field 'resource.name': '{wanted.name}'. Must be a match of"
                f" regex '{NAME.pattern}'",
            )
        for key, value in wanted.labels.items():
            if not (LABEL_KEY.fullmatch(key) and LABEL_VALUE.fullmatch(value)):
                raise Refused(400, f"Invalid value for field 'resource.labels': '{key}: {value}'")
        kind = re.fullmatch(r"zones/([^/]+)/machineTypes/([^/]+)", wanted.machine_type)
        known = machine_type(kind[2]) if kind else None
        if (
            kind is None
            or kind[1] != zone
            or known is None
            or kind[2] in self.lacking.get(zone, ())
        ):
            named = kind[2] if kind else wanted.machine_type
            raise Refused(
                400,
                "Invalid value for field 'resource.machineType':"
                f" 'zones/{zone}/machineTypes/{named}'. Machine type with name '{named}' does not"
                f" exist in zone '{zone}'.",
            )
        for attached in wanted.guest_accelerators:
            name = attached.accelerator_type.rpartition("/")[2]
            if name not in ACCELERATORS or name in self.lacking.get(zone, ()):
                raise Refused(
                    404,
                    f"The resource 'projects/{self.project}/zones/{zone}/acceleratorTypes/{name}'"
                    " was not found",
                )
            if not attached.accelerator_count:
                raise Refused(
                    400,
                    "Invalid value for field 'resource.guestAccelerators[0].acceleratorCount':"
                    " '0'.",
                )
        self._check_scheduling(
            wanted, with_gpus=bool(wanted.guest_accelerators) or known.accelerator is not None
        )
        boots = [disk for disk in wanted.disks if disk.boot]
        if (
            len(boots) != 1
            or not boots[0].auto_delete
            or not boots[0].initialize_params.source_image
        ):
            raise Refused(
                400,
                "Invalid value for field 'resource.disks': one boot disk with an image is wanted,"
                " that goes with its machine",
            )
        if boots[0].initialize_params.disk_type.split("/")[1] != zone:
            raise Refused(
                400,
                "Invalid value for field 'resource.disks[0].initializeParams.diskType': another"
                " zone",
            )
        if not wanted.network_interfaces:
            raise Refused(400, "At least one network interface is required.")
        for interface in wanted.network_interfaces:
            if not interface.network and not interface.subnetwork:
                raise Refused(
                    400,
                    "Invalid value for field 'resource.networkInterfaces[0]': network or subnetwork"
                    " is required",
                )
        for account in wanted.service_accounts:
            if not account.email or not account.scopes:
                raise Refused(400, "Invalid value for field 'resource.serviceAccounts[0]'")

    def _check_scheduling(self, wanted: Any, *, with_gpus: bool) -> None:
        scheduling = wanted.scheduling
        spot = scheduling.provisioning_model == "SPOT"
        if scheduling.provisioning_model not in ("SPOT", "STANDARD"):
            raise Refused(
                400,
                "Invalid value for field 'resource.scheduling.provisioningModel':"
                f" '{scheduling.provisioning_model}'",
            )
        if (with_gpus or spot) and scheduling.on_host_maintenance != "TERMINATE":
            raise Refused(
                400,
                "Instances with guest accelerators and Spot instances do not support live"
                " migration.",
            )
        if spot and scheduling.automatic_restart:
            raise Refused(400, "Spot instances cannot have automaticRestart.")
        if spot and wanted.reservation_affinity.consume_reservation_type == "SPECIFIC_RESERVATION":
            raise Refused(400, "Spot instances cannot consume reservations.")
        seconds = scheduling.max_run_duration.seconds
        if seconds and not 30 <= seconds <= 120 * 86_400:
            raise Refused(
                400, f"Invalid value for field 'resource.scheduling.maxRunDuration': '{seconds}'"
            )
        if seconds and scheduling.instance_termination_action not in ("DELETE", "STOP"):
            raise Refused(400, "instanceTerminationAction must be set with maxRunDuration.")

    def _operation(
        self,
        zone: str,
        kind: str,
        finish: Callable[[], None],
        error: tuple[int, str, str] | None = None,
    ) -> Any:
        message = compute.Operation(
            name=f"operation-{self.server.number()}",
            operation_type=kind,
            status="RUNNING",
            zone=zone,
        )

        def end() -> None:
            finish()
            message.status = "DONE"
            if error is not None:
                message.http_error_status_code, message.error = (
                    error[0],
                    {"errors": [{"code": error[1], "message": error[2]}]},
                )

        self.operations[message.name] = _Operation(message, self.polls, end)
        return message

    def operation(self, request: Any) -> Any:
        found = self.operations.get(request.operation)
        if found is None or found.message.zone != request.zone:
            raise Refused(
                404,
                "The resource"
                f" 'projects/{self.project}/zones/{request.zone}/operations/{request.operation}'"
                " was not found",
            )
        found.polls -= 1
        if found.polls < 0 and found.message.status.name != "DONE":
            found.finish()
        return found.message

    def settle(self) -> None:
        """Operations that nobody asks about end all the same."""
        with self.server.lock:
            for operation in list(self.operations.values()):
                if operation.message.status.name != "DONE":
                    operation.finish()

    def _found(self, request: Any) -> Stored:
        self._let_pass()
        machine = self.machines.get((request.zone, request.instance))
        if machine is None:
            raise Refused(
                404,
                "The resource"
                f" 'projects/{self.project}/zones/{request.zone}/instances/{request.instance}' was"
                " not found",
            )
        return machine

    def delete(self, request: Any) -> Any:
        machine = self._found(request)
        machine.state = "STOPPING"
        return self._operation(request.zone, "delete", lambda: self._gone(machine))

    def list(self, request: Any) -> Any:
        self._let_pass()
        wanted = dict(re.findall(r'\(labels\.([a-z0-9_-]+) = "([^"]*)"\)', request.filter))
        left = re.sub(r'\(labels\.[a-z0-9_-]+ = "[^"]*"\)', "", request.filter).replace(" AND ", "")
        if request.project != self.project:
            raise Refused(
                403,
                f"Required 'compute.instances.list' permission for 'projects/{request.project}'",
            )
        if left or not wanted:
            raise Refused(400, f"Invalid list filter expression {request.filter!r}.")
        found = compute.InstanceAggregatedList()
        for zone in self.zones:
            here = [
                machine
                for (at, _), machine in self.machines.items()
                if at == zone and wanted.items() <= dict(machine.wanted.labels).items()
            ]
            found.items[f"zones/{zone}"] = compute.InstancesScopedList(
                instances=[machine.shown() for machine in here]
            )
        return found

    def serial_port(self, request: Any) -> Any:
        machine = self._found(request)
        return compute.SerialPortOutput(
            contents=machine.serial[request.start :], next_=len(machine.serial), start=request.start
        )

    def logged(
        self, match: re.Match[str], query: dict[str, str], body: dict[str, Any]
    ) -> dict[str, Any]:
        if (
            body["resourceNames"] != [f"projects/{self.project}"]
            or body.get("orderBy") != "timestamp asc"
        ):
            raise Refused(400, "resourceNames or orderBy")
        ids = set(re.findall(r'"(\d+)"', body["filter"]))
        since = re.search(r'timestamp>="([^"]+)"', body["filter"])
        log = re.search(r'logName="([^"]+)"', body["filter"])
        assert log
        found = [
            entry
            for entry in self.entries
            if entry["resource"]["labels"]["instance_id"] in ids
            and entry["logName"] == log[1]
            and (since is None or entry["timestamp"] >= since[1])
        ]
        first, size = int(body.get("pageToken", 0)), body["pageSize"]
        more = {"nextPageToken": str(first + size)} if len(found) > first + size else {}
        return {"entries": found[first : first + size], **more} if found else {}


def install(server: Server, **about: Any) -> Compute:
    state = Compute(server, **about)
    server.on("Instances.Insert", state.insert)
    server.on("Instances.Delete", state.delete)
    server.on("Instances.AggregatedList", state.list)
    server.on("Instances.GetSerialPortOutput", state.serial_port)
    server.on("ZoneOperations.Get", state.operation)
    server.on_path("post", "/v2/entries:list", state.logged)
    return state
