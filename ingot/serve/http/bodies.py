"""Request bodies. Unknown fields are refused by name; fields of OpenAI's API that this server does
not support are accepted at their neutral values only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic_core import CoreSchema

from ingot.models.generation.request import Constraint, TooLong
from ingot.models.generation.request import Request as GenerationRequest
from ingot.models.generation.sampling import Sampling
from ingot.serve.http.errors import ApiError, short

# Fields of OpenAI's API that a route does not support, with the values that have no effect.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
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
# Why some of them are not, where that helps more than to leave them out.
INSTEAD = {"best_of": "ask for several choices with `n` and take the one you like best"}
MAX_LOGPROBS = 20
MAX_CHOICES = 128
MAX_BIASES = 1024
MAX_STOPS = 16
# More fields than any valid request has: a body with more is refused as a whole, not field by
# field.
MAX_FIELDS = 64
# A field that is left out, and what is said about a field rather than asked of it, as JSON schemas
# have them; and bounds, which pydantic calls by its own names where a number is read first.
NULL = {"type": "null"}
ABOUT = ("title", "description", "default")
BOUNDS = {"ge": "minimum", "le": "maximum", "gt": "exclusiveMinimum", "lt": "exclusiveMaximum"}


def clean_text(value: Any) -> Any:
    """Refuse lone surrogates, which JSON can escape but UTF-8 cannot encode."""
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError("holds half of a surrogate pair; send whole characters") from None
    return value


def _whole(value: Any) -> Any:
    """Accept 64.0 as 64: Vertex AI sends protocol buffers' JSON, which has no integers."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def prompt_list(value: Any) -> list[str | list[int]]:
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
        clean_text(prompt)
    return prompts


def _stops(value: Any) -> list[str]:
    """The list of stop strings in a text or a list."""
    stops = [value] if isinstance(value, str) else value
    if (
        not isinstance(stops, list)
        or len(stops) > MAX_STOPS
        or not all(isinstance(stop, str) and 0 < len(stop) <= 256 for stop in stops)
    ):
        raise ValueError(f"give a text or a list of up to {MAX_STOPS}, each of 1 to 256 characters")
    return [clean_text(stop) for stop in stops]


def _biases(value: Any) -> dict[int, float]:
    """Biases by token id, which is a text in JSON."""
    if not isinstance(value, dict) or len(value) > MAX_BIASES:
        raise ValueError(f"give a mapping of up to {MAX_BIASES:,} token ids to biases")
    biases = {}
    for name, bias in value.items():
        token = int(name) if isinstance(name, str) and name.isdecimal() else name
        if type(token) is not int or type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise ValueError(
                f"{short(str(name))!r:.60}: {short(str(bias))!r:.60} is not a token id with a bias"
                " from -100 to 100"
            )
        biases[token] = float(bias)
    return biases


