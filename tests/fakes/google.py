"""A server of Google's REST interfaces, built from the installed clients: their paths and message
types are its own.

What a client would not send is refused: an unknown path, query parameter or field is an error of
the test. What nobody gave a handler for is
501. Services (`tests/fakes/vertex.py`, ...) register handlers:
   `server.on("JobService.CreateCustomJob", handler)`.
"""

from __future__ import annotations

import functools
import importlib
import json
import re
import threading
import time
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from ingot.cloud import clients
from ingot.cloud.clients import SERVICES
from tests.lazy import lazy, require
from tests.loopback import Loopback

require("google.cloud.aiplatform_v1", reason="the Google clients are not installed")
operations_pb2 = lazy("google.longrunning.operations_pb2")
any_pb2, json_format = lazy("google.protobuf.any_pb2"), lazy("google.protobuf.json_format")
status_pb2 = lazy("google.rpc.status_pb2")

STATUS = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "ALREADY_EXISTS",
    412: "FAILED_PRECONDITION",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    501: "UNIMPLEMENTED",
    503: "UNAVAILABLE",
}
_SYSTEM = {"$alt", "alt", "prettyPrint", "fields"}
"""Query parameters that every method takes."""


class Refused(Exception):
    """A handler's no, as the service would say it: an HTTP status and a message."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


@dataclass(frozen=True)
class Method:
    """One method of a service as its client knows it."""

    name: str
    verb: str
    path: re.Pattern[str]
    fields: tuple[str, ...]
    body: str | None
    request: Any
    response: Any


@dataclass
class Fault:
    """What happens to the next `times` calls of a method: an error instead of an answer; with
    `lose`, it is done and the answer is an error all the same.
    """

    times: int
    code: int
    message: str
    lose: bool
    delay_s: float


@dataclass
class _Operation:
    message: Any
    polls: int
    ready: float
    finish: Callable[[], Any]


@dataclass
class Call:
    """A request that came: which method, and its message."""

    method: str
    request: Any
    time: float = field(default_factory=time.monotonic)


class Server(Loopback):
    """`calls` are all requests that were understood, in order; faulty ones too."""

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.calls: list[Call] = []
        self.lock = threading.RLock()
        self.handlers: dict[str, Callable[[Any], Any]] = {}
        self.faults: dict[str, list[Fault]] = {}
        self.raw: list[tuple[str, re.Pattern[str], Callable[..., Any]]] = []
        self.operations: dict[str, _Operation] = {}
        self._ids = 0

    def server_close(self) -> None:
        """Also the clients that were made to ask here: they are kept by their address, and nobody
        will have this one again.
        """
        super().server_close()
        clients._client.cache_clear()

    def on(self, method: str, handler: Callable[[Any], Any]) -> None:
        """Answer `Service.Method` with `handler(request message) -> response message`; it may raise
        `Refused`.
        """
        if method not in _methods():
            raise KeyError(f"no installed client has a method {method}")
        self.handlers[method] = handler

    def on_path(self, verb: str, path: str, handler: Callable[..., Any]) -> None:
        """For what no generated client speaks: a regular expression over the path; `handler(match,
        query, body) -> JSON`.
        """
        self.raw.append((verb, re.compile(path), handler))

    def fault(
        self,
        method: str,
        code: int,
        *,
        times: int = 1,
        message: str = "on purpose",
        lose: bool = False,
        delay_s: float = 0.0,
    ) -> None:
        """Let the next calls of `Service.Method` go wrong (`*`: of any)."""
        self.faults.setdefault(method, []).append(Fault(times, code, message, lose, delay_s))

    def requests(self, method: str) -> list[Any]:
        """The messages that came for `Service.Method`."""
        return [call.request for call in self.calls if call.method == method]

    def number(self) -> int:
        """A number that was not given out before."""
        with self.lock:
            self._ids += 1
            return self._ids

    def operation(
        self,
        parent: str,
        result: Callable[[], Any],
        *,
        metadata: Any = None,
        polls: int = 1,
        seconds: float = 0.0,
        error: Refused | None = None,
    ) -> Any:
        """A long-running operation under `parent` (projects/P/locations/L): `result()` is called,
        and its message is the response, once it was asked for more than `polls` times and `seconds`
        have passed; or it ends with `error`.
        """
        message = operations_pb2.Operation(name=f"{parent}/operations/{self.number()}")
        if metadata is not None:
            message.metadata.CopyFrom(_packed(metadata))

        def finish() -> None:
            try:
                if error is not None:
                    raise error
                message.response.CopyFrom(_packed(result()))
            except Refused as refused:
                code = {400: 3, 403: 7, 404: 5, 409: 6, 429: 8, 500: 13, 503: 14}.get(
                    refused.code, 2
                )
                message.error.CopyFrom(status_pb2.Status(code=code, message=refused.message))
            message.done = True

        self.operations[message.name] = _Operation(
            message, polls, time.monotonic() + seconds, finish
        )
        return message

    def poll(self, name: str) -> Any:
        """A look at a long-running operation."""
        if name not in self.operations:
            raise Refused(404, f"operation {name} not found")
        operation = self.operations[name]
        operation.polls -= 1
        if (
            operation.polls < 0
            and time.monotonic() >= operation.ready
            and not operation.message.done
        ):
            operation.finish()
        return operation.message


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length) if length else b""
        try:
            self._send(200, self._handled(self.command.lower(), body))
        except Refused as refused:
            status = STATUS.get(refused.code, "UNKNOWN")
            self._send(
                refused.code,
                json.dumps(
                    {"error": {"code": refused.code, "message": refused.message, "status": status}}
                ).encode(),
            )

    do_GET = do_POST = do_PATCH = do_DELETE = do_PUT = _answer

    def _send(self, code: int, content: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _handled(self, verb: str, body: bytes) -> bytes:
        parts = urlsplit(self.path)
        path, query = unquote(parts.path), parse_qsl(parts.query, keep_blank_values=True)
        for wanted, pattern, handler in self.server.raw:
            if wanted == verb and (match := pattern.fullmatch(path)):
                with self.server.lock:
                    self.server.calls.append(Call(f"{verb} {path}", json.loads(body or b"null")))
                    return json.dumps(
                        handler(match, dict(query), json.loads(body or b"null"))
                    ).encode()
        if (
            operation := re.fullmatch(r"/(?:v\d\w*|ui)/(.+/operations/[^/:]+)", path)
        ) and verb == "get":
            with self.server.lock:
                return json_format.MessageToJson(self.server.poll(operation[1])).encode()
        found = [
            (method, match)
            for method in _methods().values()
            if method.verb == verb and (match := method.path.fullmatch(path))
        ]
        if not found:
            raise Refused(404, f"no installed client asks {verb.upper()} {path}")
        # Of several (`.../{name=**}`, two versions of a service) the one that is answered here,
        # else any.
        method, match = next(
            ((one, its) for one, its in found if one.name in self.server.handlers), found[0]
        )
        return self._called(method, self._request(method, match, query, body))

    def _request(
        self, method: Method, match: re.Match[str], query: list[tuple[str, str]], body: bytes
    ) -> Any:
        values: dict[str, Any] = {}
        if method.body == "*":
            values = json.loads(body or b"{}")
        elif method.body is not None:
            values = {method.body: json.loads(body or b"{}")}
        elif body:
            raise Refused(400, f"{method.name} takes no body")
        for name, value in query:
            if name not in _SYSTEM:
                _assign(values, name, value)
        for name, value in zip(method.fields, match.groups(), strict=True):
            _assign(values, name, value)
        kind = method.request
        raw = kind.pb() if hasattr(kind, "pb") else kind
        message = (type(raw) if not isinstance(raw, type) else raw)()
        try:
            json_format.ParseDict(values, message)
        except json_format.ParseError as error:
            raise Refused(400, f"{method.name}: {error}") from None
        return kind.wrap(message) if hasattr(kind, "wrap") else message

    def _called(self, method: Method, request: Any) -> bytes:
        server = self.server
        with server.lock:
            server.calls.append(Call(method.name, request))
            fault = next(
                (
                    fault
                    for key in (method.name, "*")
                    for fault in server.faults.get(key, [])
                    if fault.times > 0
                ),
                None,
            )
            if fault is not None:
                fault.times -= 1
        if fault is not None:
            time.sleep(fault.delay_s)
            if fault.code and not fault.lose:
                raise Refused(fault.code, fault.message)
        handler = server.handlers.get(method.name)
        if handler is None:
            raise Refused(501, f"{method.name} is not answered here")
        with server.lock:
            response = handler(request)
        if fault is not None and fault.code:
            raise Refused(fault.code, fault.message)
        return _json(response, method).encode()


def _json(response: Any, method: Method) -> str:
    if response is None:
        return "{}"
    raw = type(response).pb(response) if hasattr(type(response), "pb") else response
    if method.response is not None and not isinstance(response, method.response):
        raise TypeError(
            f"{method.name} answers {method.response.__name__}, not {type(response).__name__}"
        )
    return json_format.MessageToJson(raw, use_integers_for_enums=True)


def _packed(message: Any) -> any_pb2.Any:
    raw = type(message).pb(message) if hasattr(type(message), "pb") else message
    packed = any_pb2.Any()
    packed.Pack(raw)
    return packed


def _assign(values: dict[str, Any], dotted: str, value: str) -> None:
    """Into nested mappings. A repeated parameter makes a list."""
    *parents, last = dotted.split(".")
    for part in parents:
        values = values.setdefault(part, {})
    if last in values and values[last] != value:
        values[last] = [
            *(values[last] if isinstance(values[last], list) else [values[last]]),
            value,
        ]
    else:
        values[last] = value


@functools.cache
def _methods() -> dict[str, Method]:
    """All methods of all clients that ingot uses, by `Service.Method`; several paths of one are
    told apart by a number behind the name.
    """
    found: dict[str, Method] = {}
    for module, client, _ in SERVICES.values():
        transport = getattr(importlib.import_module(module), client).get_transport_class("rest")
        service = transport.__name__.removesuffix("RestTransport")
        for name, stub in vars(transport).items():
            rules = getattr(stub, "_get_http_options", None)
            call = vars(stub).get("__call__") if isinstance(stub, type) else None
            if rules is None or call is None or name.startswith("_Base"):
                continue
            hints = typing.get_type_hints(call)
            for rule in rules():
                pattern, fields = _pattern(rule["uri"])
                key = f"{service}.{name.strip('_')}"
                while key in found:
                    key += "'"
                found[key] = Method(
                    key.rstrip("'"),
                    rule["method"],
                    pattern,
                    fields,
                    rule.get("body"),
                    hints["request"],
                    hints.get("return"),
                )
    return found


def _pattern(uri: str) -> tuple[re.Pattern[str], tuple[str, ...]]:
    """A path template as a regular expression, and the fields that its groups are."""
    fields: list[str] = []

    def group(match: re.Match[str]) -> str:
        name, _, inner = match[1].partition("=")
        fields.append(name)
        return "(" + re.escape(inner or "*").replace(r"\*\*", ".+").replace(r"\*", "[^/:]+") + ")"

    parts = re.split(r"(\{[^}]+\})", uri)
    text = "".join(
        group(match) if (match := re.fullmatch(r"\{([^}]+)\}", part)) else re.escape(part)
        for part in parts
    )
    return re.compile(text), tuple(fields)
