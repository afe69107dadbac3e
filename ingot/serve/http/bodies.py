"""Request bodies. Unknown fields are refused by name; fields of OpenAI's API that this server does
not support are accepted at their neutral values only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, model_validator

from ingot.serve.http.errors import ApiError, short

# Fields of OpenAI's API that this server does not support, with the values that have no effect.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "store": (False,),
    "service_tier": ("auto", "default"),
}
# Fields that describe the caller and do not affect the answer.
IGNORED_FIELDS = ("user", "metadata", "safety_identifier", "prompt_cache_key")
MAX_LOGPROBS = 20
MAX_BEAMS = 16
# More fields than any valid request has: a body with more is refused as a whole, not field by
# field.
MAX_FIELDS = 64
MAX_MESSAGES, MAX_PARTS = 4096, 256
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def _clean_text(value: Any) -> Any:
    """Refuse lone surrogates, which JSON can escape but UTF-8 cannot encode."""
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError("holds half of a surrogate pair; send whole characters") from None
    return value


def _role(value: Any) -> Any:
    if isinstance(value, str) and value not in ROLES:
        raise ValueError(f"{short(value)!r:.60} is not a role; it is one of {', '.join(ROLES)}")
    return value


def _parts(value: Any) -> Any:
    """Name a part that is not text, before parts are validated as text."""
    parts = value if isinstance(value, list) else []
    if len(parts) > MAX_PARTS:
        raise ValueError(f"has {len(parts):,} parts; send up to {MAX_PARTS}")
    for number, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise ValueError(
                f"part {number} is of type {short(kind)!r:.60}; this model reads text, send"
                " parts of type text alone"
            )
    return value


def _whole(value: Any) -> Any:
    """Accept 64.0 as 64: Vertex AI sends protocol buffers' JSON, which has no integers."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _prompts(value: Any) -> list[str | list[int]]:
    """The list of prompts in a text, a list of texts, a list of token ids, or a list of such
    lists.
    """
    if isinstance(value, str):
        prompts: list[Any] = [value]
    elif isinstance(value, list) and value and all(type(item) is int for item in value):
        prompts = [value]
    else:
        prompts = value if isinstance(value, list) else []
    if not prompts:
        raise ValueError("give a text, a list of texts, or a list of token ids")
    for number, prompt in enumerate(prompts):
        is_ids = isinstance(prompt, list) and all(type(item) is int for item in prompt)
        if not isinstance(prompt, str) and not is_ids:
            raise ValueError(f"item {number} is neither a text nor a list of token ids")
        _clean_text(prompt)
    return prompts


def _stops(value: Any) -> list[str]:
    """The list of stop strings in a text or a list."""
    stops = [value] if isinstance(value, str) else value
    if (
        not isinstance(stops, list)
        or len(stops) > 16
        or not all(isinstance(stop, str) and 0 < len(stop) <= 256 for stop in stops)
    ):
        raise ValueError("give a text or a list of up to 16, each of 1 to 256 characters")
    return [_clean_text(stop) for stop in stops]


Text = Annotated[str, BeforeValidator(_clean_text)]
WholeNumber = Annotated[int, BeforeValidator(_whole)]


class RequestBody(BaseModel):
    """The base of all bodies: strict types, no unknown fields; null means left out."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        if len(values) > MAX_FIELDS:
            raise ValueError(
                f"has {len(values):,} fields, more than any request; send those of the API alone"
            )
        kept = {}
        for name, value in values.items():
            if value is None or (name in IGNORED_FIELDS and name not in cls.model_fields):
                continue
            if name in NEUTRAL_VALUES and name not in cls.model_fields:
                if value not in NEUTRAL_VALUES[name]:
                    raise ValueError(f"`{name}` is not supported by this server; leave it out")
                continue
            kept[name] = value
        return kept


class GenerationOptions(RequestBody):
    """Generation options, shared by all routes."""

    max_tokens: Annotated[WholeNumber, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    seed: Annotated[WholeNumber, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[list[str], BeforeValidator(_stops)] = []


class StreamOptions(RequestBody):
    """What a stream contains beside the text."""

    include_usage: bool = False
    include_obfuscation: bool = False


class OpenAIRequest(GenerationOptions):
    """Fields of both completions and chats."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()


