"""TPU VMs as queued resources, through the REST interface of tpu.googleapis.com (v2), for which
Google has no REST client. Policy is left to the launcher.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from ingot.base.errors import Failed, WrongInput
from ingot.cloud.clients import (
    EXISTS,
    NOT_FOUND,
    GoogleClients,
    google_errors,
    google_packages,
    http_status_of,
)

HOST = "tpu.googleapis.com"
CALL_S, POLL_S, LIMIT_S = 60.0, 5.0, 600.0
AGAIN = (429, 500, 502, 503, 504)
TRIES = 5
FIRST_WAIT_S = 1.0
OVER = ("SUSPENDING", "SUSPENDED", "FAILED", "DELETING")
"""States from which none comes back."""


@dataclass(frozen=True)
class QueuedTpu:
    """A queued resource: its id, and its state under the service's names."""

    id: str
    state: str

    @property
    def is_alive(self) -> bool:
        """Whether its TPU VM is there, or still to come."""
        return self.state not in OVER


def create(google: GoogleClients, zone: str, id: str, wanted: dict[str, Any]) -> None:
    """Request a queued resource under an id of our own. An existing one with that id is ours: the
    answer to an earlier request was lost.
    """
    path = f"projects/{google.project}/locations/{zone}/queuedResources?queuedResourceId={id}"
    try:
        _call(google, "post", path, f"ask for the TPU {id} in {zone}", wanted)
    except WrongInput as error:
        if http_status_of(error) != EXISTS:
            raise


def state(google: GoogleClients, zone: str, id: str) -> str | None:
    """The state of a queued resource: ACCEPTED, WAITING_FOR_RESOURCES, PROVISIONING, ACTIVE,
    SUSPENDED, FAILED, ...; None if there is none.
    """
    found = _get(google, zone, id)
    return None if found is None else _state(found)


def labelled(google: GoogleClients, zone: str, labels: Mapping[str, str]) -> list[QueuedTpu]:
    """The queued resources of a zone whose TPU VMs have all of these labels. The service has no
    filter by labels.
    """
    path, found, page = f"projects/{google.project}/locations/{zone}/queuedResources", [], ""
    while True:
        answer = _call(google, "get", f"{path}?pageSize=1000{page}", f"list the TPUs in {zone}")
        for resource in answer.get("queuedResources", []):
            machines = [
                spec.get("node", {}) for spec in resource.get("tpu", {}).get("nodeSpec", [])
            ]
            if any(labels.items() <= one.get("labels", {}).items() for one in machines):
                found.append(QueuedTpu(resource["name"].rpartition("/")[2], _state(resource)))
        if not (token := answer.get("nextPageToken")):
            return found
        page = f"&pageToken={quote(token, safe='')}"


def delete(google: GoogleClients, zone: str, id: str) -> None:
    """Delete a queued resource with its TPU VM, and wait until it is gone. Raises Failed if
    it stays.
    """
    what, until = f"delete the TPU {id} in {zone}", time.monotonic() + LIMIT_S
    while (found := _get(google, zone, id)) is not None:
        if _state(found) != "DELETING":
            try:
                _call(
                    google,
                    "delete",
                    f"projects/{google.project}/locations/{zone}/queuedResources/{id}?force=true",
                    what,
                )
            except WrongInput as error:
                if http_status_of(error) != NOT_FOUND:
                    raise
        if time.monotonic() > until:
            raise Failed(
                f"could not {what}: it is still there after {LIMIT_S:g} s; cancel once more, or"
                " delete it in the console"
            )
        time.sleep(POLL_S)


def _get(google: GoogleClients, zone: str, id: str) -> dict[str, Any] | None:
    try:
        return _call(
            google,
            "get",
            f"projects/{google.project}/locations/{zone}/queuedResources/{id}",
            f"look at the TPU {id}",
        )
    except WrongInput as error:
        if http_status_of(error) == NOT_FOUND:
            return None
        raise


def _state(resource: Mapping[str, Any]) -> str:
    return str(resource.get("state", {}).get("state", "STATE_UNSPECIFIED"))


def _call(
    google: GoogleClients, verb: str, path: str, what: str, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Call the API and retry transient errors: reads, deletes and creations under an id of our own
    are all safe to repeat.
    """
    with google_errors(what, denied="ask for the role TPU Admin"):
        for number in range(TRIES):
            answer = google.session().request(
                verb.upper(), f"{google.address(HOST)}/v2/{path}", json=body, timeout=CALL_S
            )
            if answer.status_code not in AGAIN or number == TRIES - 1:
                break
            time.sleep(FIRST_WAIT_S * 2**number)
        if not answer.ok:
            raise google_packages()["exceptions"].from_http_response(answer)
        found: dict[str, Any] = answer.json()
    return found
