"""The part of the Hugging Face hub that takes uploads, on the loopback: repositories, large files by
Git LFS, commits. Kept in memory; what it is asked is what the real client asks.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

import huggingface_hub.constants
import pytest

from tests.loopback import Loopback

TOKEN = "hf_a_token_that_may_write"


class Hub(Loopback):
    """Repositories by name. `sent`: the large objects that came, in order; `down`: commits are
    answered 500; `born_public`: new repositories are public whatever was asked.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, Any]] = {}
        self.objects: dict[str, bytes] = {}
        self.sent: list[str] = []
        self.asked: list[str] = []
        self.down = self.born_public = False
        super().__init__(_Handler)

    def files(self, name: str) -> dict[str, bytes]:
        return self.repositories[name]["files"]


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        name = self.path.removeprefix("/api/models/").split("/revision/")[0]
        self._about(self.server.repositories.get(name), name)

    def _about(self, repository: dict[str, Any] | None, name: str) -> None:
        if repository is None:
            return self._answer(404, {"error": "not found"}, **{"X-Error-Code": "RepoNotFound"})
        about = {"id": name, "sha": repository["sha"], "private": repository["private"]}
        return self._answer(
            200, {**about, "siblings": [{"rfilename": f} for f in repository["files"]]}
        )

    def do_PUT(self) -> None:
        oid, data = self.path.rpartition("/")[2], self._body()
        assert hashlib.sha256(data).hexdigest() == oid
        self.server.objects[oid] = data
        self.server.sent.append(oid)
        self._answer(200, {})

    def do_POST(self) -> None:
        self.server.asked.append(self.path)
        body = self._body()
        if self.headers.get("authorization") != f"Bearer {TOKEN}":
            return self._answer(403, {"error": "forbidden"})
        if self.path.endswith("/create"):
            return self._create(json.loads(body))
        if self.path.endswith("/validate-yaml"):
            return self._answer(200, {"warnings": [], "errors": []})
        if self.path.endswith("/objects/batch"):
            return self._batch(json.loads(body))
        name = "/".join(self.path.split("/")[3:5])
        files = self.server.files(name)
        if "/preupload/" in self.path:
            told = [self._mode(file["path"], files) for file in json.loads(body)["files"]]
            return self._answer(200, {"files": told})
        return self._commit(name, [json.loads(line) for line in body.splitlines()])

    def _create(self, asked: dict[str, Any]) -> None:
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        url = {"url": f"{self.server.address}/{name}", "name": name}
        if name in self.server.repositories:
            return self._answer(409, {"error": "exists", **url})
        private = (
            asked.get("visibility") == "private" or asked.get("private") is True
        ) and not self.server.born_public
        self.server.repositories[name] = {"private": private, "sha": "0" * 40, "files": {}}
        return self._answer(200, url)

    def _batch(self, asked: dict[str, Any]) -> None:
        objects = []
        for each in asked["objects"]:
            href = f"{self.server.address}/lfs/{each['oid']}"
            known = each["oid"] in self.server.objects
            objects.append({**each} if known else {**each, "actions": {"upload": {"href": href}}})
        self._answer(200, {"transfer": "basic", "objects": objects})

    def _mode(self, path: str, files: dict[str, bytes]) -> dict[str, Any]:
        lfs = path.endswith(".safetensors")
        told = {"path": path, "uploadMode": "lfs" if lfs else "regular", "shouldIgnore": False}
        if path in files:
            data = files[path]
            git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            told["oid"] = hashlib.sha256(data).hexdigest() if lfs else git
        return told

    def _commit(self, name: str, lines: list[dict[str, Any]]) -> None:
        if self.server.down:
            return self._answer(500, {"error": "down"})
        repository = self.server.repositories[name]
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                repository["files"][value["path"]] = base64.b64decode(value["content"])
            if line["key"] == "lfsFile":
                repository["files"][value["path"]] = self.server.objects[value["oid"]]
            if line["key"] == "deletedFile":
                del repository["files"][value["path"]]
        repository["sha"] = hashlib.sha1(repr(lines).encode()).hexdigest()
        url = f"{self.server.address}/{name}/commit/{repository['sha']}"
        return self._answer(200, {"commitUrl": url, "commitOid": repository["sha"]})

    def _body(self) -> bytes:
        if self.headers.get("transfer-encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("content-length") or 0))
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def _answer(self, code: int, body: dict[str, Any], **headers: str) -> None:
        data = json.dumps(body).encode()
        self.send_response(code)
        for name, value in {"content-type": "application/json", **headers}.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextlib.contextmanager
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The hub, with this process's client asking it."""
    hub = Hub()
    for name, value in {
        "ENDPOINT": hub.address,
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_DISABLE_IMPLICIT_TOKEN": False,
    }.items():
        monkeypatch.setattr(huggingface_hub.constants, name, value)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    try:
        yield hub
    finally:
        hub.server_close()
