"""The web application: routes, errors and guards put together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute

import ingot
from ingot.serve import openai, refused, vertex
from ingot.serve.guard import BodyLimit, Counted, KeyRequired
from ingot.serve.metrics import Metrics
from ingot.serve.service import Service


def create_app(
    service: Service, metrics: Metrics, *, key: str | None, environ: Mapping[str, str]
) -> FastAPI:
    """All routes of one served model. `key`: what clients must send, None when nobody is asked."""
    app = FastAPI(title="ingot", version=ingot.__version__, docs_url=None, redoc_url=None)
    refused.install(app)
    routers = [openai.router(service), vertex.router(service, environ)]
    for router in routers:
        app.include_router(router)

    async def health() -> JSONResponse:
        healthy = service.engine.healthy
        status: dict[str, Any] = {"status": "ok" if healthy else "failing", "model": service.name}
        return JSONResponse(status, 200 if healthy else 503)

    open_routes = vertex.health_routes(environ)
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
    app.add_middleware(BodyLimit, max_bytes=service.settings.max_body_bytes)
    if key is not None:
        app.add_middleware(KeyRequired, key=key, open_routes=open_routes)
    app.add_middleware(Counted, metrics=metrics, routes=routes)
    return app
