"""The served models that the playground talks with. Requests go through this server to the
addresses that it was started with and to no other, so that no page needs another origin.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal

import httpx
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from ingot.base.server import certificates

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
    """The addresses, in the order given. Raises WrongInput as `certificates`."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.addresses = [address.rstrip("/").removesuffix("/v1") for address in addresses]
        self.client = httpx.AsyncClient(
            timeout=httpx.Timeout(ANSWER_S, connect=CONNECT_S),
            trust_env=False,  # asks no proxy
            verify=certificates(*self.addresses),
        )

    async def look(self, number: int, key: str | None = None) -> dict[str, Any]:
        """What is served at an address, which may need its key: name, kind, or the error."""
        address = self.addresses[number]
        about: dict[str, Any] = {"number": number, "address": address, "name": address}
        try:
            url, headers = f"{address}/v1/models", authorization(key)
            found = await self.client.get(url, headers=headers, timeout=LOOK_S)
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


def authorization(key: str | None) -> dict[bytes, bytes]:
    """The header of a model's key, in the bytes in which the browser gave it as `X-Model-Key`."""
    return {b"Authorization": f"Bearer {key}".encode("latin-1")} if key else {}


def models_router(models: ServedModels) -> APIRouter:
    """`GET /api/models`, `GET /api/models/N` and `POST /api/models/N/ROUTE`."""
    routes = APIRouter(prefix="/api/models")

    @routes.get("")
    async def listed() -> dict[str, Any]:
        found = await asyncio.gather(*map(models.look, range(len(models.addresses))))
        return {"models": found}

    def unknown(number: int) -> Response | None:
        if 0 <= number < len(models.addresses):
            return None
        return JSONResponse({"error": f"there is no model {number}; see --model"}, 404)

    @routes.get("/{number}", response_model=None)
    async def again(number: int, request: Request) -> Response | dict[str, Any]:
        key = request.headers.get("x-model-key")
        return unknown(number) or await models.look(number, key)

    @routes.post("/{number}/{route}")
    async def ask(number: int, route: Route, request: Request) -> Response:
        if missing := unknown(number):
            return missing
        body = await request.body()
        if len(body) > MOST_BYTES:
            return JSONResponse({"error": f"the request is over {MOST_BYTES:,} bytes"}, 413)
        key = request.headers.get("x-model-key")
        headers = {b"Content-Type": b"application/json", **authorization(key)}
        sent = models.client.build_request(
            "POST", models.addresses[number] + ROUTES[route], content=body, headers=headers
        )
        return await _passed_on(models.client, sent, models.addresses[number])

    return routes


async def _passed_on(client: httpx.AsyncClient, sent: httpx.Request, address: str) -> Response:
    """What the model at `address` answers, streamed where it streams."""
    try:
        answer = await client.send(sent, stream=True)
    except httpx.HTTPError as error:
        line = f"{address} does not answer ({type(error).__name__}); is `ingot serve` running?"
        return JSONResponse({"error": line}, 502)

    broke_off = f"the answer of {address} broke off"
    kind = answer.headers.get("content-type", "application/json")
    if not kind.startswith("text/event-stream"):
        # What is not streamed is short, and half of it is no JSON: all of it or none.
        try:
            return Response(await answer.aread(), answer.status_code, media_type=kind)
        except httpx.HTTPError as error:
            return JSONResponse({"error": f"{broke_off} ({type(error).__name__})"}, 502)
        finally:
            await answer.aclose()

    async def pieces() -> AsyncIterator[bytes]:
        # Closed when the browser goes away, which stops the model's work.
        try:
            async for piece in answer.aiter_raw():
                yield piece
        except httpx.HTTPError as error:
            line = f"{broke_off} ({type(error).__name__})"
            yield f"\n\ndata: {json.dumps({'error': line})}\n\n".encode()
        finally:
            await answer.aclose()

    return StreamingResponse(pieces(), answer.status_code, media_type=kind)
