"""Sending answers while watching the client: whoever hangs up is no longer computed for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from ingot.models.generation.request import Completion
from ingot.serve.engine import Ticket
from ingot.serve.refused import Refused

Answer = TypeVar("Answer")


async def completions(ticket: Ticket, request: Request) -> list[Completion]:
    """All answers of a ticket; see `awaited`."""
    return await awaited(ticket, request, ticket.completions())


async def awaited(ticket: Ticket, request: Request, work: Coroutine[Any, Any, Answer]) -> Answer:
    """What `work` makes of a ticket's pieces. When the client goes away first, the ticket is
    cancelled.

    Raises:
        Refused: 499 for a client that went away, or what the engine says.
    """
    answers = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait((answers, gone), return_when=asyncio.FIRST_COMPLETED)
        if not answers.done():
            raise Refused(499, "the client went away")
        return answers.result()
    finally:
        await _end(ticket, answers, gone)


class EventStream(Response):
    """Server-sent events: each chunk one `data:` line of JSON, `[DONE]` at the end, an error as a
    chunk of its own.
    """

    media_type = "text/event-stream"

    def __init__(self, ticket: Ticket, chunks: Callable[[], AsyncIterator[dict[str, Any]]]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._ticket, self._chunks = ticket, chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writing = asyncio.ensure_future(self._write(send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((writing, gone), return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
        finally:
            await _end(self._ticket, writing, gone)

    async def _write(self, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        try:
            async for chunk in self._chunks():
                await self._send(send, json.dumps(chunk, ensure_ascii=False, separators=(",", ":")))
            await self._send(send, "[DONE]")
        except Refused as error:
            await self._send(send, json.dumps(error.body()))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, data: str) -> None:
        await send(
            {"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True}
        )


async def _disconnected(receive: Receive) -> None:
    """Returns when the client has hung up; to be awaited after the body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(ticket: Ticket, *tasks: asyncio.Future[Any]) -> None:
    ticket.cancel()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
