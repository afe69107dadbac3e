"""What the routes share: from a checked body to a ticket of the engine, and the limits on the
way.
"""

from __future__ import annotations

import asyncio
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
from ingot.serve.http.bodies import GenerationOptions
from ingot.serve.http.errors import ApiError
from ingot.serve.native.engine import ServingEngine, Ticket
from ingot.serve.native.model import LoadedModel

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Service:
    """One served model."""

    name: str
    loaded: LoadedModel
    engine: ServingEngine
    settings: Serve

    def check_model(self, asked: str | None) -> None:
        """Clients name the model; another name is more likely a mistake than a wish."""
        if asked is not None and asked != self.name:
            raise ApiError(
                404,
                f"model `{asked}` is not served here, only `{self.name}`; see GET /v1/models",
                param="model",
                code="model_not_found",
            )

    def check_writer(self, asked: str | None) -> None:
        """The same on routes for texts, where classifiers have nothing to say."""
        self.check_model(asked)
        if self.loaded.kind == "encoder":
            raise ApiError(
                400,
                f"model `{self.name}` is a classifier and writes no text; send texts as `instances`"
                " to the prediction route (/predict)",
            )

    def limit(self, default: int) -> int | None:
        """The tokens that are meant where a request does not say how many: a sequence-to-sequence
        model writes to the end of its text.
        """
        return min(default, self.settings.max_tokens) if self.loaded.kind == "decoder" else None

    async def encode(self, prompts: Sequence[str | list[int]]) -> list[list[int]]:
        """Ids of prompts; in a thread, since a long text takes a while and others wait for the
        event loop.
        """
        encode = self.loaded.encode
        return await asyncio.to_thread(
            lambda: [encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        )

    async def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of a chat by the model's template."""
        if self.loaded.kind != "decoder" or self.loaded.tokenizer.template is None:
            raise ApiError(
                400,
                f"model `{self.name}` has no chat template; send a prompt to /v1/completions",
                param="messages",
            )
        return await asyncio.to_thread(
            self.loaded.tokenizer.encode_chat, [dict(message) for message in messages]
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
        """Queue one completion for each prompt. `max_tokens` None: as many as the server allows and
        the model can write.

        Raises:
            ApiError: more tokens asked for than the server allows, or no room in the queue.
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
            whole = min(limit, self.loaded.model.config.max_position_embeddings)
            return self._queue(
                [
                    Seq2SeqRequest(prompt, max_tokens or whole, sampling, stop, beams)
                    for prompt in prompts
                ]
            )
        return self._queue(
            [GenerationRequest(prompt, max_tokens or limit, sampling, stop) for prompt in prompts]
        )

    def judge(self, texts: Sequence[list[int]]) -> Ticket:
        """Queue texts to be classified. Raises as `submit` does."""
        return self._queue([GenerationRequest(text, 1) for text in texts])

    def _queue(self, requests: Sequence[GenerationRequest]) -> Ticket:
        for request in requests:
            self.loaded.check(request)
        return self.engine.submit(requests)


async def completions(ticket: Ticket, request: Request) -> list[Completion]:
    """All answers of a ticket; see `run_unless_disconnected`."""
    return await run_unless_disconnected(ticket, request, ticket.completions())


async def run_unless_disconnected(
    ticket: Ticket, request: Request, work: Coroutine[Any, Any, Answer]
) -> Answer:
    """What `work` makes of a ticket's pieces. When the client goes away first, the ticket is
    cancelled.

    Raises:
        ApiError: 499 for a client that went away, or what the engine says.
    """
    answers = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait((answers, gone), return_when=asyncio.FIRST_COMPLETED)
        if not answers.done():
            raise ApiError(499, "the client went away")
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
        except ApiError as error:
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
