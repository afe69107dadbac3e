"""The body of `POST /v1/responses`, and the chat that it stands for. What needs a store, OpenAI's
own tools, images or reasoning is refused in words.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, FailFast, Field, ValidationError, model_validator

from ingot.serve.http.bodies import (
    GenerationOptions,
    RequestBody,
    Text,
    WholeNumber,
)
from ingot.serve.http.chat import MAX_MESSAGES, MAX_TOOLS, NONE, ChatBody, FunctionBody
from ingot.serve.http.errors import short, validation_error

STATELESS = "nothing is stored here; send the conversation so far as `input` items"
ELSEWHERE = "ask /v1/chat/completions with `logprobs`"
TEXT_PARTS = ("input_text", "output_text", "text")
ITEMS = ("message", "function_call", "function_call_output")


def _parts(value: Any) -> Any:
    """The text of a message's parts; what is not text is refused by its type."""
    if not isinstance(value, list):
        return value
    texts = []
    for number, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text") if isinstance(part, dict) else None
        if kind not in TEXT_PARTS or not isinstance(text, str):
            raise ValueError(
                f"part {number} is of type {short(str(kind))!r:.60}; this model reads text, send"
                " parts of type input_text or output_text alone"
            )
        texts.append(text)
    return "".join(texts)


def _items(value: Any) -> Any:
    """The items of an input; a text is one message of the user."""
    items = [{"role": "user", "content": value}] if isinstance(value, str) else value
    for number, item in enumerate(items if isinstance(items, list) else []):
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if isinstance(kind, str) and kind not in ITEMS:
            why = STATELESS if kind == "item_reference" else f"send items of {', '.join(ITEMS)}"
            raise ValueError(
                f"item {number} is of type {short(kind)!r:.60}, which is not read; {why}"
            )
    return items


def _tools(value: Any) -> Any:
    """Name a tool that is none of the caller's own functions."""
    for tool in value if isinstance(value, list) else []:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind != "function":
            raise ValueError(
                f"a tool of type {short(str(kind))!r:.60} is not run by this server; give functions"
                " and run them yourself"
            )
    return value


def _tool_choice(value: Any) -> Any:
    named = isinstance(value, dict) and value.get("type") == "function" and "name" in value
    if not named and value not in ("auto", "none", "required"):
        raise ValueError('give one of auto, none, required, or {"type": "function", "name": ...}')
    return value


Said = Annotated[
    Text | None,
    BeforeValidator(_parts, json_schema_input_type=str | list[dict[str, Any]] | None),
]


class InputItem(RequestBody):
    """A message, a call of a function, or what a call gave: as one sends them, and as a response
    holds them. `id`, `status` and `phase` are read over.
    """

    type: Literal["message", "function_call", "function_call_output"] = "message"
    id: Text | None = None
    status: Text | None = None
    phase: Text | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Said = None
    call_id: Text | None = None
    name: Text | None = None
    arguments: Text | None = None
    output: Said = None

    @model_validator(mode="after")
    def _has_what_its_type_needs(self) -> InputItem:
        needs = {
            "message": ("role", "content"),
            "function_call": ("call_id", "name", "arguments"),
            "function_call_output": ("call_id", "output"),
        }
        all_ = {field for fields in needs.values() for field in fields}
        for field in sorted(all_):
            if (getattr(self, field) is None) == (field in needs[self.type]):
                what = "is missing in" if field in needs[self.type] else "does not belong to"
                raise ValueError(
                    f"`{field}` {what} an item of type {self.type}; it has"
                    f" {', '.join(needs[self.type])}"
                )
        return self


class ResponseTool(FunctionBody):
    """A function that the model may call."""

    type: Literal["function"]


class ToolChoice(RequestBody):
    """The function that must be called."""

    type: Literal["function"]
    name: Text


class TextFormat(RequestBody):
    """What a text must be. As `response_format` of a chat, with the schema one level higher."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Text | None = None
    description: Text | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    def response_format(self) -> dict[str, Any]:
        """As chats have it."""
        given = self.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)
        return {"type": self.type, **({"json_schema": given} if given else {})}


class TextOptions(RequestBody):
    """`text` of a request."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"verbosity": ("medium",)}
    told = True
    format: TextFormat = TextFormat()


class ResponseStreamOptions(RequestBody):
    """What a stream contains; nothing is added to it either way."""

    include_obfuscation: bool = False


