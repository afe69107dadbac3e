"""OpenAI's routes: models, completions, chat completions, and log-probabilities in their
formats.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ingot.models.generation.request import Completion, CompletionChunk, GeneratedToken
from ingot.serve.http.bodies import ChatBody, CompletionBody
from ingot.serve.http.errors import ApiError
from ingot.serve.http.service import EventStream, Service, completions, json_answer
from ingot.serve.native.engine import Ticket
from ingot.tokenizers.tokenizer import Tokenizer

# OpenAI's default `max_tokens` of /v1/completions.
COMPLETION_TOKENS = 16
# Tokens whose log-probabilities are written before other requests get their turn.
TOKENS_AT_ONCE = 8


class LogprobFormatter:
    """Formats the log-probabilities of one completion's tokens, in order. A token's text is what it
    adds to the token before it.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer, self._before = tokenizer, list(prompt[-1:])

    def completions(self, tokens: Sequence[GeneratedToken]) -> dict[str, Any]:
        """`logprobs` of a choice of `/v1/completions`: parallel lists. `text_offset` counts from
        the start of the completion.
        """
        texts, tops = [], []
        for token in tokens:
            texts.append(self._text(token.id))
            top: dict[str, float] = {}
            for other, logprob in token.top:
                # Two tokens may have the same text (bytes of a character); the likelier one counts.
                top.setdefault(self._text(other), logprob)
            if token.top:
                top.setdefault(texts[-1], token.logprob or 0.0)
            tops.append(top)
            self._before = [token.id]
        return {
            "tokens": texts,
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": tops,
            "text_offset": [token.offset for token in tokens],
        }

    def chat(self, tokens: Sequence[GeneratedToken]) -> dict[str, Any]:
        """`logprobs` of a choice of `/v1/chat/completions`."""
        content = []
        for token in tokens:
            top = [self._item(other, logprob) for other, logprob in token.top]
            content.append({**self._item(token.id, token.logprob or 0.0), "top_logprobs": top})
            self._before = [token.id]
        return {"content": content, "refusal": None}

    def _item(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._text(token)
        return {
            "token": text,
            "logprob": logprob,
            "bytes": None if "\ufffd" in text else list(text.encode()),
        }

    def _text(self, token: int) -> str:
        """The text of a token, also of special ones, with the space that SentencePiece drops at the
        start of a text.
        """
        before = self._tokenizer.decode(self._before, skip_special=False)
        both = self._tokenizer.decode([*self._before, token], skip_special=False)
        return (
            both[len(before) :]
            if both.startswith(before)
            else self._tokenizer.decode([token], skip_special=False)
        )


def router(service: Service) -> APIRouter:
    """The routes under `/v1`."""
    routes = APIRouter(prefix="/v1")

    @routes.get("/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(service)]}

    @routes.get("/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return _model(service)

    @routes.post("/completions")
    async def complete(body: CompletionBody, request: Request) -> Response:
        return await _complete(service, body, request)

    @routes.post("/chat/completions")
    async def chat(body: ChatBody, request: Request) -> Response:
        return await _chat(service, body, request)

    return routes


async def _complete(service: Service, body: CompletionBody, request: Request) -> Response:
    """`POST /v1/completions`: one choice for each prompt, whole or streamed."""
    service.check_generates_text(body.model)
    prompts = await service.encode(body.prompt)
    ticket = service.submit(
        prompts,
        body,
        max_tokens=body.max_tokens or service.default_max_tokens(COMPLETION_TOKENS),
        logprobs=body.logprobs,
    )
    head = _head("cmpl", "text_completion", service.name)
    formatters = [LogprobFormatter(service.loaded.tokenizer, prompt) for prompt in prompts]

    async def choice(index: int, part: CompletionChunk | Completion) -> dict[str, Any]:
        logprobs = (
            None
            if body.logprobs is None
            else await _gradually(formatters[index].completions, part.tokens)
        )
        return {
            "index": index,
            "text": part.text,
            "logprobs": logprobs,
            "finish_reason": part.finish,
        }

    if body.stream:
        usage = body.stream_options.include_usage
        return EventStream(ticket, lambda: _chunks(ticket, head, choice, prompts, usage))
    answers = await completions(ticket, request)
    return await json_answer(
        {
            **head,
            "choices": [await choice(index, answer) for index, answer in enumerate(answers)],
            "usage": _usage(prompts, [answer.generated for answer in answers]),
        }
    )


async def _chat(service: Service, body: ChatBody, request: Request) -> Response:
    """`POST /v1/chat/completions`: the assistant's next message, whole or streamed."""
    service.check_generates_text(body.model)
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "`top_logprobs` needs `logprobs`: true; set it", param="top_logprobs")
    prompt = await service.encode_chat(body.messages)
    ticket = service.submit(
        [prompt],
        body,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        logprobs=body.top_logprobs if body.logprobs else None,
    )
    formatter = LogprobFormatter(service.loaded.tokenizer, prompt)

    async def choice(index: int, part: CompletionChunk | Completion, **content: Any) -> Any:
        logprobs = await _gradually(formatter.chat, part.tokens) if body.logprobs else None
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": part.finish}

    def delta(index: int, part: CompletionChunk) -> Awaitable[Any]:
        return choice(index, part, delta={"content": part.text} if part.text else {})

    if body.stream:
        head = _head("chatcmpl", "chat.completion.chunk", service.name)
        first = {
            "index": 0,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        usage = body.stream_options.include_usage
        return EventStream(ticket, lambda: _chunks(ticket, head, delta, [prompt], usage, first))
    (answer,) = await completions(ticket, request)
    message = {"role": "assistant", "content": answer.text, "refusal": None}
    return await json_answer(
        {
            **_head("chatcmpl", "chat.completion", service.name),
            "choices": [await choice(0, answer, message=message)],
            "usage": _usage([prompt], [answer.generated]),
        }
    )


async def _gradually(
    form: Callable[[Sequence[GeneratedToken]], dict[str, Any]], tokens: Sequence[GeneratedToken]
) -> dict[str, Any]:
    """`form` of all tokens, a few at a time, so that other requests get their turn."""
    whole = form(tokens[:TOKENS_AT_ONCE])
    for start in range(TOKENS_AT_ONCE, len(tokens), TOKENS_AT_ONCE):
        await asyncio.sleep(0)
        for key, more in form(tokens[start : start + TOKENS_AT_ONCE]).items():
            if more is not None:
                whole[key].extend(more)
    return whole


async def _chunks(
    ticket: Ticket,
    head: dict[str, Any],
    choice: Callable[[int, CompletionChunk], Awaitable[dict[str, Any]]],
    prompts: Sequence[Sequence[int]],
    with_usage: bool,
    first: dict[str, Any] | None = None,
) -> AsyncIterator[dict[str, Any]]:
    """The chunks of a stream: one for each output that is not empty, then the usage if
    requested.
    """
    generated = [0] * len(prompts)
    if first:
        yield {**head, "choices": [first]}
    async for index, piece in ticket.pieces():
        generated[index] = piece.generated
        if piece.text or piece.tokens or piece.finish:
            yield {**head, "choices": [await choice(index, piece)]}
    if with_usage:
        yield {**head, "choices": [], "usage": _usage(prompts, generated)}


def _head(prefix: str, kind: str, model: str) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
    }


def _usage(prompts: Sequence[Sequence[int]], generated: Sequence[int]) -> dict[str, int]:
    read = sum(len(prompt) for prompt in prompts)
    return {
        "prompt_tokens": read,
        "completion_tokens": sum(generated),
        "total_tokens": read + sum(generated),
    }


def _model(service: Service) -> dict[str, Any]:
    positions = service.loaded.model.config.max_position_embeddings
    about = {"owned_by": "ingot", "max_model_len": positions, "kind": service.loaded.kind}
    return {"id": service.name, "object": "model", "created": service.loaded.created, **about}
