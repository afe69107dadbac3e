"""Virtual machines of Compute Engine: creating, finding by labels, deleting, and reading their
serial ports. The launcher decides which machines.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ingot.base.errors import Failed, IngotError, WrongInput
from ingot.base.markers import fingerprint
from ingot.cloud.clients import (
    NOT_FOUND,
    GoogleClients,
    call_api,
    call_or_none,
    google_errors,
    google_packages,
    http_status_of,
    list_all,
    message_types,
)
from ingot.config.sections.deployment import Cloud

MODULE = "google.cloud.compute_v1"
POLL_S, LIMIT_S = 2.0, 600.0
"""Seconds between two polls of an operation, and the timeout."""
MOST_CHARACTERS = 63
GONE = (
    "STOPPING",
    "STOPPED",
    "TERMINATED",
    "PENDING_STOP",
    "DEPROVISIONING",
    "SUSPENDING",
    "SUSPENDED",
)
"""The states of a machine in which nothing runs any more, or soon will not."""
_NO_ROOM = re.compile(
    r"QUOTA_EXCEEDED|RESOURCE_POOL_EXHAUSTED|STOCKOUT|quota|does not have enough resources",
    re.IGNORECASE,
)
_NO_SUCH = re.compile(
    r"(?:machineTypes|acceleratorTypes|diskTypes|zones)/\S*(?: was not found|'?\. The referenced"
    r" resource does not exist)"
    r"|does not exist in zone|Unknown zone|UNSUPPORTED_OPERATION|locations/\S* \(or it may not"
    r" exist\)",
    re.IGNORECASE,
)


class NoCapacity(Failed):
    """A zone has no capacity for such machines now, or a quota is used up: another zone or a later
    attempt may succeed.
    """


class NoSuchMachine(NoCapacity):
    """A zone never has machines of this kind, or there is no such zone."""


@dataclass(frozen=True)
class Instance:
    """An existing machine. `id` is Compute Engine's own number."""

    name: str
    zone: str
    state: str
    labels: Mapping[str, str]
    id: str

    @property
    def is_stopped(self) -> bool:
        return self.state in GONE


def resource_name(text: str, *, room: int = 0) -> str:
    """`text` as a valid resource name, leaving space for `room` more characters; if that changes
    the text, the name ends in a hash of it.
    """
    plain, most = re.sub(r"[^a-z0-9-]", "-", text.lower()), MOST_CHARACTERS - room
    return (
        plain
        if plain == text and len(plain) <= most
        else f"{plain[: most - 9].rstrip('-')}-{fingerprint(text)[:8]}"
    )


def label(text: str) -> str:
    """`text` as a valid label value (or key); if that changes the text, it ends in a hash of it."""
    plain = re.sub(r"[^a-z0-9_-]", "-", text.lower())
    return (
        plain
        if plain == text and len(plain) <= MOST_CHARACTERS
        else f"{plain[: MOST_CHARACTERS - 9]}-{fingerprint(text)[:8]}"
    )


def user_labels(cloud: Cloud) -> dict[str, str]:
    """`cloud.labels` as valid labels."""
    return {label(key): label(value) for key, value in cloud.labels.items()}


def insert(google: GoogleClients, zone: str, machines: Sequence[Any]) -> None:
    """Create these machines (messages `Instance`) in a zone, and wait until each exists. If one is
    refused, those already created stay.

    Each request has an id, so that repeating it after a lost answer creates no second machine.

    Raises:
        NoCapacity: the zone has not enough capacity now, or a quota is used up.
        NoSuchMachine: the zone never has such machines, or there is no such zone.
        WrongInput, Failed: a machine cannot be created, or not now.
    """
    client, compute = google.client("instances"), message_types(MODULE)
    refusals: list[IngotError] = []
    asked: list[tuple[str, str]] = []
    for machine in machines:
        what = f"make the machine {machine.name} in {zone}"
        request = compute.InsertInstanceRequest(
            project=google.project,
            zone=zone,
            instance_resource=machine,
            request_id=str(uuid.uuid4()),
        )
        try:
            asked.append(
                (
                    call_api(
                        client.insert_unary,
                        what,
                        request=request,
                        denied="ask for the role Compute Instance Admin (v1)",
                    ).name,
                    what,
                )
            )
        except (WrongInput, Failed) as error:
            refusals.append(error)
            break
    for operation, what in asked:
        try:
            wait_for_zone_operation(google, zone, operation, what)
        except (WrongInput, Failed) as error:
            refusals.append(error)
    if refusals:
        raise _most_informative(refusals)


