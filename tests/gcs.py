"""A Google Cloud Storage of the tests: one bucket, by the JSON API over loopback, as Google's own
client speaks it.

Preconditions and checksums are enforced. `server.fault(KIND, ...)` makes the next requests of a
kind go wrong; KIND is `insert` (a whole object in one request), `start`, `chunk` and `status` (of a
resumable upload), `stat`, `media`, `list`, `delete` or `bucket`.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from ingot.base.remote import bucket
from ingot.base.remote.service import EMULATOR
from tests.lazy import lazy, require
from tests.loopback import Loopback

require("google.cloud.storage", reason="google-cloud-storage is not installed")
require("google_crc32c", reason="google-crc32c is not installed")
google_crc32c = lazy("google_crc32c")

KEPT_BYTES = 256 << 10
"""Of a chunk that breaks off, the service keeps multiples of this."""


def crc32c(data: bytes) -> str:
    return base64.b64encode(google_crc32c.Checksum(data).digest()).decode()


@dataclass
class Stored:
    """An object. `crc32c` is what the service reckoned when it was written, whatever became of
    `data` since.
    """

    data: bytes
    crc32c: str
    generation: int
    updated: float


@dataclass
class Fault:
    """What happens to the next `times` requests of a kind, one of these:

    - `code` answers with that error, and nothing is done;
    - `code` and `lose`: it is done, and the answer is the error all the same;
    - `cut`: the connection breaks in the middle of the body, of an upload or of an answer;
    - `short`: half of what was asked for comes back as if that were all of it;
    - `flip`: a bit of the answer turns over on the way;
    - `page`: something on the way answers for the service.
    `delay_s` passes before any of them, or before a good answer.
    """

    times: int = 1
    code: int = 0
    lose: bool = False
    cut: bool = False
    short: bool = False
    flip: bool = False
    page: bool = False
    delay_s: float = 0.0
    message: str = "on purpose"


@dataclass
class Session:
    """A resumable upload on its way."""

    name: str
    query: dict[str, str]
    about: dict[str, Any]
    data: bytes = b""
    done: bool = False


class Refused(Exception):
    """An error of the service."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


