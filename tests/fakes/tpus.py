"""Queued resources of the TPU service, which no generated REST client speaks: asked for, waiting,
active, deleted with what belongs to them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from tests.fakes.google import Refused, Server

ID = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
PATH = r"/v2/projects/p/locations/([a-z0-9-]+)/queuedResources"
NODE = {
    "acceleratorType",
    "runtimeVersion",
    "networkConfig",
    "labels",
    "metadata",
    "serviceAccount",
}


@dataclass
class Tpus:
    """By id: what was asked for, and its state."""

    asked: dict[str, dict[str, Any]] = field(default_factory=dict)
    states: dict[str, str] = field(default_factory=dict)
    looks: dict[str, int] = field(default_factory=dict)
    lost: int = 0

    def create(
        self, match: re.Match[str], query: dict[str, str], body: dict[str, Any]
    ) -> dict[str, Any]:
        id = query["queuedResourceId"]
        if not ID.fullmatch(id) or set(query) != {"queuedResourceId"}:
            raise Refused(400, f"queuedResourceId {id!r}")
        if unknown := set(body) - {
            "tpu",
            "spot",
            "guaranteed",
            "queueingPolicy",
            "reservationName",
        }:
            raise Refused(400, f"Unknown name {sorted(unknown)[0]!r}")
        [spec] = body["tpu"]["nodeSpec"]
        if (
            spec["parent"] != f"projects/p/locations/{match[1]}"
            or set(spec["node"]) != NODE
            or spec["nodeId"] != id
        ):
            raise Refused(400, f"nodeSpec: {sorted(spec['node'])}")
        if id in self.states:
            raise Refused(409, f"Resource '{id}' already exists")
        self.asked[id], self.states[id] = body, "ACCEPTED"
        if self.lost:
            self.lost -= 1
            raise Refused(503, "lost")
        return {"name": f"projects/p/locations/{match[1]}/operations/1"}

    def list(self, match: re.Match[str], query: dict[str, str], body: Any) -> dict[str, Any]:
        """Page by page, one on each."""
        start, ids = int(query.get("pageToken", "0")), sorted(self.states)
        path = f"projects/p/locations/{match[1]}/queuedResources"
        found = [
            {**self.asked[id], "name": f"{path}/{id}", "state": {"state": self.states[id]}}
            for id in ids[start : start + 1]
        ]
        token = {"nextPageToken": str(start + 1)} if len(ids) > start + 1 else {}
        return ({"queuedResources": found} if found else {}) | token

    def get(self, match: re.Match[str], query: dict[str, str], body: Any) -> dict[str, Any]:
        id = match[2]
        if id not in self.states:
            raise Refused(404, f"Resource '{id}' was not found")
        if self.states[id] == "DELETING":
            self.looks[id] -= 1
            if self.looks[id] < 0:
                del self.states[id]
                raise Refused(404, f"Resource '{id}' was not found")
        return {**self.asked[id], "name": id, "state": {"state": self.states[id]}}

    def delete(self, match: re.Match[str], query: dict[str, str], body: Any) -> dict[str, Any]:
        id = match[2]
        if id not in self.states:
            raise Refused(404, f"Resource '{id}' was not found")
        if query != {"force": "true"}:
            raise Refused(400, "a queued resource with a TPU is deleted by force only")
        self.states[id], self.looks[id] = "DELETING", 1
        return {}


def install(server: Server) -> Tpus:
    state = Tpus()
    server.on_path("post", PATH, state.create)
    server.on_path("get", PATH, state.list)
    server.on_path("get", PATH + "/([a-z0-9-]+)", state.get)
    server.on_path("delete", PATH + "/([a-z0-9-]+)", state.delete)
    return state
