"""Entries of Cloud Logging by a filter, through its REST interface: Google's client for it speaks
gRPC only.
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
"""Entries of one answer, and answers to one question: what is more comes with the next."""
LATE_S = 30.0
"""How much later than others an entry may come to be seen."""
CALL_S = 60.0


@dataclass(frozen=True)
class LogEntry:
    """What was said: the text of one entry, when (RFC 3339), and the labels of the resource that
    said it.
    """

    text: str
    at: str
    labels: Mapping[str, str] = field(default_factory=dict)


def read_entries(google: GoogleClients, filter: str, after: str = "") -> tuple[list[LogEntry], str]:
    """The entries that are new since `after`, oldest first, and what to hand in as `after` the next
    time; "" at first.

    Entries come to be seen out of order: the last half minute is asked for once more, and what was
    seen is left out. Where that is more than one question can hold, it goes on from the last that
    was seen, and what comes late meanwhile is given up.

    Raises:
        WrongInput: the right to read logs is missing.
        Failed: the service cannot be reached, or too much is asked (sixty questions a minute).
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
    """`seen`: when each entry was, by its id."""
    if not seen:
        return _asked(google, filter)[0]
    last = max(_moment(at) for at in seen.values())
    # The last is for more entries at one moment than a question can hold.
    for start in (last - timedelta(seconds=LATE_S), last, last + timedelta(microseconds=1)):
        found, is_all = _asked(google, f'{filter} AND timestamp>="{_told(start)}"')
        new = [entry for entry in found if entry["insertId"] not in seen]
        if new or is_all:
            return new
    return []


def _asked(google: GoogleClients, filter: str) -> tuple[list[dict[str, Any]], bool]:
    """The first entries that fit, and whether those are all."""
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


def _told(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