def _or_null(field: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema of a field that may be null, too."""
    about = {name: said for name, said in field.items() if name in ABOUT}
    asked = {name: value for name, value in field.items() if name not in ABOUT}
    either = [
        {BOUNDS.get(name, name): value for name, value in one.items()}
        for one in (asked["anyOf"] if list(asked) == ["anyOf"] else [asked])
    ]
    return {"anyOf": either if NULL in either else [*either, NULL], **about}


Prompts = Annotated[
    list[str | list[int]],
    BeforeValidator(prompt_list, json_schema_input_type=str | list[int] | list[str | list[int]]),
]
Text = Annotated[str, BeforeValidator(clean_text)]
WholeNumber = Annotated[int, BeforeValidator(_whole)]


class RequestBody(BaseModel):
    """The base of all bodies: strict types, no unknown fields; null means left out. `neutral` and
    `instead`: fields that a body does not support, and why; `told`: whether its JSON schema has
    them, as those of whole requests do, which clients send them in.
    """

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = NEUTRAL_VALUES
    instead: ClassVar[Mapping[str, str]] = INSTEAD
    told: ClassVar[bool] = False
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
            if name in cls.neutral and name not in cls.model_fields:
                if value not in cls.neutral[name]:
                    instead = cls.instead.get(name, "leave it out")
                    raise ValueError(f"`{name}` is not supported by this server; {instead}")
                continue
            kept[name] = value
        return kept

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """What `_drop_neutral` takes out is taken: a client that checks its requests by this schema
        would send none of it.
        """
        reference = handler(core)
        schema = handler.resolve_ref_schema(reference)
        fields = schema.setdefault("properties", {})
        for name in fields.keys() - set(schema.get("required", ())):
            fields[name] = _or_null(fields[name])
        if cls.told:
            neutral = {name: {"enum": [*values, None]} for name, values in cls.neutral.items()}
            fields |= {**neutral, **{name: {} for name in IGNORED_FIELDS}, **fields}
        schema["additionalProperties"] = NULL
        return reference


class GenerationOptions(RequestBody):
    """Generation options, shared by all routes: OpenAI's, and those of vLLM by its names."""

    told = True
    max_tokens: Annotated[WholeNumber, Field(ge=1)] | None = None
    min_tokens: Annotated[WholeNumber, Field(ge=0)] = 0
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    top_k: Annotated[WholeNumber, Field(ge=-1)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] = 1.0
    logit_bias: Annotated[dict[int, float], BeforeValidator(_biases)] = {}
    seed: Annotated[WholeNumber, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[list[str], BeforeValidator(_stops, json_schema_input_type=str | list[str])] = []
    stop_token_ids: Annotated[list[WholeNumber], Field(max_length=MAX_STOPS)] = []
    ignore_eos: bool = False
    cache_salt: Annotated[Text, Field(min_length=1, max_length=256)] | None = None

    def request(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        logprobs: int | None = None,
        choice: int = 0,
        constraint: Constraint | None = None,
        prompt_logprobs: int | None = None,
        unstopped: Callable[[int, str], bool] | None = None,
        special: Mapping[str, int] | None = None,
    ) -> GenerationRequest:
        """The request of one prompt; `choice`: which of several answers to it, `constraint` and
        `unstopped`: of its own; `special`: the special tokens in `stop`.
        """
        sampling = Sampling(
            self.temperature,
            self.top_p,
            None if self.seed is None else self.seed + choice,
            logprobs,
            max(self.top_k, 0),
            self.min_p,
            self.presence_penalty,
            self.frequency_penalty,
            self.repetition_penalty,
            tuple(self.logit_bias.items()),
        )
        return GenerationRequest(
            prompt,
            max_tokens,
            sampling,
            tuple(self.stop),
            unstopped=unstopped,
            special=special or {},
            stop_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
            constraint=constraint,
            prompt_logprobs=prompt_logprobs,
            cache_salt=self.cache_salt,
        )


class StreamOptions(RequestBody):
    """What a stream contains beside the text."""

    include_usage: bool = False
    include_obfuscation: bool = False


class SchemaFormat(RequestBody):
    """The schema of an answer, with a name that clients choose."""

    name: Text = ""
    description: Text | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool = True


class ResponseFormat(RequestBody):
    """What an answer must be: any text, a JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None

    @property
    def schema_asked(self) -> dict[str, Any] | None:
        """The schema of an answer; None where any text is one."""
        if self.json_schema is not None:
            return self.json_schema.schema_
        return {"type": "object"} if self.type == "json_object" else None

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("give `json_schema` with type json_schema, and with no other")
        return self


class OpenAIRequest(GenerationOptions):
    """Fields of both completions and chats."""

    model: str | None = None
    n: Annotated[WholeNumber, Field(ge=1, le=MAX_CHOICES)] = 1
    response_format: ResponseFormat = ResponseFormat(type="text")
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()


class CompletionBody(OpenAIRequest):
    """`POST /v1/completions`."""

    prompt: Prompts
    max_tokens: Annotated[WholeNumber, Field(ge=0)] | None = None
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _prompts_fit(self) -> CompletionBody:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError(
                "`max_tokens` is 0: input should be greater than or equal to 1, unless `echo` is"
                " true"
            )
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError("`prompt_logprobs` are not streamed; leave `stream` out")
        return self

    @property
    def scores_prompts(self) -> int | None:
        """How many of the likeliest tokens are told for each of the prompts'; None: nothing."""
        if self.echo and self.logprobs is not None:
            return max(self.logprobs, self.prompt_logprobs or 0)
        return self.prompt_logprobs


def text_as(name: str, instance: Any) -> BeforeValidator:
    """An `instance` that is a text alone is the object with it as the field `name`."""

    def read(value: Any) -> Any:
        if not isinstance(value, str | dict):
            raise ValueError(f'give a text, or an object such as {{"{name}": "..."}}')
        return {name: value} if isinstance(value, str) else value

    return BeforeValidator(read, json_schema_input_type=str | instance)


class PromptInstance(RequestBody):
    """One instance of a prediction request."""

    prompt: Text


PromptInstances = Annotated[
    list[Annotated[PromptInstance, text_as("prompt", PromptInstance)]],
    Field(min_length=1),
    FailFast(),
]


class PredictParameters(GenerationOptions):
    """`parameters` of a prediction request; greedy by default."""

    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0


class PredictBody(RequestBody):
    """Vertex AI's prediction request."""

    instances: PromptInstances
    parameters: PredictParameters = PredictParameters()


def check_count(count: int, most: int, what: str = "prompts") -> None:
    """Raises ApiError 400 if one request has, or wants, more than can ever fit."""
    if count > most:
        raise ApiError(
            400,
            f"{count} {what} in one request; this server takes at most {most}, send them in parts",
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
        """Raises ApiError 400 for too many prompts, TooLong for a text that can never fit."""
        check_count(len(prompts), self.prompts)
        for number, prompt in enumerate(prompts):
            if isinstance(prompt, str):
                self.check_characters(len(prompt), f"prompt {number}")

    def check_characters(self, characters: int, what: str) -> None:
        """Raises TooLong if `what` has more characters than can fit."""
        if characters > self.characters:
            raise TooLong(
                f"{what} has {characters:,} characters; the model's {self.positions:,} positions"
                f" hold at most {self.characters:,}, shorten it",
                self.positions,
            )
