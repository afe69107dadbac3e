"""A hub of the tests: the few routes by which Hugging Face's clients list and stream one data
set.
"""

from __future__ import annotations

import hashlib
import json
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import urlsplit

from tests.loopback import Loopback


class Server(Loopback):
    """Serves `files` (path -> content) as the data set `name` at one commit."""

    def __init__(self, name: str, files: dict[str, bytes]) -> None:
        super().__init__(_Handler)
        self.name, self.files = name, files
        self.busy = False
        """Its files are refused, by a code that clients do not try again: they would wait."""

    @property
    def commit(self) -> str:
        return hashlib.sha1(b"".join(self.files.values())).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path, server = urlsplit(self.path).path, self.server
        about, files = (
            f"/api/datasets/{server.name}",
            f"/datasets/{server.name}/resolve/{server.commit}/",
        )
        if path in (about, f"{about}/revision/{server.commit}"):
            self._json(
                {
                    "id": server.name,
                    "sha": server.commit,
                    "private": False,
                    "gated": False,
                    "disabled": False,
                    "tags": [],
                    "downloads": 0,
                    "likes": 0,
                    "siblings": [{"rfilename": name} for name in server.files],
                }
            )
        elif path.startswith(f"{about}/tree/{server.commit}"):
            self._json(self._tree(path.removeprefix(f"{about}/tree/{server.commit}").strip("/")))
        elif path.startswith(files) and self.server.busy:
            self._send(418, b"", {})
        elif path.startswith(files) and (name := path.removeprefix(files)) in server.files:
            self._file(server.files[name])
        else:
            self._send(
                404,
                b"",
                {"X-Error-Code": "EntryNotFound" if server.name in path else "RepoNotFound"},
            )

    def _tree(self, folder: str) -> list[dict[str, Any]]:
        base, found = f"{folder}/" if folder else "", {}
        for name, data in self.server.files.items():
            if name.startswith(base):
                first, _, rest = name[len(base) :].partition("/")
                kind = (
                    {"type": "directory", "size": 0}
                    if rest
                    else {"type": "file", "size": len(data)}
                )
                found[first] = {"path": base + first, "oid": hashlib.sha1(data).hexdigest(), **kind}
        return list(found.values())

    def _file(self, data: bytes) -> None:
        headers = {
            "ETag": f'"{hashlib.sha1(data).hexdigest()}"',
            "X-Repo-Commit": self.server.commit,
            "Accept-Ranges": "bytes",
        }
        if asked := self.headers.get("Range"):
            first, _, last = asked.removeprefix("bytes=").partition("-")
            begin, end = int(first), min(int(last) + 1 if last else len(data), len(data))
            self._send(
                206,
                data[begin:end],
                {**headers, "Content-Range": f"bytes {begin}-{end - 1}/{len(data)}"},
            )
        else:
            self._send(200, data, headers)

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, code: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *arguments: Any) -> None:
        """Quiet."""
