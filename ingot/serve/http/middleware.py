"""Prometheus metrics, and the middleware that every request passes: request metrics, API key,
limits of the body.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Collection, Mapping, Sequence

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ingot.serve.http.errors import ApiError

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)


class ServerMetrics:
    """All metrics of one server; names begin with `ingot_`. They have a registry of their own, so
    that two servers in one process do not mix.
    """

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "ingot_requests", "HTTP requests", ["route", "status"], registry=self._registry
        )
        self.seconds = Histogram(
            "ingot_request_seconds",
            "Seconds from request to end of answer",
            ["route"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.first_token = Histogram(
            "ingot_first_token_seconds",
            "Seconds from queueing to first token",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.tokens = Counter(
            "ingot_tokens",
            "Tokens read (prompt) and generated (completion)",
            ["kind"],
            registry=self._registry,
        )
        self.prefix_queries = Counter(
            "ingot_prefix_cache_queries",
            "Tokens of prompts that were looked for among those read before",
            registry=self._registry,
        )
        self.prefix_hits = Counter(
            "ingot_prefix_cache_hits",
            "Tokens of prompts that were read before",
            registry=self._registry,
        )
        self.cancelled = Counter(
            "ingot_cancelled", "Completions whose client went away", registry=self._registry
        )
        self.failures = Counter(
            "ingot_step_failures",
            "Steps of the model that raised an error",
            registry=self._registry,
        )
        self.waiting = Gauge(
            "ingot_waiting", "Completions that wait for a row of the batch", registry=self._registry
        )
        self.running = Gauge(
            "ingot_running", "Completions that have a row of the batch", registry=self._registry
        )
        self.rows = Histogram(
            "ingot_batch_rows",
            "Rows decoded together, by step",
            buckets=_ROWS,
            registry=self._registry,
        )

    def text(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self._registry)


# A body over the limit is still read up to this many times the limit: a client that is answered
# while it sends may lose the answer when the connection closes.
DRAIN_FACTOR = 16
# A slower body is refused, since endless senders would each hold a connection.
BODY_S = 60.0
# Parsing JSON blocks the event loop for a time that depends on the number of values, not on the
# length of texts: a body with more is refused unparsed. PIECE bytes are counted before other
# requests get their turn.
MAX_VALUES, MAX_CONTAINERS, PIECE = 32_768, 16_384, 1 << 16


class RequestMetrics:
    """Counts requests and measures their seconds by route; all unknown paths count as one route."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics, routes: Collection[str]) -> None:
        self._app, self._metrics, self._routes = app, metrics, frozenset(routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.monotonic(), 499
        route = scope["path"] if scope["path"] in self._routes else "other"

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception:
            status = 500  # the response is made by an outer handler
            raise
        finally:
            self._metrics.requests.labels(route, str(status)).inc()
            self._metrics.seconds.labels(route).observe(time.monotonic() - began)


class ApiKeyAuth:
    """Refuses requests without `Authorization: Bearer KEY`, except reading the `open_routes`."""

    def __init__(self, app: ASGIApp, key: str, open_routes: Collection[str]) -> None:
        self._app = app
        self._expected = f"bearer {key}".encode()
        self._open = frozenset(open_routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not (
            scope["path"] in self._open and scope["method"] in ("GET", "HEAD")
        ):
            given = dict(scope["headers"]).get(b"authorization", b"")
            scheme, _, key = given.partition(b" ")
            if not hmac.compare_digest(scheme.lower() + b" " + key.strip(), self._expected):
                what = "is wrong" if given else "is missing"
                refused = ApiError(
                    401,
                    f"the API key {what}; send it as `Authorization: Bearer KEY`",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
                await refused.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


class JsonCount:
    """An upper bound on the values in a JSON body, counted while it arrives: strings are skipped,
    and each value follows a comma or opens a list or an object.
    """

    def __init__(self) -> None:
        self.values = self.containers = 0
        self._in_text, self._escape = False, b""

    def add(self, piece: bytes) -> None:
        """Count one more piece."""
        piece = self._escape + piece
        # A backslash at the end escapes what the next piece begins with.
        alone = (len(piece) - len(piece.rstrip(b"\\"))) % 2
        self._escape, piece = piece[len(piece) - alone :], piece[: len(piece) - alone]
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[self._in_text :: 2])
        self._in_text ^= len(parts) % 2 == 0
        opened = outside.count(b"[") + outside.count(b"{")
        self.containers += opened
        self.values += opened + outside.count(b",")


class BodyLimit:
    """Reads the whole body before the app runs, and refuses it past `max_bytes`, `max_values` or
    `timeout_s`.
    """

    def __init__(
        self,
        app: ASGIApp,
        max_bytes: int,
        max_values: int = MAX_VALUES,
        timeout_s: float = BODY_S,
    ) -> None:
        self._app, self._max_bytes, self._max_values = app, max_bytes, max_values
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                body = await self._whole_body(dict(scope["headers"]), receive)
        except ApiError as refused:
            await refused.response()(scope, receive, send)
            return
        except TimeoutError:
            slow = ApiError(
                408,
                f"the body did not come within {self._timeout_s:g} s; send it again",
                code="body_too_slow",
                headers={"Connection": "close"},
            )
            await slow.response()(scope, receive, send)
            return
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        await self._app(scope, replay, send)

    async def _whole_body(self, headers: Mapping[bytes, bytes], receive: Receive) -> bytes:
        """The body, or after a disconnect what was received. Raises ApiError over a limit."""
        if b"transfer-encoding" in headers and b"content-length" in headers:
            # A proxy in front may have used the other header, and seen another request.
            raise ApiError(
                400,
                "the request has both Transfer-Encoding and Content-Length; send one of them",
                headers={"Connection": "close"},
            )
        declared = headers.get(b"content-length", b"")
        # A client that sent `Expect: 100-continue` gets the answer before it sends the body.
        if declared.isdigit() and int(declared) > self._max_bytes and b"expect" in headers:
            raise self._too_long()
        chunks: list[bytes] = []
        size, count, refused, more = 0, JsonCount(), None, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                break
            chunk, more = message.get("body", b""), message.get("more_body", False)
            size += len(chunk)
            if size > self._max_bytes:
                refused = refused or self._too_long()
            elif refused is None:
                chunks.append(chunk)
                refused = await self._counted(count, chunk)
            if refused:
                chunks.clear()
                if size > DRAIN_FACTOR * self._max_bytes:
                    break
        if refused:
            raise refused
        return b"".join(chunks)

    def _too_long(self) -> ApiError:
        return ApiError(
            413,
            f"the body is larger than this server's limit of {self._max_bytes:,} bytes; send less,"
            " or raise serve.max_body_bytes",
            code="body_too_large",
        )

    async def _counted(self, count: JsonCount, chunk: bytes) -> ApiError | None:
        """Count a chunk; returns the error if the body holds too many values."""
        for start in range(0, len(chunk), PIECE):
            if start:
                await asyncio.sleep(0)
            count.add(chunk[start : start + PIECE])
            if count.values > self._max_values or count.containers > MAX_CONTAINERS:
                return ApiError(
                    413,
                    f"the body holds more than {self._max_values:,} values, or more than"
                    f" {MAX_CONTAINERS:,} lists and objects; send it in parts, and long prompts as"
                    " text",
                    code="body_too_large",
                )
        return None


def allow_origins(app: FastAPI, origins: Sequence[str]) -> None:
    """Let pages of these origins call `app` from a browser. Added behind authentication, it answers
    before it: browsers ask for permission without a key.
    """
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # OpenAI's JavaScript client tells of itself in a dozen of them
        )