class CompletionBody(OpenAIRequest):
    """`POST /v1/completions`."""

    prompt: Annotated[list[str | list[int]], BeforeValidator(_prompts)]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None


class TextPart(RequestBody):
    """A part of a message; only text parts are supported."""

    type: str
    text: Text


class ChatMessage(RequestBody):
    """One turn of a chat."""

    role: Annotated[Text, BeforeValidator(_role)]
    content: Annotated[Text | list[TextPart], BeforeValidator(_parts)] = ""
    name: Text | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_empty(cls, values: Any) -> Any:
        """Drop empty lists, which answers that clients send back contain."""
        return (
            {name: value for name, value in values.items() if value != []}
            if isinstance(values, dict)
            else values
        )

    def template_message(self) -> dict[str, str]:
        """The message as chat templates read it."""
        content = (
            self.content
            if isinstance(self.content, str)
            else "".join(part.text for part in self.content)
        )
        return {"role": self.role, "content": content} | (
            {} if self.name is None else {"name": self.name}
        )


class ChatBody(OpenAIRequest):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES), FailFast()]
    max_completion_tokens: Annotated[WholeNumber, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] = 0


class PromptInstance(RequestBody):
    """One instance of a prediction request."""

    prompt: Text


class PredictParameters(GenerationOptions):
    """`parameters` of a prediction request; greedy by default."""

    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0


class PredictBody(RequestBody):
    """Vertex AI's prediction request."""

    instances: Annotated[list[Text | PromptInstance], Field(min_length=1), FailFast()]
    parameters: PredictParameters = PredictParameters()


class SummaryParameters(PredictParameters):
    """`parameters` of a prediction request to a sequence-to-sequence model."""

    beams: Annotated[WholeNumber, Field(ge=1, le=MAX_BEAMS)] = 1


class SummaryBody(RequestBody):
    """Vertex AI's prediction request to a sequence-to-sequence model."""

    instances: Annotated[list[Text | PromptInstance], Field(min_length=1), FailFast()]
    parameters: SummaryParameters = SummaryParameters()


class TextInstance(RequestBody):
    """One text to be classified."""

    text: Text


class NoParameters(RequestBody):
    """`parameters` of a prediction request to a classifier: none."""


def check_count(prompts: int, most: int) -> None:
    """Raises ApiError 400 if one request has more prompts than can ever fit."""
    if prompts > most:
        raise ApiError(
            400,
            f"{prompts} prompts in one request; this server takes at most {most}, send them in"
            " parts",
        )


@dataclass(frozen=True)
class PromptBounds:
    """Upper bounds on the prompts of one request, checked before encoding: their number, and the
    characters of each that could fit into the model's `positions`.
    """

    prompts: int
    positions: int
    characters: int

    def check(self, prompts: Sequence[str | list[int]]) -> None:
        """Raises ApiError 400 for too many prompts, or for a text that can never fit."""
        check_count(len(prompts), self.prompts)
        for number, prompt in enumerate(prompts):
            if isinstance(prompt, str):
                self.check_characters(len(prompt), f"prompt {number}")

    def check_chat(self, messages: Sequence[ChatMessage]) -> None:
        """Raises ApiError 400 for a chat that can never fit."""
        texts = (message.template_message()["content"] for message in messages)
        self.check_characters(sum(map(len, texts)), "the chat")

    def check_characters(self, characters: int, what: str) -> None:
        """Raises ApiError 400 if `what` has more characters than can fit."""
        if characters > self.characters:
            raise ApiError(
                400,
                f"{what} has {characters:,} characters; the model's {self.positions:,} positions"
                f" hold at most {self.characters:,}, shorten it",
            )


class ClassifyBody(RequestBody):
    """Vertex AI's prediction request to a classifier."""

    instances: Annotated[list[Text | TextInstance], Field(min_length=1), FailFast()]
    parameters: NoParameters = NoParameters()
