"""What the routes share: submitting a validated body to the engine within the server's limits, and
sending the answers while watching for clients that disconnect.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from ingot.config.sections.deployment import Serve
from ingot.models.generation.request import Completion
from ingot.models.generation.request import Request as GenerationRequest
from ingot.models.generation.sampling import Sampling
from ingot.models.generation.seq2seq import Seq2SeqRequest
from ingot.serve.http.bodies import ChatMessage, GenerationOptions, PromptBounds
from ingot.serve.http.errors import ApiError, short
from ingot.serve.native.engine import ServingEngine, Ticket
from ingot.serve.native.model import LoadedModel

Answer = TypeVar("Answer")
# A log-probability takes about a hundred times as many bytes, and as much time to write, as a
# letter.
MAX_LOGPROBS_IN_ANSWER = 65_536
# Parts of an answer's JSON that are written before other requests get their turn.
PARTS_AT_ONCE = 1024


@dataclass(frozen=True)
class Service:
    """One served model."""

    name: str
    loaded: LoadedModel
    engine: ServingEngine
    settings: Serve

    def check_model(self, asked: str | None) -> None:
        """Raises ApiError 404 where a client names another model."""
        if asked is not None and asked != self.name:
            raise ApiError(
                404,
                f"model `{short(asked)}` is not served here, only `{self.name}`; see"
                " GET /v1/models",
                param="model",
                code="model_not_found",
            )

    def check_generates_text(self, asked: str | None) -> None:
        """As `check_model`, and raises ApiError 400 for a classifier, which generates no text."""
        self.check_model(asked)
        if self.loaded.kind == "encoder":
            raise ApiError(
                400,
                f"model `{self.name}` is a classifier and writes no text; send texts as `instances`"
                " to the prediction route (/predict)",
            )

    def default_max_tokens(self, default: int) -> int | None:
        """`max_tokens` of requests without one; None for sequence-to-sequence models, which write
        to the end of their text.
        """
        return min(default, self.settings.max_tokens) if self.loaded.kind == "decoder" else None

    @functools.cached_property
    def bounds(self) -> PromptBounds:
        """What the prompts of a request can be at most."""
        return PromptBounds(
            self.settings.max_batch + self.settings.max_queue,
            self.loaded.model.config.max_position_embeddings,
            self.loaded.most_characters,
        )

    async def encode(self, prompts: Sequence[str | list[int]]) -> list[list[int]]:
        """Token ids of prompts, encoded in a thread, so that a long text does not block the
        event loop. Raises ApiError 400 before that where they can never fit.
        """
        self.bounds.check(prompts)
        encode = self.loaded.encode
        return await asyncio.to_thread(
            lambda: [encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        )

    async def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Token ids of a chat by the model's template. Raises as `encode` does."""
        if self.loaded.kind != "decoder" or self.loaded.tokenizer.template is None:
            raise ApiError(
                400,
                f"model `{self.name}` has no chat template; send a prompt to /v1/completions",
                param="messages",
            )
        self.bounds.check_chat(messages)
        return await asyncio.to_thread(
            self.loaded.tokenizer.encode_chat, [message.template_message() for message in messages]
        )

    def submit(
        self,
        prompts: Sequence[list[int]],
        options: GenerationOptions,
        *,
        max_tokens: int | None,
        logprobs: int | None = None,
        beams: int = 1,
    ) -> Ticket:
        """Queue one completion for each prompt. `max_tokens` None: as many as server and model
        allow.

        Raises:
            ApiError: `max_tokens` is over the server's limit, or the queue is full.
            WrongInput: a prompt that the model cannot read.
        """
        limit = self.settings.max_tokens
        if max_tokens is not None and max_tokens > limit:
            raise ApiError(
                400,
                f"max_tokens {max_tokens} is over this server's limit of {limit}; lower it, or"
                " raise serve.max_tokens",
                param="max_tokens",
            )
        items = len(prompts) * (max_tokens or limit) * (1 + (logprobs or 0))
        if logprobs is not None and items > MAX_LOGPROBS_IN_ANSWER:
            raise ApiError(
                400,
                f"the answer would hold {items:,} log-probabilities, at most"
                f" {MAX_LOGPROBS_IN_ANSWER:,} are given; lower `max_tokens`, or ask for fewer",
                param="logprobs",
            )
        sampling, stop = (
            Sampling(options.temperature, options.top_p, options.seed, logprobs),
            tuple(options.stop),
        )
        if self.loaded.kind == "seq2seq":
            if logprobs is not None:
                raise ApiError(
                    400,
                    f"model `{self.name}` gives no log-probabilities; leave `logprobs` out",
                    param="logprobs",
                )
            whole = min(limit, self.loaded.target_positions)
            return self._queue(
                [
                    Seq2SeqRequest(prompt, max_tokens or whole, sampling, stop, beams)
                    for prompt in prompts
                ]
            )
        return self._queue(
            [GenerationRequest(prompt, max_tokens or limit, sampling, stop) for prompt in prompts]
        )

    def submit_classification(self, texts: Sequence[list[int]]) -> Ticket:
        """Queue texts for classification. Raises as `submit` does."""
        return self._queue([GenerationRequest(text, 1) for text in texts])

    def _queue(self, requests: Sequence[GenerationRequest]) -> Ticket:
        for request in requests:
            self.loaded.check(request)
        return self.engine.submit(requests)


async def json_answer(content: Mapping[str, Any]) -> Response:
    """An answer that may be long, written part by part, so that others get theirs meanwhile."""
    writer = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    parts: list[str] = []
    for part in writer.iterencode(content):
        parts.append(part)
        if len(parts) % PARTS_AT_ONCE == 0:
            await asyncio.sleep(0)
    return Response("".join(parts), media_type="application/json")


async def completions(ticket: Ticket, request: Request) -> list[Completion]:
    """All completions of a ticket; raises as `run_unless_disconnected` does."""
    return await run_unless_disconnected(ticket, request, ticket.completions())


async def run_unless_disconnected(
    ticket: Ticket, request: Request, work: Coroutine[Any, Any, Answer]
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
    error is sent as a chunk.
    """

    media_type = "text/event-stream"

    def __init__(self, ticket: Ticket, chunks: Callable[[], AsyncIterator[dict[str, Any]]]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._ticket, self._chunks = ticket, chunks

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
                await self._send(send, json.dumps(chunk, ensure_ascii=False, separators=(",", ":")))
            await self._send(send, "[DONE]")
        except ApiError as error:
            await self._send(send, json.dumps(error.body()))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, data: str) -> None:
        await send(
            {"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True}
        )


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
