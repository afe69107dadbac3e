"""How answers are sent: whole or as events, while watching for clients that disconnect."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from fastapi import Request as HTTPRequest
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from ingot.models.generation.request import Completion
from ingot.serve.http.errors import ApiError
from ingot.serve.native.engine import Ticket

Answer = TypeVar("Answer")
# Parts of an answer's JSON that are written before other requests get their turn.
PARTS_AT_ONCE = 1024


async def json_answer(content: Mapping[str, Any]) -> Response:
    """An answer that may be long, written part by part, so that others get theirs meanwhile."""
    writer = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    parts: list[str] = []
    for part in writer.iterencode(content):
        parts.append(part)
        if len(parts) % PARTS_AT_ONCE == 0:
            await asyncio.sleep(0)
    return Response("".join(parts), media_type="application/json")


async def completions(ticket: Ticket, request: HTTPRequest) -> list[Completion]:
    """All completions of a ticket; raises as `run_unless_disconnected` does."""
    return await run_unless_disconnected(ticket, request, ticket.completions())


async def run_unless_disconnected(
    ticket: Ticket, request: HTTPRequest, work: Coroutine[Any, Any, Answer]
) -> Answer:
    """The result of `work` on a ticket. If the client disconnects first, the ticket is cancelled.

    Raises:
        ApiError: 499 for a client that disconnected, or the engine's error.
    """
    answers = asyncio.ensure_future(work)
    disconnected = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait((answers, disconnected), return_when=asyncio.FIRST_COMPLETED)
        if not answers.done():
            raise ApiError(499, "the client disconnected")
        return answers.result()
    finally:
        await _cancel_all(ticket, answers, disconnected)


class EventStream(Response):
    """A response of server-sent events: each chunk one `data:` line of JSON, then `[DONE]`; an
    error is sent as a chunk. `named`: each chunk is an event of its `type`, and the last one is the
    end.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        ticket: Ticket,
        chunks: Callable[[], AsyncIterator[dict[str, Any]]],
        *,
        named: bool = False,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._ticket, self._chunks, self._named = ticket, chunks, named

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writing = asyncio.ensure_future(self._write(send))
        disconnected = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((writing, disconnected), return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
        finally:
            await _cancel_all(self._ticket, writing, disconnected)

    async def _write(self, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        try:
            async for chunk in self._chunks():
                data = json.dumps(chunk, ensure_ascii=False, separators=(",", ":"))
                await self._send(send, data, chunk["type"] if self._named else None)
            if not self._named:
                await self._send(send, "[DONE]")
        except ApiError as error:
            await self._send(send, json.dumps(error.body()))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, data: str, event: str | None = None) -> None:
        lines = f"data: {data}\n\n" if event is None else f"event: {event}\ndata: {data}\n\n"
        await send({"type": "http.response.body", "body": lines.encode(), "more_body": True})


async def _disconnected(receive: Receive) -> None:
    """Return when the client has disconnected; awaited once the body is read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel_all(ticket: Ticket, *tasks: asyncio.Future[Any]) -> None:
    """Cancel a ticket and the tasks around it, and wait for the tasks."""
    ticket.cancel()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