class Server(Loopback):
    """`objects` by name; `counts` of requests by kind, `written` names in order, `received` bytes
    of uploads' bodies.

    `ahead_s` moves the service's clock.
    """

    def __init__(self, bucket: str = "bucket") -> None:
        super().__init__(_Handler)
        self.bucket, self.page, self.location = bucket, 1000, "US-CENTRAL1"
        self.bindings: list[dict[str, Any]] = []  # of the bucket's policy
        self.lacking: set[str] = set()  # permissions on the bucket that the caller has not
        self.objects: dict[str, Stored] = {}
        self.sessions: dict[str, Session] = {}
        self.faults: dict[str, list[Fault]] = {}
        self.counts: Counter[str] = Counter()
        self.written: list[str] = []
        self.received, self.ahead_s, self.generation = 0, 0.0, 1000
        self.lock = threading.RLock()

    def now(self) -> float:
        return time.time() + self.ahead_s

    def fault(self, kind: str, times: int = 1, **how: Any) -> None:
        self.faults.setdefault(kind, []).append(Fault(times, **how))

    def next_fault(self, kind: str) -> Fault:
        """Counts the request, and says what shall happen to it."""
        with self.lock:
            self.counts[kind] += 1
            waiting = self.faults.get(kind, [])
            if not waiting:
                return Fault()
            waiting[0].times -= 1
            return waiting[0] if waiting[0].times else waiting.pop(0)

    def check(self, name: str, query: dict[str, str]) -> Stored | None:
        """The object as the conditions in `query` want it."""
        found = self.objects.get(name)
        wanted = query.get("ifGenerationMatch")
        if wanted is not None and int(wanted) != (found.generation if found else 0):
            raise Refused(412, "At least one of the pre-conditions you specified did not hold.")
        if found and query.get("generation", str(found.generation)) != str(found.generation):
            return None
        return found

    def write(
        self, name: str, data: bytes, about: dict[str, Any], query: dict[str, str]
    ) -> dict[str, Any]:
        """Make an object, all at once, when conditions and checksums hold."""
        with self.lock:
            self.check(name, query)
            if about.get("crc32c", crc32c(data)) != crc32c(data):
                raise Refused(
                    400,
                    f'Provided CRC32C "{about["crc32c"]}" doesn\'t match calculated CRC32C'
                    f' "{crc32c(data)}".',
                )
            if (
                "md5Hash" in about
                and base64.b64decode(about["md5Hash"])
                != hashlib.md5(data, usedforsecurity=False).digest()
            ):
                raise Refused(400, "Provided MD5 hash doesn't match.")
            self.generation += 1
            self.objects[name] = Stored(data, crc32c(data), self.generation, self.now())
            self.written.append(name)
            return self.describe(name)

    def describe(self, name: str) -> dict[str, Any]:
        found = self.objects[name]
        updated = datetime.fromtimestamp(found.updated, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        return {
            "kind": "storage#object",
            "name": name,
            "bucket": self.bucket,
            "size": str(len(found.data)),
            "crc32c": found.crc32c,
            "generation": str(found.generation),
            "metageneration": "1",
            "updated": updated,
            "timeCreated": updated,
        }

    def flip(self, name: str, at: int = 0) -> None:
        """A bit of an object turns over, and the service does not notice."""
        found = self.objects[name]
        found.data = found.data[:at] + bytes([found.data[at] ^ 1]) + found.data[at + 1 :]


@contextlib.contextmanager
def serving(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server that clients of this process and its children find, with short pauses between what a
    client repeats.
    """
    server = Server()
    monkeypatch.setenv(EMULATOR, server.address)
    monkeypatch.setattr(bucket, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(bucket, "LONGEST_PAUSE_S", 0.05)
    try:
        yield server
    finally:
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        if not urlsplit(self.path).path.endswith("/o") and self.name is None:
            about: Any = {
                "kind": "storage#bucket",
                "name": self.server.bucket,
                "location": self.server.location,
            }
            if urlsplit(self.path).path.endswith("/iam"):
                about = {
                    "kind": "storage#policy",
                    "version": 3,
                    "etag": "CAE=",
                    "bindings": self.server.bindings,
                }
            elif urlsplit(self.path).path.endswith("/iam/testPermissions"):
                asked = parse_qs(urlsplit(self.path).query)["permissions"]
                about = {
                    "kind": "storage#testIamPermissionsResponse",
                    "permissions": [name for name in asked if name not in self.server.lacking],
                }
            self._serve("bucket", lambda _: (200, about, {}))  # the client looks, for itself
        elif self.name is None:
            self._serve("list", self._list)
        elif self.query.get("alt") == "media":
            self._serve("media", self._media)
        else:
            self._serve("stat", lambda _: (200, self.server.describe(self._found()), {}))

    def do_DELETE(self) -> None:
        self._serve("delete", self._delete)

    def do_POST(self) -> None:
        whole = self.query.get("uploadType") == "multipart"
        self._serve("insert" if whole else "start", self._insert if whole else self._start)

    def do_PUT(self) -> None:
        self._serve(
            "status" if self.headers["Content-Range"].startswith("bytes */") else "chunk",
            self._chunk,
        )

    @property
    def query(self) -> dict[str, str]:
        return {key: values[-1] for key, values in parse_qs(urlsplit(self.path).query).items()}

    @property
    def name(self) -> str | None:
        found = re.search(r"/b/[^/]+/o/(.+)$", urlsplit(self.path).path)
        return unquote(found[1]) if found else None

    def _serve(self, kind: str, act: Any) -> None:
        """Read the request, let the fault that is due happen, and answer."""
        fault = self.server.next_fault(kind)
        length = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(length // 2 if fault.cut else length)
        if kind in ("insert", "chunk"):
            self.server.received += len(body)
        time.sleep(fault.delay_s)
        if fault.cut and kind != "media":
            if kind == "chunk":
                with self.server.lock:
                    self._keep(body[: len(body) // KEPT_BYTES * KEPT_BYTES])
            self.close_connection = True
            return
        try:
            where = re.search(r"/b/([^/]+)", urlsplit(self.path).path)
            if where and where[1] != self.server.bucket:
                raise Refused(404, "The specified bucket does not exist.")
            if fault.code and not fault.lose:
                raise Refused(fault.code, fault.message)
            with self.server.lock:
                code, answer, headers = act(body)
            if fault.lose:
                raise Refused(fault.code, fault.message)
        except Refused as error:
            code, headers = error.code, {}
            answer = {
                "error": {
                    "code": error.code,
                    "message": error.message,
                    "errors": [{"message": error.message}],
                }
            }
        self._answer(code, answer, headers, fault)

    def _answer(self, code: int, answer: Any, headers: dict[str, str], fault: Fault) -> None:
        data = (
            answer
            if isinstance(answer, bytes)
            else json.dumps(answer).encode()
            if answer is not None
            else b""
        )
        if fault.page:
            code, data = 200, b"<html>try again later</html>"
        sent = data[: len(data) // 2] if fault.cut or fault.short else data
        sent = bytes([data[0] ^ 1]) + data[1:] if fault.flip else sent
        self.send_response(code)
        for key, value in {"Content-Type": "application/json", **headers}.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(sent if fault.short else data)))
        self.end_headers()
        self.wfile.write(sent)
        self.close_connection = self.close_connection or fault.cut

    def _found(self) -> str:
        name = self.name or ""
        if self.server.check(name, self.query) is None:
            raise Refused(404, f"No such object: {self.server.bucket}/{name}")
        return name

    def _delete(self, body: bytes) -> tuple[int, Any, dict[str, str]]:
        del self.server.objects[self._found()]
        return 204, None, {}

    def _list(self, body: bytes) -> tuple[int, Any, dict[str, str]]:
        query, prefix = self.query, self.query.get("prefix", "")
        found: dict[str, bool] = {}  # a name, or with a delimiter the folder that it lies in
        for name in self.server.objects:
            if name.startswith(prefix):
                head, mark, _ = name[len(prefix) :].partition(query.get("delimiter", "\n"))
                found[prefix + head + mark] = bool(mark)
        names = sorted(name for name in found if name > query.get("pageToken", ""))
        page = names[: min(self.server.page, int(query.get("maxResults", "1000")))]
        answer: dict[str, Any] = {
            "kind": "storage#objects",
            "items": [self.server.describe(name) for name in page if not found[name]],
        }
        if prefixes := [name for name in page if found[name]]:
            answer["prefixes"] = prefixes
        if len(page) < len(names):
            answer["nextPageToken"] = page[-1]
        return 200, answer, {}

    def _media(self, body: bytes) -> tuple[int, Any, dict[str, str]]:
        found = self.server.objects[self._found()]
        headers = {
            "Content-Type": "application/octet-stream",
            "x-goog-generation": str(found.generation),
            "x-goog-hash": f"crc32c={found.crc32c}",
            "x-goog-stored-content-length": str(len(found.data)),
            "x-goog-stored-content-encoding": "identity",
        }
        if "Range" not in self.headers:
            return 200, found.data, headers
        first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
        if int(first) >= len(found.data):
            raise Refused(416, "The requested range cannot be satisfied.")
        part = found.data[int(first) : int(last) + 1 if last else None]
        return (
            206,
            part,
            headers
            | {"Content-Range": f"bytes {first}-{int(first) + len(part) - 1}/{len(found.data)}"},
        )

    def _insert(self, body: bytes) -> tuple[int, Any, dict[str, str]]:
        boundary = re.search(r'boundary="?([^";]+)', self.headers["Content-Type"])
        assert boundary
        parts = [
            part.partition(b"\r\n\r\n")[2].removesuffix(b"\r\n")
            for part in body.split(b"--" + boundary[1].encode())[1:3]
        ]
        about = json.loads(parts[0])
        return 200, self.server.write(about["name"], parts[1], about, self.query), {}

    def _start(self, body: bytes) -> tuple[int, Any, dict[str, str]]:
        about = json.loads(body)
        self.server.check(about["name"], self.query)
        key = f"upload{len(self.server.sessions)}"
        self.server.sessions[key] = Session(about["name"], self.query, about)
        return 200, None, {"Location": f"{self.server.address}/session?upload_id={key}"}

    def _chunk(self, body: bytes) -> tuple[int, Any, dict[str, str]]:
        session = self.server.sessions.get(self.query["upload_id"])
        if session is None:
            raise Refused(404, "No such upload.")
        if not session.done:
            total = self._keep(body)
            if total is None or len(session.data) < total:
                return (
                    308,
                    None,
                    {"Range": f"bytes=0-{len(session.data) - 1}"} if session.data else {},
                )
            given = dict(
                part.split("=", 1)
                for part in self.headers.get("x-goog-hash", "").split(",")
                if part
            )
            about = (
                session.about | {"crc32c": given["crc32c"]} if "crc32c" in given else session.about
            )
            session.done = True
            self.server.write(session.name, session.data, about, session.query)
        return 200, self.server.describe(session.name), {}

    def _keep(self, body: bytes) -> int | None:
        """Add what is new in `body` to the upload; returns the size of the whole, where that is
        known.
        """
        session = self.server.sessions[self.query["upload_id"]]
        span, _, total = self.headers["Content-Range"].removeprefix("bytes ").partition("/")
        if span != "*":
            first = int(span.partition("-")[0])
            if first > len(session.data):
                raise Refused(
                    400, f"the chunk begins at {first}, {len(session.data)} bytes are here"
                )
            session.data += body[len(session.data) - first :]
        return int(total) if total != "*" else None

    def date_time_string(self, timestamp: float | None = None) -> str:
        return super().date_time_string(self.server.now() if timestamp is None else timestamp)

    def log_message(self, *arguments: Any) -> None:
        """Quiet."""
