"""`ingot ui`: the web application, its doors, and the server.

Read-only unless started with actions. A request is refused unless its Host is this server's (so
that no foreign name can be pointed at it), and unless it comes from this server's own pages.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import orjson
import uvicorn
from fastapi import FastAPI, Query, Request
from fastapi.responses import FileResponse, Response
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import ingot
from ingot.base.errors import IngotError
from ingot.base.progress import say
from ingot.base.server import is_loopback
from ingot.registry.local import LocalRegistry
from ingot.serve.http.connection import GracefulServer, http_config
from ingot.serve.http.listen import bound_socket, url_host
from ingot.serve.playground import FOLDER as PLAYGROUND
from ingot.ui.details import compared, details, examples, registry_state
from ingot.ui.models import ServedModels, models_router
from ingot.ui.runs import Axis, NoSuchRun, RunsFolder, curve, curve_keys

STATIC = Path(__file__).parent / "static"
ROWS_S = 1.5
"""How long a request for the table reads; what is left is read at the next one."""
BY_HAND = "by hand, in ingot ui"
MOST_COMPARED, MOST_POINTS, MOST_EXAMPLES = 50, 4000, 50
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
HEADERS = {
    b"content-security-policy": (
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
        b" connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"cross-origin-resource-policy": b"same-origin",
}


class Refused(Exception):
    """A request that is answered with a status and one line."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Doors:
    """Checks each request before anything else sees it, and adds the headers of every answer.

    Args:
        host: the address that is listened on.
        token: what acting needs, and reading from another machine; None: nothing acts.
    """

    def __init__(self, app: ASGIApp, host: str, token: str | None, *, acts: bool) -> None:
        self._app, self._host, self._token, self._acts = app, host, token, acts
        self._reads_need_token = not is_loopback(host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *HEADERS.items()]
            await send(message)

        try:
            self._check(scope, dict(scope["headers"]))
        except Refused as refused:
            await _answer({"error": str(refused)}, refused.status)(scope, receive, with_headers)
            return
        await self._app(scope, receive, with_headers)

    def _check(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        asked = headers.get(b"host", b"").decode("latin-1")
        name = host_name(asked)
        if not self._is_ours(name):
            raise Refused(
                403, f"this server is not called {name or 'nothing'}; use its address, or --host"
            )
        path, reads = scope["path"], scope["method"] in ("GET", "HEAD")
        origin = headers.get(b"origin", b"").decode("latin-1")
        if origin and origin.partition("://")[2] != asked:
            raise Refused(403, f"requests from {origin} are refused; open this server's own page")
        site = headers.get(b"sec-fetch-site", b"same-origin")
        if site not in (b"same-origin", b"none") and (path.startswith("/api/") or not reads):
            raise Refused(403, "requests from other sites are refused; open this server's own page")
        if not reads and not self._acts and not path.startswith("/api/models/"):
            raise Refused(403, "this server only shows; start it with --allow-actions to act")
        guarded = path.startswith("/api/") and self._reads_need_token
        if guarded or (not reads and self._acts and not path.startswith("/api/models/")):
            scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
            expected = (self._token or "").encode()
            if scheme.lower() != b"bearer" or not hmac.compare_digest(given.strip(), expected):
                raise Refused(401, "the token is missing or wrong; open the address that was told")

    def _is_ours(self, name: str) -> bool:
        """A loopback server answers to loopback names, another one to addresses and its own name:
        an attack by DNS needs a name of the attacker's.
        """
        if name in LOCAL_NAMES or name == self._host.lower():
            return True
        if is_loopback(self._host):
            return False
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name == socket.gethostname().lower()
        return True


def host_name(header: str) -> str:
    """The name in a Host header, without the port and the brackets of IPv6."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.rpartition(":")[0].lower() if ":" in header else header.lower()


class Named(BaseModel, extra="forbid"):
    """A registered name, and the version that the page shows as live (None: none; -1: any)."""

    name: str
    instead_of: int | None = -1


class Promotion(Named):
    """Which version becomes live."""

    version: int


def create_app(
    root: Path,
    *,
    host: str = "127.0.0.1",
    token: str | None = None,
    acts: bool = False,
    models: Sequence[str] = (),
) -> FastAPI:
    """The application that shows the runs under `root`.

    Args:
        token: what requests that act must carry; those that read too, unless `host` is loopback.
        models: addresses of `ingot serve`, for the playground.

    Raises:
        WrongInput: `root` is no folder, or as `ServedModels`.
    """
    runs = RunsFolder(root)
    app = FastAPI(title="ingot ui", version=ingot.__version__, openapi_url=None)
    registry = LocalRegistry(runs.root / "registry.sqlite")
    _reading_routes(app, runs, registry, acts=acts)
    _acting_routes(app, runs, registry)
    app.include_router(models_router(ServedModels(models)))

    @app.get("/")
    def index() -> Response:
        return FileResponse(STATIC / "index.html")

    app.mount("/static", StaticFiles(directory=STATIC))
    app.mount("/playground", StaticFiles(directory=PLAYGROUND))
    app.add_middleware(Doors, host=host, token=token, acts=acts)

    @app.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> Response:
        return _answer({"error": str(error)}, error.status)

    @app.exception_handler(IngotError)
    async def wrong(request: Request, error: IngotError) -> Response:
        return _answer({"error": str(error)}, 409)

    @app.exception_handler(NoSuchRun)
    async def unknown(request: Request, error: NoSuchRun) -> Response:
        return _answer({"error": f"there is no run {error} here; the list shows which are"}, 404)

    return app


def _reading_routes(app: FastAPI, runs: RunsFolder, registry: LocalRegistry, *, acts: bool) -> None:
    @app.get("/api/runs")
    def listed() -> Response:
        return _answer(
            {
                "root": str(runs.root),
                "version": ingot.__version__,
                "acts": acts,
                "runs": runs.rows(ROWS_S),
            }
        )

    @app.get("/api/run")
    def one(run: str) -> Response:
        with runs.lock:
            return _answer(details(run, runs.view(run), runs.metrics(run)))

    @app.get("/api/curves")
    def drawn(
        run: Annotated[list[str], Query()],
        key: Annotated[list[str] | None, Query()] = None,
        axis: Axis = "step",
        bands: bool = True,
        smoothing: Annotated[float, Query(ge=0, lt=1)] = 0.0,
        points: Annotated[int, Query(ge=2, le=MOST_POINTS)] = 800,
        low: float | None = None,
        high: float | None = None,
    ) -> Response:
        asked = run[:MOST_COMPARED]
        with runs.lock:
            files = {name: runs.metrics(name) for name in asked}
            known = curve_keys(list(files.values()))
            each = {name: runs.tokens_a_step(name) for name in asked if axis == "tokens"}
            found = {
                one: {
                    name: curve(
                        *(metrics, one, axis, each.get(name), points, low, high),
                        bands=bands,
                        smoothing=smoothing,
                    )
                    for name, metrics in files.items()
                }
                for one in (known if key is None else key)
            }
        return _answer({"keys": known, "left_out": len(run) - len(asked), "curves": found})

    @app.get("/api/compare")
    def beside(run: Annotated[list[str], Query()]) -> Response:
        asked = run[:MOST_COMPARED]
        with runs.lock:
            views = {name: runs.view(name) for name in asked}
            return _answer(compared(views, {name: runs.metrics(name) for name in asked}))

    @app.get("/api/data")
    def data(
        run: str,
        split: Literal["train", "validation"] = "train",
        first: Annotated[int, Query(ge=0)] = 0,
        count: Annotated[int, Query(ge=1, le=MOST_EXAMPLES)] = 5,
    ) -> Response:
        return _answer(examples(runs.run(run), split, first, count, runs.root))

    @app.get("/api/registry")
    def registered() -> Response:
        safe = runs.within(registry.path)
        return _answer({"names": registry_state(registry) if safe else [], "acts": acts})


def _acting_routes(app: FastAPI, runs: RunsFolder, registry: LocalRegistry) -> None:
    def known() -> LocalRegistry:
        if not runs.within(registry.path) or not registry.path.is_file():
            raise Refused(404, f"there is no registry in {runs.root}")
        return registry

    def check_seen(body: Named) -> None:
        live = registry.live(body.name)
        number = None if live is None else live.number
        if body.instead_of not in (-1, number):
            now = "nothing" if number is None else f"v{number}"
            raise Refused(
                409, f"{now} is live as {body.name} by now, not what the page showed; look again"
            )

    @app.post("/api/registry/promote")
    def promote(body: Promotion) -> Response:
        version = known().version(body.name, body.version)
        registry.check(version, checksums=True)
        check_seen(body)
        registry.point(body.name, version.number, BY_HAND, instead_of=body.instead_of)
        return _answer({"live": version.number})

    @app.post("/api/registry/rollback")
    def back(body: Named) -> Response:
        known()
        check_seen(body)
        return _answer({"live": registry.rollback(body.name, f"rolled back {BY_HAND}").number})


def _answer(value: Any, status: int = 200) -> Response:
    content = orjson.dumps(
        value, default=_plain, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    )
    return Response(
        content, status, media_type="application/json", headers={"Cache-Control": "no-store"}
    )


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else list(value)


def serve_ui(
    root: Path,
    *,
    host: str,
    port: int,
    acts: bool,
    models: Sequence[str],
) -> None:
    """Serve until SIGTERM or Ctrl-C.

    Raises:
        WrongInput: no such folder, or an address that is not this machine's.
        Failed: the port is taken.
    """
    token = secrets.token_urlsafe(24) if acts or not is_loopback(host) else None
    app = create_app(root, host=host, token=token, acts=acts, models=models)
    with bound_socket(host, port, "--host", "--port") as listener:
        shown = url_host(socket.gethostname() if host in ("0.0.0.0", "::") else host)
        address = f"http://{shown}:{listener.getsockname()[1]}/"
        server = Server(http_config(app, 2), f"showing {root} at {address}")
        if token:
            say(f"with its token: {address}#token={token}")
        server.run(sockets=[listener])


class Server(GracefulServer):
    """Says where it listens once it does."""

    def __init__(self, config: uvicorn.Config, greeting: str) -> None:
        super().__init__(config)
        self._greeting = greeting

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        say(self._greeting)
