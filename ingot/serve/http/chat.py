"""Bodies of chats: messages, also those of tools and their calls, and the tools that a model may
call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Discriminator,
    FailFast,
    Field,
    GetJsonSchemaHandler,
    JsonValue,
    Tag,
    model_validator,
)
from pydantic_core import CoreSchema

from ingot.serve.http.bodies import (
    MAX_LOGPROBS,
    NULL,
    OpenAIRequest,
    RequestBody,
    Text,
    WholeNumber,
    clean_text,
)
from ingot.serve.http.errors import short
from ingot.tokenizers.chats.chat import tool
from ingot.tokenizers.chats.render import refused_kwarg

MAX_MESSAGES, MAX_PARTS, MAX_TOOLS = 4096, 256, 128
MAX_KWARGS, MAX_KWARGS_CHARACTERS = 32, 4096
MAX_LEVELS = 100
"""Of lists and objects in each other that a template is to write: what walks through them is a few
calls deep for each, and Python gives up at a thousand.
"""
TOO_DEEP = f"is nested more than {MAX_LEVELS} levels deep; write it flatter"
NONE: list[Any] = []
NO_KWARGS: dict[str, Any] = {}
HALF = re.compile("[\ud800-\udfff]")
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def _role(value: Any) -> Any:
    if isinstance(value, str) and value not in ROLES:
        raise ValueError(f"{short(value)!r:.60} is not a role; it is one of {', '.join(ROLES)}")
    return value


def _parts(value: Any) -> Any:
    """Name what is not text, before parts are validated as text."""
    if not isinstance(value, str | list):
        raise ValueError("give a text, or a list of parts of type text")
    parts = value if isinstance(clean_text(value), list) else []
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


def _arguments(value: Any) -> Any:
    """The arguments of a call that a client sends back: templates read them as an object. A model
    may have written half a surrogate pair, and some servers write no arguments as an empty text.
    """
    try:
        read = json.loads(value.strip() or "{}") if isinstance(value, str) else value
        text = json.dumps(read, ensure_ascii=False)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    except ValueError:
        read = None
    if not isinstance(read, dict):
        raise ValueError("give the call's arguments as the text of a JSON object")
    _check_levels(read)
    return read if text.isascii() else json.loads(HALF.sub("\ufffd", text))


def _choice(value: Any) -> Any:
    known = ("auto", "none", "required")
    function = value.get("function") if isinstance(value, dict) else None
    named = isinstance(function, dict) and value.get("type") == "function"
    if not named and value not in known:
        raise ValueError(
            f"give one of {', '.join(known)}, or"
            ' {"type": "function", "function": {"name": ...}}'
        )
    return value


def _clean_json(value: Any) -> str:
    """The text of what a template is to write."""
    _check_levels(value)
    return str(clean_text(json.dumps(value, ensure_ascii=False)))


def _check_levels(value: Any) -> None:
    level: list[Any] = [[value]]
    for _ in range(MAX_LEVELS + 1):
        inner = (one.values() if isinstance(one, dict) else one for one in level)
        level = [one for ones in inner for one in ones if isinstance(one, dict | list)]
    if level:
        raise ValueError(TOO_DEEP)


def _kwargs(value: Any) -> Any:
    """Arguments of the chat template, which cannot be what the request itself gives it."""
    if not isinstance(value, dict) or len(value) > MAX_KWARGS:
        raise ValueError(f"give an object of up to {MAX_KWARGS} arguments of the chat template")
    if (why := refused_kwarg(value)) is not None:
        raise ValueError(why)
    text = _clean_json(value)
    if len(text) > MAX_KWARGS_CHARACTERS:
        raise ValueError(f"give up to {MAX_KWARGS_CHARACTERS:,} characters of JSON")
    return value


class TextPart(RequestBody):
    """A part of a message; only text parts are supported."""

    type: str
    text: Text


class CalledFunction(RequestBody):
    """A function and what it was called with."""

    name: Text
    arguments: Annotated[
        dict[str, Any], BeforeValidator(_arguments, json_schema_input_type=str | dict[str, Any])
    ]


class ToolCallBody(RequestBody):
    """A call in a message of the assistant. `index`: as streams number them."""

    id: Text = ""
    type: Literal["function"] = "function"
    function: CalledFunction
    index: WholeNumber | None = None


class ChatMessage(RequestBody):
    """One turn of a chat."""

    role: Annotated[Text, BeforeValidator(_role)]
    content: Annotated[
        Annotated[str, Tag("Text")] | Annotated[list[TextPart], Tag("Parts")],
        Discriminator(lambda content: "Text" if isinstance(content, str) else "Parts"),
        BeforeValidator(_parts),
    ] = ""
    name: Text | None = None
    tool_calls: Annotated[list[ToolCallBody], Field(max_length=MAX_TOOLS)] = NONE
    tool_call_id: Text | None = None
    reasoning_content: Text | None = None
    thinking: Text | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_empty(cls, values: Any) -> Any:
        """Drop empty lists, which answers that clients send back contain."""
        return (
            {name: value for name, value in values.items() if value != []}
            if isinstance(values, dict)
            else values
        )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        reference = super().__get_pydantic_json_schema__(core, handler)
        schema = handler.resolve_ref_schema(reference)
        schema["additionalProperties"] = {"anyOf": [NULL, {"type": "array", "maxItems": 0}]}
        return reference

    @model_validator(mode="after")
    def _belongs_to_the_role(self) -> ChatMessage:
        if "content" not in self.model_fields_set and self.role not in ("assistant", "tool"):
            raise ValueError(f"a message of the role {self.role} has no `content`; give its text")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("`tool_calls` belongs to messages of the role assistant; move it")
        if self.tool_call_id is not None and self.role != "tool":
            raise ValueError("`tool_call_id` belongs to messages of the role tool; move it")
        if self.thoughts and self.role != "assistant":
            name = next(iter(self.thoughts))
            raise ValueError(f"`{name}` belongs to messages of the role assistant; move it")
        return self

    @property
    def thoughts(self) -> dict[str, str]:
        """What the assistant thought, by the name that its template reads it under."""
        given = {"reasoning_content": self.reasoning_content, "thinking": self.thinking}
        return {name: value for name, value in given.items() if value is not None}

    def template_message(self) -> dict[str, Any]:
        """The message as chat templates read it."""
        content = (
            self.content
            if isinstance(self.content, str)
            else "".join(part.text for part in self.content)
        )
        calls = [call.model_dump(exclude={"index"}) for call in self.tool_calls]
        more = {"name": self.name, "tool_calls": calls or None, "tool_call_id": self.tool_call_id}
        given = {name: value for name, value in more.items() if value is not None}
        return {"role": self.role, "content": content, **given, **self.thoughts}


def _object_schema(value: Any) -> Any:
    kind = value.get("type", "object") if isinstance(value, dict) else "object"
    if kind != "object":
        raise ValueError(
            f"is of type {short(str(kind))!r:.60}, but the arguments of a function are an object;"
            " give `type` object"
        )
    _clean_json(value)
    return value


class FunctionBody(RequestBody):
    """A function that the model may call, with the JSON schema of its arguments. `strict`: calls
    are held to it also where the model chooses whether to call.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: Text | None = None
    parameters: Annotated[dict[str, Any] | None, BeforeValidator(_object_schema)] = None
    strict: bool = False


