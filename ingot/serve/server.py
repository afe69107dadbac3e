"""`ingot serve`: loads the model and answers HTTP requests until SIGTERM or Ctrl-C; running
requests are finished first. Other engines run as child processes.
"""

from __future__ import annotations

import asyncio
import gc
import math
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute

import ingot
from ingot.base.progress import say
from ingot.config.sections.deployment import Serve
from ingot.models.device import is_slow_in_bf16, pick_device
from ingot.serve import playground
from ingot.serve.engines.triton import render_triton, serve_triton
from ingot.serve.engines.vllm import render_vllm, serve_vllm
from ingot.serve.http import embeddings, openai, responses, vertex
from ingot.serve.http.connection import GracefulServer, http_config
from ingot.serve.http.errors import REFUSED, install_error_handlers
from ingot.serve.http.listen import (
    bind_error,
    bound_socket,
    fetched_model_folder,
    health_routes,
    listen_address,
    read_api_key,
    url_host,
)
from ingot.serve.http.middleware import (
    MAX_VALUES,
    ApiKeyAuth,
    BodyLimit,
    RequestMetrics,
    ServerMetrics,
    allow_origins,
)
from ingot.serve.http.service import Service
from ingot.serve.native.engine import ServingEngine
from ingot.serve.native.folder import check_model_folder
from ingot.serve.native.model import load_in_a_thread


def create_app(
    service: Service, metrics: ServerMetrics, *, key: str | None, environ: Mapping[str, str]
) -> FastAPI:
    """The web application of one served model. `key`: the API key clients must send, None for
    none.
    """
    app = FastAPI(title="ingot", version=ingot.__version__, redoc_url=None, responses=REFUSED)
    install_error_handlers(app)
    routers = [
        openai.router(service),
        responses.router(service),
        embeddings.router(service),
        vertex.router(service, environ),
        playground.router(),
    ]
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

    # Routes with a parameter in their path count as `other`: clients could send any number of
    # different paths.
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
    # The middleware that is added last sees a request first.
    app.add_middleware(
        BodyLimit,
        max_bytes=service.settings.max_body_bytes,
        max_values=MAX_VALUES + service.bounds.positions,
    )
    if key is not None:
        open_routes = [*open_routes, *playground.ROUTES]
        app.add_middleware(ApiKeyAuth, key=key, open_routes=open_routes)
    allow_origins(app, service.settings.cors)
    app.add_middleware(RequestMetrics, metrics=metrics, routes=routes)
    return app


def serve(target_folder: Path, settings: Serve, name: str, version: int | None = None) -> None:
    """Serve the model in `target_folder` under `name` until SIGTERM or SIGINT. `version`: of a
    registered one.

    Raises:
        WrongInput: no model or no tokenizer in the folder, an address that is not this machine's, a
            key that is not set, or an engine that `serve.python` does not have.
        Failed: the port is taken, or the engine's process died.
    """
    if settings.engine == "vllm":
        serve_vllm(target_folder, settings, name)
        return
    if settings.engine == "triton":
        serve_triton(target_folder, settings, name)
        return
    key = read_api_key(settings.api_key)
    host, port = listen_address(settings, os.environ)
    # The port is bound first, so that a taken port is an error before minutes of loading.
    with (
        bound_socket(host, port) as listener,
        fetched_model_folder(target_folder, os.environ) as folder,
    ):
        loaded = load_in_a_thread(
            folder,
            any_template=settings.any_template,
            engine=settings.engine,
            compute=settings.compute,
            pack=settings.pack,
        )
        if loaded.packed:
            said = "weights are packed, which changes none of them (serve.pack)"
            if loaded.compute == "bf16":
                said += "; answers are computed in bf16, in float32 with serve.compute=fp32"
            say(said)
        if loaded.compute == "bf16" and is_slow_in_bf16(pick_device()):
            say("bf16 is many times slower than float32 on this processor; set serve.compute=fp32")
        metrics = ServerMetrics()
        engine = ServingEngine(
            loaded.serving_worker(
                settings.max_batch, settings.prefix_cache_mb, eager=settings.eager
            ),
            metrics,
            max_batch=settings.max_batch,
            max_queue=settings.max_queue,
        )
        app = create_app(
            Service(name, loaded, engine, settings, version), metrics, key=key, environ=os.environ
        )
        # Exclude loaded objects from garbage collection: a collection that visits all of them takes
        # long enough to delay requests noticeably.
        gc.collect()
        gc.freeze()
        greeting = f"serving {name} at http://{url_host(host)}:{listener.getsockname()[1]}"
        UvicornServer(app, engine, greeting, settings.finish_s).run(sockets=[listener])


def render(folder: Path, settings: Serve, name: str) -> str:
    """What `serve` would start, as text: another engine's files and command, or a note that this
    process would answer. It contains no secret.

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
        f" http://{url_host(settings.host)}:{settings.port}\n"
    )


class UvicornServer(GracefulServer):
    """uvicorn with our shutdown: running requests get `finish_s` seconds, the rest is answered with
    503, and the process exits normally.
    """

    def __init__(self, app: FastAPI, engine: ServingEngine, greeting: str, finish_s: float) -> None:
        super().__init__(http_config(app, math.ceil(finish_s) + 2))
        self._engine, self._greeting, self._finish_s = engine, greeting, finish_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except OSError as error:  # another server, loading at the same time, listened first
            raise bind_error(error, *(sockets or [])[0].getsockname()[:2]) from None
        self._engine.start()
        say(self._greeting)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        deadline = asyncio.get_running_loop().call_later(self._finish_s, self._engine.abort)
        try:
            await super().shutdown(sockets)
        finally:
            deadline.cancel()
            await asyncio.to_thread(self._engine.stop)
