"""`POST /v1/responses`, as OpenAI's, for texts and functions. A request is answered as the chat it
stands for. Nothing is stored: each request brings its whole conversation.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ingot.models.generation.request import CompletionChunk
from ingot.serve.http.answers import EventStream, json_answer, run_unless_disconnected
from ingot.serve.http.chat import ChatBody
from ingot.serve.http.errors import ApiError
from ingot.serve.http.responsebody import ResponsesBody
from ingot.serve.http.service import Service
from ingot.serve.native.engine import Ticket
from ingot.serve.native.toolcalls import MarkedText, ToolCallDelta

Event = dict[str, Any]


def router(service: Service) -> APIRouter:
    """The routes under `/v1/responses`."""
    routes = APIRouter(prefix="/v1/responses")

    @routes.post("")
    @routes.post("/", include_in_schema=False)
    async def respond(body: ResponsesBody, request: Request) -> Response:
        return await _respond(service, body, request)

    @routes.api_route("/{name:path}", methods=["GET", "POST", "DELETE"], include_in_schema=False)
    async def stored(name: str) -> Response:
        raise ApiError(
            404,
            "responses are not stored by this server; keep what POST /v1/responses answers, and"
            " send the conversation as `input`",
        )

    return routes


async def _respond(service: Service, body: ResponsesBody, request: Request) -> Response:
    """The response to a request, whole or as events."""
    service.check_generates_text(body.model)
    chat = body.chat()
    prompt = await service.encode_chat(chat)
    ticket = service.submit(
        [prompt],
        body,
        max_tokens=body.max_output_tokens,
        called="max_output_tokens",
        constraint=await service.chat_constraint(chat),
        chat=chat,
    )
    writer = ResponseWriter(service, body, chat, len(prompt))
    if body.stream:
        return EventStream(ticket, lambda: _events(ticket, writer), named=True)

    async def whole() -> dict[str, Any]:
        async for _ in _events(ticket, writer):
            pass
        return writer.response

    answer = await run_unless_disconnected(ticket, request, whole())
    return await json_answer(answer)


async def _events(ticket: Ticket, writer: ResponseWriter) -> AsyncIterator[Event]:
    """All events of a response, numbered. An error ends it as a failed one if it has begun."""
    number = 0
    try:
        for event in writer.begin():
            yield {**event, "sequence_number": (number := number + 1) - 1}
        async for _, piece in ticket.pieces():
            for event in writer.push(piece):
                yield {**event, "sequence_number": (number := number + 1) - 1}
    except ApiError as error:
        if not writer.streamed:
            raise
        yield {**writer.failed(error), "sequence_number": number}


class ResponseWriter:
    """One response while it is written: its items, and the events that tell of them. Text is an
    item of its own before and after each call.
    """

    def __init__(
        self, service: Service, body: ResponsesBody, chat: ChatBody, prompt_tokens: int
    ) -> None:
        self.streamed = body.stream
        self._read, self._cached = prompt_tokens, 0
        self._items: list[dict[str, Any]] = []
        self._calls = service.call_parser(chat)
        self._marked = MarkedText({} if self._calls is None else service.tool_markers())
        self.response: dict[str, Any] = {
            "id": _id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "model": service.name,
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
            **body.echoed(),
        }

    def begin(self) -> list[Event]:
        """The events before any text."""
        return [self._about_all("created"), self._about_all("in_progress")]

    def push(self, piece: CompletionChunk) -> list[Event]:
        """The events of the next piece of the model's answer."""
        text, calls = piece.text, list[ToolCallDelta]()
        self._cached += piece.cached or 0
        if self._calls is not None:
            text, calls = self._calls.push(self._marked.push(piece))
        events = self._add(text, calls)
        if piece.finish is None:
            return events
        if self._calls is not None:
            events += self._add(*self._calls.finish())
        if not self._items:  # an empty answer is one of empty text
            events += self._open_text()
        cut = piece.finish == "length"
        events += self._close("incomplete" if cut else "completed")
        self.response["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
        return [*events, self._end("incomplete" if cut else "completed", piece.generated)]

    def failed(self, error: ApiError) -> Event:
        """The event of a response that an error ends."""
        self.response["error"] = {"code": "server_error", "message": error.message}
        for item in self._items[-1:]:
            item["status"] = "incomplete"
        self.response["output"] = self._items
        self.response["status"] = "failed"
        return self._about_all("failed")

    def _add(self, text: str, calls: list[ToolCallDelta]) -> list[Event]:
        """The events of a piece. Its first call may be the rest of the one that is open, whose last
        token may bring text that stands behind it.
        """
        events: list[Event] = []
        for call in calls:
            if call.name is None:
                events += self._add_arguments(call)
        if text:
            if self._kind() != "message":
                events += [*self._close("completed"), *self._open_text()]
            self._items[-1]["content"][0]["text"] += text
            events.append(
                self._about_item("output_text.delta", content_index=0, delta=text, logprobs=[])
            )
        for call in calls:
            if call.name is not None:
                events += [*self._close("completed"), *self._open_call(call)]
                events += self._add_arguments(call)
        return events

    def _add_arguments(self, call: ToolCallDelta) -> list[Event]:
        if not call.arguments:
            return []
        self._items[-1]["arguments"] += call.arguments
        return [self._about_item("function_call_arguments.delta", delta=call.arguments)]

    def _kind(self) -> str | None:
        """The type of the item that is open."""
        open_ = self._items and self._items[-1]["status"] == "in_progress"
        return self._items[-1]["type"] if open_ else None

    def _open(self, prefix: str, kind: str, **fields: Any) -> Event:
        self._items.append({"id": _id(prefix), "type": kind, "status": "in_progress", **fields})
        return self._told("output_item.added", item=self._copy())

    def _open_text(self) -> list[Event]:
        added = self._open("msg", "message", role="assistant", content=[])
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._items[-1]["content"].append(part)
        return [
            added,
            self._about_item("content_part.added", content_index=0, part=dict(part)),
        ]

    def _open_call(self, call: ToolCallDelta) -> list[Event]:
        return [self._open("fc", "function_call", call_id=call.id, name=call.name, arguments="")]

    def _close(self, status: str) -> list[Event]:
        """The events that end the item that is open."""
        kind = self._kind()
        if kind is None:
            return []
        item = self._items[-1]
        item["status"] = status
        if kind == "function_call":
            events = [
                self._about_item(
                    "function_call_arguments.done", arguments=item["arguments"], name=item["name"]
                )
            ]
        else:
            (part,) = item["content"]
            text = {"text": part["text"], "logprobs": []}
            events = [
                self._about_item("output_text.done", content_index=0, **text),
                self._about_item("content_part.done", content_index=0, part=dict(part)),
            ]
        return [*events, self._told("output_item.done", item=self._copy())]

    def _end(self, status: str, generated: int) -> Event:
        self.response["usage"] = {
            "input_tokens": self._read,
            "input_tokens_details": {"cached_tokens": self._cached},
            "output_tokens": generated,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self._read + generated,
        }
        self.response["output"] = self._items
        self.response["status"] = status
        return self._about_all(status)

    def _copy(self) -> dict[str, Any]:
        """The last item as it is now."""
        item = dict(self._items[-1])
        if "content" in item:
            item["content"] = [dict(part) for part in item["content"]]
        return item

    def _about_all(self, what: str) -> Event:
        return {"type": f"response.{what}", "response": dict(self.response)}

    def _told(self, what: str, **fields: Any) -> Event:
        return {"type": f"response.{what}", "output_index": len(self._items) - 1, **fields}

    def _about_item(self, what: str, **fields: Any) -> Event:
        return self._told(what, item_id=self._items[-1]["id"], **fields)


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
