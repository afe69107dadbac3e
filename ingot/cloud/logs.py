"""Entries of Cloud Logging selected by a filter, through its REST interface: Google's client for it
supports only gRPC.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from ingot.cloud.clients import GoogleClients, google_errors, google_packages

HOST = "logging.googleapis.com"
PAGE, MOST_PAGES = 1000, 10
"""Entries per page, and pages per call; the rest follows with the next call."""
LATE_S = 30.0
"""How much later than newer entries an entry may become visible."""
CALL_S = 60.0


@dataclass(frozen=True)
class LogEntry:
    """One entry: its text, time (RFC 3339), and the labels of the resource that logged it."""

    text: str
    at: str
    labels: Mapping[str, str] = field(default_factory=dict)


def read_entries(google: GoogleClients, filter: str, after: str = "") -> tuple[list[LogEntry], str]:
    """The new entries since `after`, oldest first, and the value to pass as `after` next time (""
    the first time).

    Entries become visible out of order, so the last half minute is requested again and entries
    already seen are left out. If that is more than one call can return, reading continues after the
    last entry seen, and late entries from that time are lost.

    Raises:
        WrongInput: the permission to read logs is missing.
        Failed: the service cannot be reached, or its limit of sixty requests a minute was exceeded.
    """
    seen: dict[str, str] = json.loads(after) if after else {}
    found = _unseen(google, filter, seen)
    seen |= {entry["insertId"]: entry["timestamp"] for entry in found}
    if not seen:
        return [], after
    newest = max(_moment(at) for at in seen.values())
    recent = {
        id: at for id, at in seen.items() if _moment(at) >= newest - timedelta(seconds=LATE_S)
    }
    return [_line(entry) for entry in found], json.dumps(recent)


def _unseen(google: GoogleClients, filter: str, seen: Mapping[str, str]) -> list[dict[str, Any]]:
    """The entries not in `seen`, which maps the id of an entry to its time."""
    if not seen:
        return _query(google, filter)[0]
    last = max(_moment(at) for at in seen.values())
    # The last start is for more entries with one timestamp than a call can return.
    for start in (last - timedelta(seconds=LATE_S), last, last + timedelta(microseconds=1)):
        found, is_all = _query(google, f'{filter} AND timestamp>="{_rfc3339(start)}"')
        new = [entry for entry in found if entry["insertId"] not in seen]
        if new or is_all:
            return new
    return []


def _query(google: GoogleClients, filter: str) -> tuple[list[dict[str, Any]], bool]:
    """The first entries, as many as fit in MOST_PAGES, and whether those are all."""
    body: dict[str, Any] = {
        "resourceNames": [f"projects/{google.project}"],
        "filter": filter,
        "orderBy": "timestamp asc",
        "pageSize": PAGE,
    }
    found: list[dict[str, Any]] = []
    with google_errors("read Cloud Logging", denied="ask for the role Logs Viewer"):
        for _ in range(MOST_PAGES):
            answer = google.session().post(
                f"{google.address(HOST)}/v2/entries:list", json=body, timeout=CALL_S
            )
            if not answer.ok:
                raise google_packages()["exceptions"].from_http_response(answer)
            page = answer.json()
            found += page.get("entries", [])
            if "nextPageToken" not in page:
                return found, True
            body["pageToken"] = page["nextPageToken"]
    return found, False


def _line(entry: Mapping[str, Any]) -> LogEntry:
    payload = entry.get("jsonPayload", {})
    text = (
        entry.get("textPayload")
        or payload.get("message")
        or (json.dumps(payload) if payload else "")
    )
    return LogEntry(text.rstrip(), entry["timestamp"], entry.get("resource", {}).get("labels", {}))


def _moment(at: str) -> datetime:
    return datetime.fromisoformat(at)


def _rfc3339(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