class ToolBody(RequestBody):
    """A tool; functions are the only ones."""

    type: Literal["function"]
    function: FunctionBody


def template_tools(tools: Sequence[ToolBody]) -> list[dict[str, Any]]:
    """Tools as chat templates read them."""
    return [tool(body.function.model_dump()) for body in tools]


class NamedFunction(RequestBody):
    """The function that must be called."""

    name: Text


class NamedTool(RequestBody):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class ChatBody(OpenAIRequest):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES), FailFast()]
    max_completion_tokens: Annotated[WholeNumber, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] = 0
    tools: Annotated[list[ToolBody], Field(max_length=MAX_TOOLS), FailFast()] = NONE
    tool_choice: Annotated[
        Literal["auto", "none", "required"] | NamedTool, BeforeValidator(_choice)
    ] = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: Annotated[dict[str, JsonValue], BeforeValidator(_kwargs)] = NO_KWARGS

    @model_validator(mode="after")
    def _has_one_limit(self) -> ChatBody:
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise ValueError("`max_tokens` and `max_completion_tokens` differ; give one of them")
        return self

    @model_validator(mode="after")
    def _tools_fit(self) -> ChatBody:
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"two of `tools` have the same name `{twice}`; rename one")
        if self.tool_choice in ("auto", "none"):
            wanted = None
        elif isinstance(self.tool_choice, NamedTool):
            wanted = self.tool_choice.function.name
        else:
            wanted = next(iter(names), "")
        if wanted is not None and wanted not in names:
            named = f"the tool `{short(wanted)}`, which" if wanted else "a tool that"
            raise ValueError(f"`tool_choice` asks for {named} is not in `tools`; add it there")
        return self

    @model_validator(mode="after")
    def _results_are_of_calls(self) -> ChatBody:
        called: set[str] = set()
        for number, message in enumerate(self.messages):
            called.update(call.id for call in message.tool_calls)
            if message.tool_call_id is not None and message.tool_call_id not in called:
                raise ValueError(
                    f"`messages.{number}.tool_call_id` is {short(message.tool_call_id)!r}, and no"
                    " message before it makes a call of that id; send the assistant's message with"
                    " its `tool_calls`, too"
                )
        return self

    @property
    def must_call(self) -> bool:
        """Whether the answer must be a call."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    def callable_tools(self) -> Sequence[ToolBody]:
        """The tools that this answer may call."""
        if self.tool_choice == "none":
            return []
        if isinstance(choice := self.tool_choice, NamedTool):
            return [tool for tool in self.tools if tool.function.name == choice.function.name]
        return self.tools

    def template_tools(self) -> list[dict[str, Any]] | None:
        """The tools as chat templates read them; None where none may be called."""
        return template_tools(self.tools) if self.callable_tools() else None