def _most_informative(refusals: Sequence[IngotError]) -> IngotError:
    """The most informative of several errors: a fault of the request before a lack of capacity."""
    for error in refusals:
        if not _NO_ROOM.search(str(error)) and not _NO_SUCH.search(str(error)):
            return error
    return next(
        (NoSuchMachine(str(error)) for error in refusals if _NO_SUCH.search(str(error))),
        NoCapacity(str(refusals[0])),
    )


def labelled(google: GoogleClients, labels: Mapping[str, str]) -> list[Instance]:
    """All machines of the project with these labels, in any zone, sorted by name."""
    wanted = " AND ".join(f'(labels.{key} = "{value}")' for key, value in labels.items())
    request = message_types(MODULE).AggregatedListInstancesRequest(
        project=google.project, filter=wanted
    )
    zones = list_all(
        google.client("instances").aggregated_list,
        f"list the machines of the project {google.project}",
        request=request,
    )
    found = [
        Instance(one.name, zone.rpartition("/")[2], one.status, dict(one.labels), str(one.id))
        for zone, scoped in zones
        for one in scoped.instances
    ]
    return sorted(found, key=lambda one: one.name)


def delete(google: GoogleClients, machines: Collection[Instance]) -> None:
    """Delete these machines and wait until they are gone; one that is already gone is no error.

    Raises:
        WrongInput, Failed: one could not be deleted; the others are deleted as far as possible.
    """
    client, compute = google.client("instances"), message_types(MODULE)
    asked, errors = [], []
    for machine in machines:
        what = f"delete the machine {machine.name} in {machine.zone}"
        request = compute.DeleteInstanceRequest(
            project=google.project,
            zone=machine.zone,
            instance=machine.name,
            request_id=str(uuid.uuid4()),
        )
        try:
            asked.append(
                (machine.zone, call_api(client.delete_unary, what, request=request).name, what)
            )
        except (WrongInput, Failed) as error:
            errors += [] if http_status_of(error) == NOT_FOUND else [error]
    for zone, operation, what in asked:
        try:
            wait_for_zone_operation(google, zone, operation, what)
        except (WrongInput, Failed) as error:
            errors += [] if http_status_of(error) == NOT_FOUND else [error]
    if errors:
        raise errors[0]


def wait_for_zone_operation(google: GoogleClients, zone: str, operation: str, what: str) -> None:
    """Wait until an operation of a zone is done.

    Raises:
        WrongInput, Failed: it ended with an error, which is shown, or not within LIMIT_S.
    """
    client, until = google.client("zone operations"), time.monotonic() + LIMIT_S
    while (
        found := call_api(client.get, what, project=google.project, zone=zone, operation=operation)
    ).status.name != "DONE":
        if time.monotonic() > until:
            raise Failed(
                f"could not {what}: operation {operation} was not done after {LIMIT_S:g} s; look at"
                " it in the console, then run the command again"
            )
        time.sleep(POLL_S)
    if found.error.errors:
        first = found.error.errors[0]
        with google_errors(what):
            raise google_packages()["exceptions"].from_http_status(
                int(found.http_error_status_code or 500), f"{first.code}: {first.message}"
            )


def serial_port(google: GoogleClients, machine: Instance, start: int = 0) -> tuple[str, int]:
    """The output of a machine's serial port from byte `start` on, and the next start; empty if the
    machine is gone.
    """
    request = message_types(MODULE).GetSerialPortOutputInstanceRequest(
        project=google.project, zone=machine.zone, instance=machine.name, start=start
    )
    said = call_or_none(
        google.client("instances").get_serial_port_output,
        f"read what {machine.name} said",
        request=request,
    )
    return ("", start) if said is None else (said.contents, int(said.next_))


def as_json(machine: Any) -> str:
    """A machine (message `Instance`) as the JSON that is sent, keys sorted."""
    values = json.loads(
        type(machine).to_json(
            machine, use_integers_for_enums=False, always_print_fields_with_no_presence=False
        )
    )
    return json.dumps(values, indent=2, sort_keys=True)
