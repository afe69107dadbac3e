"""`ingot serve`: open the model, listen, answer until SIGTERM or Ctrl-C, finish what runs, leave.
Other engines run as processes of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute

import ingot
from ingot.base.progress import say
from ingot.config.sections.deployment import Serve
from ingot.serve.engines.triton import render_triton, serve_triton
from ingot.serve.engines.vllm import render_vllm, serve_vllm
from ingot.serve.http import openai, vertex
from ingot.serve.http.errors import install_error_handlers
from ingot.serve.http.listen import (
    address,
    bind_error,
    bound_socket,
    fetched_model_folder,
    health_routes,
    read_api_key,
    shown,
)
from ingot.serve.http.middleware import ApiKeyAuth, BodySizeLimit, RequestMetrics, ServerMetrics
from ingot.serve.http.service import Service
from ingot.serve.native.engine import ServingEngine
from ingot.serve.native.model import check_model_folder, load


def create_app(
    service: Service, metrics: ServerMetrics, *, key: str | None, environ: Mapping[str, str]
) -> FastAPI:
    """All routes of one served model. `key`: what clients must send, None when nobody is asked."""
    app = FastAPI(title="ingot", version=ingot.__version__, docs_url=None, redoc_url=None)
    install_error_handlers(app)
    routers = [openai.router(service), vertex.router(service, environ)]
    for router in routers:
        app.include_router(router)

    async def health() -> JSONResponse:
        healthy = service.engine.healthy
        status: dict[str, Any] = {"status": "ok" if healthy else "failing", "model": service.name}
        return JSONResponse(status, 200 if healthy else 503)

    open_routes = health_routes(environ)
    for route in open_routes:
        app.add_api_route(route, health, methods=["GET"])

    @app.get("/metrics")
    async def scrape() -> Response:
        return Response(metrics.text(), media_type=metrics.content_type)

    # Paths with a name in them are left out of the counting: clients could make up any number of
    # those.
    routes = [
        *open_routes,
        "/metrics",
        *(
            route.path
            for router in routers
            for route in router.routes
            if isinstance(route, APIRoute)
        ),
    ]
    # The last one added is the first to see a request.
    app.add_middleware(BodySizeLimit, max_bytes=service.settings.max_body_bytes)
    if key is not None:
        app.add_middleware(ApiKeyAuth, key=key, open_routes=open_routes)
    app.add_middleware(RequestMetrics, metrics=metrics, routes=routes)
    return app


# Seconds that running requests get to finish in once the server is asked to stop.
GRACE_S = 10.0


def serve(target_folder: Path, settings: Serve, name: str) -> None:
    """Serve the model in `target_folder` under `name`; blocks until SIGTERM or SIGINT, then
    returns.

    Raises:
        WrongInput: no model or no tokenizer there, an address that is not this machine's, a key
            that is not set, no such engine in `serve.python`.
        Failed: the port is taken, or the engine died.
    """
    if settings.engine == "vllm":
        serve_vllm(target_folder, settings, name)
        return
    if settings.engine == "triton":
        serve_triton(target_folder, settings, name)
        return
    key = read_api_key(settings.api_key)
    host, port = address(settings, os.environ)
    # The port comes first: a model that takes minutes to load should not find it taken then.
    with (
        bound_socket(host, port) as listener,
        fetched_model_folder(target_folder, os.environ) as folder,
    ):
        loaded = load(folder, any_template=settings.any_template, engine=settings.engine)
        metrics = ServerMetrics()
        engine = ServingEngine(
            loaded.worker(settings.max_batch),
            metrics,
            max_batch=settings.max_batch,
            max_queue=settings.max_queue,
        )
        app = create_app(
            Service(name, loaded, engine, settings), metrics, key=key, environ=os.environ
        )
        UvicornServer(
            app, engine, f"serving {name} at http://{shown(host)}:{listener.getsockname()[1]}"
        ).run(sockets=[listener])


def render(folder: Path, settings: Serve, name: str) -> str:
    """What `serve` would start, as text: another engine's files and command, or that this process
    answers itself. No secret is in it.

    Raises:
        WrongInput: a folder that the engine cannot serve.
    """
    if settings.engine == "vllm":
        return render_vllm(folder, settings, name)
    if settings.engine == "triton":
        return render_triton(folder, settings, name)
    kind = check_model_folder(folder, any_template=settings.any_template).kind
    return (
        f"# nothing is started: this process would serve {name}, a {kind} in {folder}, at"
        f" http://{shown(settings.host)}:{settings.port}\n"
    )


class UvicornServer(uvicorn.Server):
    """uvicorn with our end: running requests get GRACE_S, what is left then is answered with 503,
    and the exit is clean.
    """

    def __init__(self, app: FastAPI, engine: ServingEngine, greeting: str) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_keep_alive=75,
                timeout_graceful_shutdown=int(GRACE_S) + 2,
            )
        )
        self._engine, self._greeting = engine, greeting

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except OSError as error:  # another server that was loading, too, listened first
            raise bind_error(error, *(sockets or [])[0].getsockname()[:2]) from None
        self._engine.start()
        say(self._greeting)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        deadline = asyncio.get_running_loop().call_later(GRACE_S, self._engine.abort)
        try:
            await super().shutdown(sockets)
        finally:
            deadline.cancel()
            await asyncio.to_thread(self._engine.stop)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's own, but the signal is not raised again afterwards: to be stopped is how a
        server ends well.
        """
        before = {
            number: signal.signal(number, self.handle_exit)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