class ResponsesBody(GenerationOptions):
    """`POST /v1/responses`: OpenAI's fields, and vLLM's sampling options by their names."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "store": (False,),
        "previous_response_id": (),
        "conversation": (),
        "background": (False,),
        "truncation": ("disabled",),
        "include": ([],),
        "top_logprobs": (0,),
        "reasoning": ({},),
        "prompt": (),
        "max_tool_calls": (),
        "service_tier": ("auto", "default"),
        "prompt_cache_retention": ("in_memory", "in-memory", "24h"),
        "n": (1,),
    }
    instead: ClassVar[Mapping[str, str]] = {
        "store": STATELESS,
        "previous_response_id": STATELESS,
        "conversation": STATELESS,
        "background": "wait for the answer, or set `stream`",
        "truncation": "an input that is too long is refused; shorten it yourself",
        "include": ELSEWHERE,
        "top_logprobs": ELSEWHERE,
        "prompt": "no prompts are stored here; send `instructions` and `input`",
        "max_tool_calls": "functions are yours to run, so count their calls yourself",
        "n": "send the request several times, or ask /v1/chat/completions",
    }

    model: str | None = None
    input: Annotated[
        list[InputItem],
        Field(min_length=1, max_length=MAX_MESSAGES),
        FailFast(),
        BeforeValidator(_items, json_schema_input_type=str | list[InputItem]),
    ]
    instructions: Text | None = None
    max_output_tokens: Annotated[WholeNumber, Field(ge=1)] | None = None
    text: TextOptions = TextOptions()
    tools: Annotated[
        list[ResponseTool], Field(max_length=MAX_TOOLS), FailFast(), BeforeValidator(_tools)
    ] = NONE
    tool_choice: Annotated[
        Literal["auto", "none", "required"] | ToolChoice, BeforeValidator(_tool_choice)
    ] = "auto"
    parallel_tool_calls: bool = True
    stream: bool = False
    stream_options: ResponseStreamOptions = ResponseStreamOptions()
    metadata: Annotated[dict[str, Text], Field(max_length=16)] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _named_as_here(self) -> ResponsesBody:
        if self.max_tokens is not None:
            raise ValueError("`max_tokens` is called `max_output_tokens` in responses; rename it")
        return self

    @model_validator(mode="after")
    def _results_are_of_calls(self) -> ResponsesBody:
        called: set[str | None] = set()
        for number, item in enumerate(self.input):
            if item.type == "function_call":
                called.add(item.call_id)
            elif item.type == "function_call_output" and item.call_id not in called:
                raise ValueError(
                    f"`input.{number}.call_id` is {short(str(item.call_id))!r}, and no item before"
                    " it is a call of that id; send the function_call, too"
                )
        return self

    def chat(self) -> ChatBody:
        """The chat that is asked for.

        Raises:
            ApiError: 400 for what no chat may be, as for a chat.
        """
        choice = self.tool_choice
        if isinstance(choice, ToolChoice):
            named = {"type": "function", "function": {"name": choice.name}}
        tools = [
            {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
            for tool in self.tools
        ]
        try:
            return ChatBody.model_validate(
                {
                    "messages": self._messages(),
                    "response_format": self.text.format.response_format(),
                    "tools": tools,
                    "tool_choice": named if isinstance(choice, ToolChoice) else choice,
                    "parallel_tool_calls": self.parallel_tool_calls,
                }
            )
        except ValidationError as error:
            raise validation_error(error.errors()) from None

    def echoed(self) -> dict[str, Any]:
        """The fields of a response that repeat the request."""
        text = self.text.model_dump(by_alias=True, exclude_none=True)
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata,
            "parallel_tool_calls": self.parallel_tool_calls,
            "previous_response_id": None,
            "store": False,
            "background": False,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "text": text,
            "tool_choice": self.model_dump(include={"tool_choice"})["tool_choice"],
            "tools": [{"parameters": None, **tool.model_dump()} for tool in self.tools],
            "truncation": "disabled",
        }

    def _messages(self) -> list[dict[str, Any]]:
        """Messages of a chat; calls belong to the assistant's message before them."""
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        for item in self.input:
            if item.type == "message":
                messages.append({"role": item.role, "content": item.content})
            elif item.type == "function_call_output":
                messages.append(
                    {"role": "tool", "content": item.output, "tool_call_id": item.call_id}
                )
            else:
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                messages[-1].setdefault("tool_calls", []).append(call)
        return messages
