"""OpenAI's routes: models, completions, chat completions."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ingot.models.generation.request import CompletionChunk, GeneratedToken
from ingot.serve.http.answers import EventStream, completions, json_answer
from ingot.serve.http.bodies import CompletionBody
from ingot.serve.http.chat import ChatBody
from ingot.serve.http.errors import ApiError
from ingot.serve.http.logprobs import LogprobFormatter
from ingot.serve.http.service import Service
from ingot.serve.native.engine import Ticket
from ingot.serve.native.toolcalls import MarkedText, ToolCallDelta

# OpenAI's default `max_tokens` of /v1/completions.
COMPLETION_TOKENS = 16
# Tokens whose log-probabilities are written before other requests get their turn.
TOKENS_AT_ONCE = 8


def router(service: Service) -> APIRouter:
    """The routes under `/v1`."""
    routes = APIRouter(prefix="/v1")

    @routes.get("/models")
    @routes.get("/models/", include_in_schema=False)
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
        max_tokens=1
        if body.max_tokens == 0
        else body.max_tokens or service.default_max_tokens(COMPLETION_TOKENS),
        logprobs=body.logprobs,
        choices=body.n,
        constraint=await service.constraint(body.response_format),
        prompt_logprobs=body.scores_prompts,
    )
    head = _head("cmpl", "text_completion", service.name)
    tokenizer = service.loaded.tokenizer
    formatters = [LogprobFormatter(tokenizer, ids) for ids in prompts for _ in range(body.n)]
    starts: dict[int, int] = {}  # characters before the completion of a choice that is echoed
    # What each choice begins with, until it is given out.
    echoes = [
        given if isinstance(given, str) else tokenizer.decode(given)
        for given in (body.prompt if body.echo else [""] * len(prompts))
        for _ in range(body.n)
    ]

    async def choice(index: int, part: CompletionChunk) -> dict[str, Any]:
        if body.max_tokens == 0:  # one token was needed to read the prompt
            part = replace(part, text="", tokens=(), generated=0, finish="length")
        echo, echoes[index] = echoes[index], ""
        logprobs = None
        if body.logprobs is not None:
            form, before, first = formatters[index], starts.get(index, 0), list[GeneratedToken]()
            if part.prompt and body.echo:
                starts[index] = before = len(echo)
                first = form.of_prompt(part.prompt, body.logprobs)
            own = [replace(token, offset=before + token.offset) for token in part.tokens]
            logprobs = await _gradually(form.completions, [*first, *own])
        made = {"index": index, "text": echo + part.text, "logprobs": logprobs}
        if body.prompt_logprobs is not None:
            form = LogprobFormatter(tokenizer, ())
            made["prompt_logprobs"] = form.prompt(part.prompt, body.prompt_logprobs)
        return {**made, "finish_reason": part.finish}

    if body.stream:
        usage = body.stream_options.include_usage
        unwritten = body.max_tokens == 0
        return EventStream(
            ticket,
            lambda: _chunks(ticket, head, choice, prompts, usage, body.n, unwritten=unwritten),
        )
    answers = await completions(ticket, request)
    return await json_answer(
        {
            **head,
            "choices": [await choice(index, answer) for index, answer in enumerate(answers)],
            "usage": _usage(prompts, answers, unwritten=body.max_tokens == 0),
        }
    )


class _ChatAnswer:
    """One choice of a chat while it is written: its text, the tools it calls, what ends it."""

    def __init__(self, service: Service, body: ChatBody, prompt: Sequence[int]) -> None:
        self._formatter = LogprobFormatter(service.loaded.tokenizer, prompt)
        self._with_logprobs = body.logprobs
        self._calls = service.call_parser(body)
        self._marked = MarkedText({} if self._calls is None else service.tool_markers())

    async def add(self, index: int, part: CompletionChunk, *, whole: bool) -> dict[str, Any] | None:
        """The choice of a chunk, or of an answer if `whole`; None if there is nothing to say."""
        content, calls = part.text, list[ToolCallDelta]()
        if self._calls is not None:
            content, calls = self._calls.push(self._marked.push(part))
            if part.finish:
                rest, more = self._calls.finish()
                content, calls = content + rest, [*calls, *more]
        finish: str | None = part.finish
        if finish == "stop" and self._calls is not None and self._calls.calls:
            finish = "tool_calls"
        if not (whole or content or calls or part.finish or (self._with_logprobs and part.tokens)):
            return None
        logprobs = (
            await _gradually(self._formatter.chat, part.tokens) if self._with_logprobs else None
        )
        says: dict[str, Any] = {"content": content} if content else {}
        if calls:
            says["tool_calls"] = [_call(call, streamed=not whole) for call in calls]
        if whole:
            empty = None if calls else ""
            says = {"role": "assistant", "content": empty, "refusal": None, **says}
        return {
            "index": index,
            "message" if whole else "delta": says,
            "logprobs": logprobs,
            "finish_reason": finish,
        }


def _call(call: ToolCallDelta, *, streamed: bool) -> dict[str, Any]:
    function = {"arguments": call.arguments}
    if call.name is None:
        return {"index": call.index, "function": function}
    begun = {"id": call.id, "type": "function", "function": {"name": call.name, **function}}
    return {"index": call.index, **begun} if streamed else begun


async def _chat(service: Service, body: ChatBody, request: Request) -> Response:
    """`POST /v1/chat/completions`: the assistant's next message, whole or streamed."""
    service.check_generates_text(body.model)
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "`top_logprobs` needs `logprobs`: true; set it", param="top_logprobs")
    prompt = await service.encode_chat(body)
    ticket = service.submit(
        [prompt],
        body,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        called="max_completion_tokens" if body.max_completion_tokens else "max_tokens",
        logprobs=body.top_logprobs if body.logprobs else None,
        choices=body.n,
        constraint=await service.chat_constraint(body),
        chat=body,
    )
    made = [_ChatAnswer(service, body, prompt) for _ in range(body.n)]
    if body.stream:
        head = _head("chatcmpl", "chat.completion.chunk", service.name)
        first = {
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        usage = body.stream_options.include_usage

        def delta(index: int, part: CompletionChunk) -> Awaitable[Any]:
            return made[index].add(index, part, whole=False)

        return EventStream(
            ticket, lambda: _chunks(ticket, head, delta, [prompt], usage, body.n, first)
        )
    answers = await completions(ticket, request)
    return await json_answer(
        {
            **_head("chatcmpl", "chat.completion", service.name),
            "choices": [
                await made[index].add(index, answer, whole=True)
                for index, answer in enumerate(answers)
            ],
            "usage": _usage([prompt], answers),
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
    choice: Callable[[int, CompletionChunk], Awaitable[dict[str, Any] | None]],
    prompts: Sequence[Sequence[int]],
    with_usage: bool,
    choices: int = 1,
    first: dict[str, Any] | None = None,
    *,
    unwritten: bool = False,
) -> AsyncIterator[dict[str, Any]]:
    """The chunks of a stream: one for each output of the `choices` of each prompt that is not
    empty, then the usage if requested.
    """
    count = len(prompts) * choices
    last, cached = dict[int, CompletionChunk](), dict[int, int | None]()
    if first:
        for index in range(count):
            yield {**head, "choices": [{"index": index, **first}]}
    async for index, piece in ticket.pieces():
        last[index] = piece
        cached.setdefault(index, piece.cached)
        if piece.text or piece.tokens or piece.finish or piece.prompt:
            made = await choice(index, piece)
            if made is not None:
                yield {**head, "choices": [made]}
    if with_usage:
        ends = [replace(last[index], cached=cached[index]) for index in range(count)]
        yield {**head, "choices": [], "usage": _usage(prompts, ends, unwritten=unwritten)}


def _head(prefix: str, kind: str, model: str) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
    }


def _usage(
    prompts: Sequence[Sequence[int]],
    answers: Sequence[CompletionChunk],
    *,
    unwritten: bool = False,
) -> dict[str, Any]:
    """The usage of all choices of each prompt. `cached_tokens` are those that the first choice did
    not have to read; the further ones find what it has read. `unwritten`: prompts were only read.
    """
    read = sum(map(len, prompts))
    written = 0 if unwritten else sum(answer.generated for answer in answers)
    firsts = answers[:: len(answers) // len(prompts)]
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
        "prompt_tokens_details": {"cached_tokens": sum(one.cached or 0 for one in firsts)},
    }


def _model(service: Service) -> dict[str, Any]:
    positions = service.loaded.model.config.max_position_embeddings
    kind, tasks = service.loaded.kind, service.loaded.tasks
    about: dict[str, Any] = {"owned_by": "ingot", "version": service.version}
    about |= {"max_model_len": positions, "kind": kind}
    about |= {"chat": "chat" in tasks, "tasks": tasks}
    return {"id": service.name, "object": "model", "created": service.loaded.created, **about}
