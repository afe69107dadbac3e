"""A proxy with Vertex AI's prediction protocol in front of another engine's OpenAI server: health,
predictions, and OpenAI's routes passed through.

Vertex AI could expose all routes itself (`invoke_route_prefix`), but only on dedicated endpoints
and instead of predictions, so that clients would have to know which engine answers.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

import ingot
from ingot.config.sections.deployment import Serve
from ingot.serve.http.bodies import PredictBody, PromptBounds
from ingot.serve.http.connection import http_config
from ingot.serve.http.errors import REFUSED, ApiError, install_error_handlers
from ingot.serve.http.listen import bind_error, health_routes
from ingot.serve.http.middleware import MAX_VALUES, ApiKeyAuth, BodyLimit, allow_origins
from ingot.serve.http.vertex import PREDICT_TOKENS

ANSWER_S = 600.0
_STOP_S = 5.0


@dataclass(frozen=True)
class EngineProxy:
    """The routes in front of another engine's server, which calls its model `name`."""

    client: httpx.AsyncClient
    settings: Serve
    name: str
    bounds: PromptBounds

    async def health(self) -> Response:
        try:
            status = (await self.client.get("/health", timeout=5.0)).status_code
        except httpx.HTTPError:
            status = 503
        return JSONResponse(
            {"status": "ok" if status == 200 else "failing", "model": self.name},
            200 if status == 200 else 503,
        )

    async def predict(self, body: PredictBody) -> dict[str, Any]:
        prompts = [item.prompt for item in body.instances]
        self.bounds.check(prompts)
        # What was asked for, and what engines have other defaults of.
        sent = {"temperature", "top_p", "stop"} | body.parameters.model_fields_set
        parameters = body.parameters.model_dump(include=sent, exclude_none=True)
        most = self.settings.max_tokens
        if parameters.setdefault("max_tokens", min(PREDICT_TOKENS, most)) > most:
            raise ApiError(
                400,
                f"max_tokens {parameters['max_tokens']} is over this server's limit of {most};"
                " lower it, or raise serve.max_tokens",
            )
        completions = {"model": self.name, "prompt": prompts, **parameters}
        answer = await _post(self.client, "/v1/completions", completions)
        choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
        return {"predictions": [choice["text"] for choice in choices]}

    async def forward(self, request: Request) -> Response:
        """Any other request as it is, its answer as it arrives. Raises ApiError 400 for prompts
        that the engine could only refuse, after it has tokenised them.
        """
        body = await request.body()
        self._check(body)
        kept = {
            header: value
            for header in ("content-type", "accept")
            if (value := request.headers.get(header))
        }
        forwarded = self.client.build_request(
            request.method, request.url.path, content=body, headers=kept
        )
        try:
            answer = await self.client.send(forwarded, stream=True)
        except httpx.HTTPError as error:
            raise _unavailable(error) from None
        return StreamingResponse(
            _stream(answer), answer.status_code, media_type=answer.headers.get("content-type")
        )

    def _check(self, body: bytes) -> None:
        try:
            content = json.loads(body)
        except (ValueError, RecursionError):
            return  # the engine says what is wrong with it
        if not isinstance(content, dict):
            return
        for field in ("prompt", "input"):
            prompts = content.get(field)
            if isinstance(prompts, list) and not all(type(item) is int for item in prompts):
                self.bounds.check(prompts)
            elif isinstance(prompts, str):
                self.bounds.check([prompts])
        messages = content.get("messages")
        if isinstance(messages, list):
            self.bounds.check_characters(sum(map(_characters, messages)), "the chat")


def _characters(message: Any) -> int:
    """Characters of a chat's message, which may come in parts."""
    content = message.get("content") if isinstance(message, dict) else None
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = (part.get("text") for part in parts if isinstance(part, dict))
    return sum(len(text) for text in texts if isinstance(text, str))


def create_proxy(
    url: str,
    settings: Serve,
    name: str,
    bounds: PromptBounds,
    *,
    key: str | None,
    environ: Mapping[str, str],
) -> FastAPI:
    """The application in front of the server at `url`, which calls its model `name`."""
    client = httpx.AsyncClient(
        base_url=url,
        timeout=httpx.Timeout(ANSWER_S, connect=10.0),
        trust_env=False,
        limits=httpx.Limits(max_connections=None),
    )
    proxy = EngineProxy(client, settings, name, bounds)
    app = FastAPI(
        title="ingot", version=ingot.__version__, docs_url=None, redoc_url=None, responses=REFUSED
    )
    install_error_handlers(app)
    open_routes = health_routes(environ)
    for route in open_routes:
        app.add_api_route(route, proxy.health, methods=["GET"])
    predict = environ.get("AIP_PREDICT_ROUTE") or "/predict"
    app.add_api_route(predict, proxy.predict, methods=["POST"])
    app.add_api_route(
        "/v1/{path:path}", proxy.forward, methods=["GET", "POST"], include_in_schema=False
    )
    app.add_middleware(
        BodyLimit,
        max_bytes=settings.max_body_bytes,
        max_values=MAX_VALUES + bounds.positions,
    )
    if key is not None:
        app.add_middleware(ApiKeyAuth, key=key, open_routes=open_routes)
    allow_origins(app, settings.cors)
    return app


async def _post(client: httpx.AsyncClient, route: str, body: Mapping[str, Any]) -> Any:
    try:
        answer = await client.post(route, json=body)
    except httpx.HTTPError as error:
        raise _unavailable(error) from None
    try:
        content = answer.json()
        reason = None if answer.is_success else content["error"]["message"]
    except (ValueError, KeyError, TypeError):
        reason = f"the engine answered {answer.status_code}"
    if reason is not None:
        raise ApiError(answer.status_code if answer.is_error else 502, str(reason))
    return content


async def _stream(answer: httpx.Response) -> AsyncIterator[bytes]:
    """The response's bytes as they arrive; if the client disconnects, so does the proxy."""
    try:
        async for chunk in answer.aiter_raw():
            yield chunk
    finally:
        await answer.aclose()


def _unavailable(error: httpx.HTTPError) -> ApiError:
    return ApiError(
        503,
        f"the engine behind this server does not answer ({type(error).__name__}); try again",
        headers={"Retry-After": "5"},
    )


@contextlib.contextmanager
def running_proxy(
    listener: socket.socket,
    url: str,
    settings: Serve,
    name: str,
    bounds: PromptBounds,
    key: str | None,
    environ: Mapping[str, str],
) -> Iterator[None]:
    """Run the proxy in a thread for the length of the block; running requests get _STOP_S at its
    end.

    Raises:
        Failed: another server listened at the address first.
    """
    try:
        listener.listen()  # connections are accepted from here on, before the thread runs
    except OSError as error:
        raise bind_error(error, *listener.getsockname()[:2]) from None
    app = create_proxy(url, settings, name, bounds, key=key, environ=environ)
    server = uvicorn.Server(http_config(app, int(_STOP_S)))
    thread = threading.Thread(
        target=server.run, kwargs={"sockets": [listener]}, name="ingot-proxy", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join(_STOP_S + 1)
