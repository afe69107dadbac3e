"""The served models that the playground talks with. Requests go through this server to the
addresses that it was started with and to no other, so that no page needs another origin.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal

import httpx
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

Route = Literal["chat", "completions", "embeddings", "predict"]
ROUTES: dict[Route, str] = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "embeddings": "/v1/embeddings",
    "predict": "/predict",
}
LOOK_S, CONNECT_S, ANSWER_S = 2.0, 5.0, 600.0
MOST_BYTES = 1 << 20


class ServedModels:
    """The addresses, in the order given."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.addresses = [address.rstrip("/").removesuffix("/v1") for address in addresses]
        self.client = httpx.AsyncClient(
            timeout=httpx.Timeout(ANSWER_S, connect=CONNECT_S), trust_env=False
        )

    async def look(self, number: int) -> dict[str, Any]:
        """What is served at an address: name, kind, or the error."""
        address = self.addresses[number]
        about: dict[str, Any] = {"number": number, "address": address, "name": address}
        try:
            found = await self.client.get(f"{address}/v1/models", timeout=LOOK_S)
            if found.status_code == httpx.codes.UNAUTHORIZED:
                return {**about, "needs_key": True}
            model = found.json()["data"][0]
            return {
                **about,
                **{key: model.get(key) for key in ("kind", "chat", "tasks")},
                "name": model["id"],
            }
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            return {**about, "error": f"{address} does not answer ({type(error).__name__})"}


def models_router(models: ServedModels) -> APIRouter:
    """`GET /api/models`, and `POST /api/models/N/ROUTE`."""
    routes = APIRouter(prefix="/api/models")

    @routes.get("")
    async def listed() -> dict[str, Any]:
        found = await asyncio.gather(*map(models.look, range(len(models.addresses))))
        return {"models": found}

    @routes.post("/{number}/{route}")
    async def ask(number: int, route: Route, request: Request) -> Response:
        if not 0 <= number < len(models.addresses):
            return JSONResponse({"error": f"there is no model {number}; see --model"}, 404)
        body = await request.body()
        if len(body) > MOST_BYTES:
            return JSONResponse({"error": f"the request is over {MOST_BYTES:,} bytes"}, 413)
        headers = {"Content-Type": "application/json"}
        if key := request.headers.get("x-model-key"):
            headers["Authorization"] = f"Bearer {key}"
        sent = models.client.build_request(
            "POST", models.addresses[number] + ROUTES[route], content=body, headers=headers
        )
        try:
            answer = await models.client.send(sent, stream=True)
        except httpx.HTTPError as error:
            address = models.addresses[number]
            line = f"{address} does not answer ({type(error).__name__}); is `ingot serve` running?"
            return JSONResponse({"error": line}, 502)

        async def pieces() -> AsyncIterator[bytes]:
            # Closed when the browser goes away, which stops the model's work.
            try:
                async for piece in answer.aiter_raw():
                    yield piece
            finally:
                await answer.aclose()

        kind = answer.headers.get("content-type", "application/json")
        return StreamingResponse(pieces(), answer.status_code, media_type=kind)

    return routes
