"""`POST /v1/embeddings`, as OpenAI's."""

from __future__ import annotations

import asyncio
import base64
from array import array
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from ingot.serve.http.answers import json_answer, run_unless_disconnected
from ingot.serve.http.bodies import PromptBounds, Prompts, RequestBody, WholeNumber
from ingot.serve.http.errors import ApiError
from ingot.serve.http.service import Service
from ingot.serve.native.embedding import Embedding, EmbeddingRequest, embeds
from ingot.serve.native.engine import Ticket

# Texts that one request may embed, as OpenAI; seconds until a full queue is tried again.
MAX_INPUTS, FULL_S = 2048, 0.1


class EmbeddingBody(RequestBody):
    """What to embed: a text, texts, token ids, or lists of these."""

    told = True
    model: str | None = None
    input: Prompts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[WholeNumber, Field(ge=1)] | None = None


def router(service: Service) -> APIRouter:
    """The route."""
    routes = APIRouter(prefix="/v1")

    @routes.post("/embeddings")
    async def embed(body: EmbeddingBody, request: Request) -> Response:
        service.check_model(body.model)
        vectors, read = await _embedded(service, body.input, request)
        if body.dimensions not in (None, len(vectors[0])):
            raise ApiError(
                400,
                f"model `{service.name}` gives {len(vectors[0])} dimensions, and fewer of them"
                " would mean something else; leave `dimensions` out",
                param="dimensions",
            )
        data = [
            {"object": "embedding", "index": index, "embedding": _form(vector, body)}
            for index, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": read, "total_tokens": read}
        head = {"object": "list", "model": service.name}
        return await json_answer({**head, "data": data, "usage": usage})

    return routes


def _form(vector: Sequence[float], body: EmbeddingBody) -> Any:
    if body.encoding_format == "float":
        return vector
    return base64.b64encode(array("f", vector).tobytes()).decode()


async def _embedded(
    service: Service, texts: Sequence[str | list[int]], request: Request
) -> tuple[list[tuple[float, ...]], int]:
    """The vectors of texts in their order, a full batch at a time, texts of alike length together;
    and how many tokens were read for them.

    Raises:
        ApiError: a model without vectors, more or longer texts than fit, or a full queue.
        WrongInput: a text that the model cannot read, or a folder that asks for what is not known.
    """
    loaded, bounds = service.loaded, service.bounds
    if not embeds(loaded.model):
        raise ApiError(
            400,
            f"model `{service.name}` embeds no texts; serve a decoder or an encoder that reads a"
            " text as a whole",
        )
    PromptBounds(MAX_INPUTS, bounds.positions, bounds.characters).check(texts)
    pooling, encode = loaded.pooling, loaded.encode_to_embed
    read = await asyncio.to_thread(
        lambda: [encode(text) if isinstance(text, str) else text for text in texts]
    )
    requests = [EmbeddingRequest(ids, 1, pooling=pooling) for ids in read]
    service.check(requests)
    order = sorted(range(len(read)), key=lambda index: len(read[index]))
    vectors: dict[int, tuple[float, ...]] = {}
    for start in range(0, len(order), service.settings.max_batch):
        places = order[start : start + service.settings.max_batch]
        ticket = await _queued(service, [requests[place] for place in places], first=not start)
        parts = await run_unless_disconnected(ticket, request, ticket.parts())
        for place, (piece,) in zip(places, parts, strict=True):
            assert isinstance(piece, Embedding)
            vectors[place] = piece.vector
    return [vectors[place] for place in range(len(read))], sum(map(len, read))


async def _queued(service: Service, requests: Sequence[EmbeddingRequest], *, first: bool) -> Ticket:
    """A ticket of requests; those of a call that is under way wait where the queue is full."""
    while True:
        try:
            return service.engine.submit(requests)
        except ApiError as error:
            if first or error.status != 429:
                raise
        await asyncio.sleep(FULL_S)
