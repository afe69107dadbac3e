"""What the routes share: submitting a validated body to the engine within the server's limits."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ingot.base.errors import WrongInput
from ingot.config.models.source import WORDS
from ingot.config.sections.deployment import Serve
from ingot.models.generation.fillmask import MaskRequest
from ingot.models.generation.request import Request as GenerationRequest
from ingot.models.generation.request import TooLong, special_in
from ingot.models.generation.seq2seq import Seq2SeqRequest
from ingot.serve.http.bodies import GenerationOptions, PromptBounds, ResponseFormat, check_count
from ingot.serve.http.chat import ChatBody
from ingot.serve.http.errors import ApiError, short
from ingot.serve.native.engine import ServingEngine, Ticket
from ingot.serve.native.grammar import JSONConstraint, JSONGrammars, call_grammar, functions_of
from ingot.serve.native.model import LoadedModel
from ingot.serve.native.toolcalls import InsideCalls, ToolCallParser, ToolFormat, tool_format
from ingot.tokenizers.chats.chat import Chat

# A log-probability takes about a hundred times as many bytes, and as much time to write, as a
# letter.
MAX_LOGPROBS_IN_ANSWER = 65_536
# The texts of a message beside its calls.
SAID = ("content", "reasoning_content", "thinking")


@dataclass(frozen=True)
class Service:
    """One served model. `version`: of a registered one."""

    name: str
    loaded: LoadedModel
    engine: ServingEngine
    settings: Serve
    version: int | None = None

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """What clients may call the model: a registered one also without its version, or with it,
        as `ingot serve` does.
        """
        if self.version is None:
            return frozenset([self.name])
        base = self.name.partition("@")[0]
        return frozenset([self.name, base, f"{base}@v{self.version}", f"{base}@{self.version}"])

    def check_model(self, asked: str | None) -> None:
        """Raises ApiError 404 where a client names another model, or another version of it."""
        if asked is not None and asked not in self.names:
            version = "" if self.version is None else f", version {self.version}"
            raise ApiError(
                404,
                f"model `{short(asked)}` is not served here, only `{self.name}`{version}; see"
                " GET /v1/models",
                param="model",
                code="model_not_found",
            )

    def check_generates_text(self, asked: str | None) -> None:
        """As `check_model`, and raises ApiError 400 for a classifier, which generates no text."""
        self.check_model(asked)
        if self.loaded.kind in ("encoder", "masked"):
            raise ApiError(
                400,
                f"model `{self.name}` is {self.encoder_kind} and writes no text; send texts as"
                " `instances` to the prediction route (/predict), or as `input` to /v1/embeddings",
            )

    @property
    def encoder_kind(self) -> str:
        """An encoder in words."""
        if self.loaded.kind == "masked":
            return WORDS["masked"]
        return "a classifier" if self.loaded.labels else "an encoder without classes"

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

    @functools.cached_property
    def grammars(self) -> JSONGrammars:
        """Makes constraints for answers that must be JSON."""
        return JSONGrammars(
            self.loaded.tokenizer, self.loaded.model.config.vocab_size, self.loaded.eos
        )

    async def constraint(self, asked: ResponseFormat) -> JSONConstraint | None:
        """What `response_format` asks for; None for any text. Raises WrongInput as
        `JSONGrammars.constraint` does.
        """
        if (schema := asked.schema_asked) is None:
            return None
        return await asyncio.to_thread(self.grammars.constraint, schema)

    async def encode(self, prompts: Sequence[str | list[int]]) -> list[list[int]]:
        """Token ids of prompts, encoded in a thread, so that a long text does not block the
        event loop. Raises ApiError 400 or TooLong before that where they can never fit.
        """
        self.bounds.check(prompts)
        encode = self.loaded.encode
        return await asyncio.to_thread(
            lambda: [encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        )

    async def encode_whole_chat(self, chat: Chat) -> list[int]:
        """Token ids of a chat with its answers, for a model that scores chats. Raises as `encode`
        does, and WrongInput where the model is none or its template refuses the chat.
        """
        self._check_size(chat)
        return await asyncio.to_thread(self.loaded.encode_whole_chat, chat)

    def _check_size(self, chat: Chat) -> None:
        """Raises TooLong where a chat can never fit: what it says, calls and tools."""
        calls = [message["tool_calls"] for message in chat.messages if "tool_calls" in message]
        beside = (json.dumps(part, ensure_ascii=False) for part in (calls, chat.tools) if part)
        said = (message.get(name) or "" for message in chat.messages for name in SAID)
        self.bounds.check_characters(sum(map(len, (*beside, *said))), "the chat")

    @functools.cached_property
    def tool_format(self) -> ToolFormat:
        """How the model writes tool calls. Raises WrongInput as `tool_format` does."""
        return tool_format(self.loaded.tokenizer.template or "", self.settings.tool_call_parser)

    def tool_markers(self) -> dict[int, str]:
        """The markers of calls that are special tokens, which decoding leaves out."""
        special = self.loaded.tokenizer.special_ids
        return {special[text]: text for text in self.tool_format.markers if text in special}

    def call_parser(self, body: ChatBody) -> ToolCallParser | None:
        """What separates the calls of one answer from its text; None where it may not call."""
        if not body.callable_tools():
            return None
        most = None if body.parallel_tool_calls else 1
        return ToolCallParser(self.tool_format, most=most, forced=body.must_call)

    async def chat_constraint(self, body: ChatBody) -> JSONConstraint | None:
        """What `response_format` and `tools` ask for; None for any text. An answer that may call
        calls, or is of the format. Raises WrongInput as `JSONGrammars.calls` does.
        """
        tools = [tool.model_dump() for tool in body.callable_tools()]
        strict = any(tool["function"]["strict"] for tool in tools)
        content = None if body.must_call else body.response_format.schema_asked
        alone = await self.constraint(body.response_format)
        if not tools or not (body.must_call or strict or content is not None):
            return alone
        schemas = functions_of(tools, strict=not body.must_call)
        grammar = call_grammar(
            self.tool_format,
            schemas,
            self.loaded.tokenizer.special_ids,
            text=not body.must_call,
            content=content,
            several=body.parallel_tool_calls and body.tool_choice in ("auto", "required"),
            named=self.tool_format.named and "[ARGS]" in (self.loaded.tokenizer.template or ""),
        )
        return await asyncio.to_thread(self.grammars.calls, grammar, schemas)

    async def encode_chat(self, body: ChatBody) -> list[int]:
        """Token ids of a chat by the model's template. Raises as `encode` does, and WrongInput
        where it knows no tools or none of these messages.
        """
        if self.loaded.kind != "decoder" or self.loaded.tokenizer.template is None:
            raise ApiError(
                400,
                f"model `{self.name}` has no chat template; send a prompt to /v1/completions",
                param="messages",
            )
        chat = Chat([one.template_message() for one in body.messages], body.template_tools())
        self._check_size(chat)
        if any(one.tool_calls for one in body.messages):
            self._check_calls_are_read()
        ids = await asyncio.to_thread(
            self.loaded.tokenizer.encode_chat,
            chat.messages,
            chat.tools,
            body.chat_template_kwargs,
        )
        if chat.tools is not None:
            _ = self.tool_format  # an unknown one is an error before anything is computed
        return ids

    def _check_calls_are_read(self) -> None:
        """Raises ApiError 400 where the model would not see what the assistant called."""
        if not self.loaded.tokenizer.chat_format.writes_calls:
            raise ApiError(
                400,
                f"the chat template of model `{self.name}` writes no calls, so that the model would"
                " not see them; leave `tool_calls` out, and say in `content` what was called",
                param="messages",
            )

    def submit(
        self,
        prompts: Sequence[list[int]],
        options: GenerationOptions,
        *,
        max_tokens: int | None,
        called: str = "max_tokens",
        logprobs: int | None = None,
        beams: int = 1,
        choices: int = 1,
        constraint: JSONConstraint | None = None,
        prompt_logprobs: int | None = None,
        chat: ChatBody | None = None,
    ) -> Ticket:
        """Queue `choices` completions for each prompt. `max_tokens` None: as many as server and
        model allow; `called` so by the client. `chat`: whose answers they are; in calls of its
        tools no stop string counts.

        Raises:
            ApiError: `max_tokens` is over the server's limit, or the queue is full, or so many
                completions never fit, which is known before any of them takes memory.
            WrongInput: a prompt that the model cannot read.
        """
        check_count(len(prompts) * choices, self.bounds.prompts, "answers")
        limit = self._limit(max_tokens, called)
        items = len(prompts) * choices * (max_tokens or limit) * (1 + (logprobs or 0))
        items *= logprobs is not None
        if prompt_logprobs is not None:
            items += sum(map(len, prompts)) * choices * (1 + prompt_logprobs)
        _check_logprobs(items)
        if self.loaded.kind == "seq2seq":
            if logprobs is not None:
                raise ApiError(
                    400,
                    f"model `{self.name}` gives no log-probabilities; leave `logprobs` out",
                    param="logprobs",
                )
            limit = min(limit, self.loaded.target_positions)
        special = special_in(options.stop, self.loaded.tokenizer.special_ids)
        requests = [
            options.request(
                prompt,
                max_tokens or limit,
                logprobs=logprobs,
                choice=choice,
                constraint=None if constraint is None else constraint.copy(),
                prompt_logprobs=prompt_logprobs,
                unstopped=None if chat is None else self._unstopped(chat),
                special=special,
            )
            for prompt in prompts
            for choice in range(choices)
        ]
        if self.loaded.kind == "seq2seq":
            requests = [Seq2SeqRequest(**vars(request), beams=beams) for request in requests]
        return self._queue(requests, choices)

    def _limit(self, max_tokens: int | None, called: str) -> int:
        """The tokens that an answer may have where the client asks for no fewer. Raises ApiError
        where it asks for more.
        """
        limit = self.settings.max_tokens
        if max_tokens is not None and max_tokens > limit:
            raise ApiError(
                400,
                f"{called} {max_tokens} is over this server's limit of {limit}; lower it, or raise"
                " serve.max_tokens",
                param=called,
            )
        return limit

    def _unstopped(self, chat: ChatBody) -> Callable[[int, str], bool] | None:
        """Where no stop string counts in one answer of a chat: in calls."""
        if chat.must_call:
            return lambda token, text: True
        if not chat.callable_tools():
            return None
        return InsideCalls(self.tool_format, self.tool_markers())

    def submit_classification(self, texts: Sequence[list[int]]) -> Ticket:
        """Queue texts for classification. Raises as `submit` does."""
        if not self.loaded.labels:
            raise ApiError(
                400,
                f"model `{self.name}` is {self.encoder_kind}; send texts as `input` to"
                " /v1/embeddings",
            )
        return self._queue([GenerationRequest(text, 1) for text in texts])

    def submit_masks(self, texts: Sequence[list[int]], top_k: int) -> Ticket:
        """Queue texts whose masks are to be filled. Raises as `submit` does."""
        mask = self.loaded.tokenizer.mask
        told = top_k * sum(token == mask for ids in texts for token in ids)
        if told > MAX_LOGPROBS_IN_ANSWER:
            raise ApiError(
                400,
                f"the answer would hold {told:,} probabilities, at most"
                f" {MAX_LOGPROBS_IN_ANSWER:,} are given; lower `top_k`, or send texts in parts",
                param="top_k",
            )
        return self._queue([MaskRequest(ids, 1, top_k=top_k) for ids in texts])

    def _queue(self, requests: Sequence[GenerationRequest], choices: int = 1) -> Ticket:
        self.check(requests, choices)
        return self.engine.submit(requests)

    def check(self, requests: Sequence[GenerationRequest], choices: int = 1) -> None:
        """Raises WrongInput where the model cannot serve a request: of several prompts, each with
        `choices` requests, with the number of that one.
        """
        for place, request in enumerate(requests):
            try:
                self.loaded.check(request)
            except WrongInput as error:
                if len(requests) == choices:
                    raise
                said = f"prompt {place // choices}: {error}"
                if isinstance(error, TooLong):
                    raise TooLong(said, error.positions) from None
                raise WrongInput(said) from None


def _check_logprobs(items: int) -> None:
    """Raises ApiError where an answer would hold too many."""
    if items > MAX_LOGPROBS_IN_ANSWER:
        raise ApiError(
            400,
            f"the answer would hold {items:,} log-probabilities, at most"
            f" {MAX_LOGPROBS_IN_ANSWER:,} are given; lower `max_tokens`, ask for fewer,"
            " or send prompts in parts",
            param="logprobs",
        )
