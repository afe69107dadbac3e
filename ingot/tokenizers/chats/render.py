"""Renders chats to text with Jinja templates, in the sandbox that Hugging Face's templates are
written for. Encodes nothing.

Look-alikes of special tokens in messages can be masked before rendering, so that afterwards only
the template's own special tokens look like such. Masks are private-use characters of plane 15;
marks that show positions are of plane 16.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ingot.base.errors import WrongInput
from ingot.tokenizers.backend import ControlEncoder
from ingot.tokenizers.chats.chat import Chat, Messages, Tools, with_arguments

PRIVATE_USE = range(0xF0000, 0xFFFFE)
MARKS = re.compile("[\U00100000-\U0010fffd]")
# Marks around `{% generation %}` blocks.
BEGIN, END = "\U00100000", "\U00100001"
FIRST_MARK = 0x100010
TemplateKwargs = Mapping[str, Any]
"""Arguments of a template's own, such as `enable_thinking`, by name."""
NONE: TemplateKwargs = {}
GIVEN = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
GIVEN |= {"raise_exception", "strftime_now", "chat_template", "tokenize", "return_dict"}
"""What a template is given, or transformers is told, by other means than arguments."""


@dataclass(frozen=True)
class ChatFormat:
    """Everything that decides how the messages of a chat are rendered and encoded. `special` maps
    the tokens that only a template may produce to their ids; `tools`: what the model may call.
    """

    where: str
    template: str
    special: Mapping[str, int]
    named: Mapping[str, str]
    control: ControlEncoder
    tools: Tools | None = None

    def render(
        self,
        messages: Messages,
        *,
        generation_prompt: bool = False,
        kwargs: TemplateKwargs = NONE,
    ) -> str:
        return render(
            self.template,
            messages,
            {**kwargs, **self.named},
            generation_prompt=generation_prompt,
            tools=self.tools,
        )

    def render_marked(self, messages: Messages) -> str:
        """The text with BEGIN and END around what stands in `{% generation %}` blocks."""
        return render_marked(self.template, messages, self.named, tools=self.tools)

    def with_tools(self, tools: Tools | None) -> ChatFormat:
        """The format of chats in which the model may call these.

        Raises:
            WrongInput: the template does not write them.
        """
        if tools is not None and not _takes_tools(self.template, tuple(self.named.items())):
            raise WrongInput(
                f"the chat template of {self.where} knows no tools, so that no model would be told"
                " of them; leave `tools` out, or take a template that writes them"
            )
        return replace(self, tools=tools)

    @property
    def writes_calls(self) -> bool:
        """Whether a template writes what the assistant called."""
        return _writes_calls(self.template, tuple(self.named.items()))

    def as_read(self, chat: Chat) -> Chat:
        """The chat with the arguments of its calls in the form that the template reads."""
        if not any(message.get("tool_calls") for message in chat.messages):
            return chat
        as_text = _reads_text(self.template, tuple(self.named.items()))
        return replace(chat, messages=with_arguments(chat.messages, as_text=as_text))


@functools.lru_cache(maxsize=16)
def _takes_tools(template: str, named: tuple[tuple[str, str], ...]) -> bool:
    """Whether a template writes the tools that a model may call."""
    probe = {"name": "probe_of_tools", "description": "", "parameters": {"type": "object"}}
    asked = [{"role": "user", "content": "a"}]
    tools = [{"type": "function", "function": probe}]
    try:
        text = render(template, asked, dict(named), generation_prompt=True, tools=tools)
    except WrongInput:
        return False
    return "probe_of_tools" in text


@functools.lru_cache(maxsize=16)
def _writes_calls(template: str, named: tuple[tuple[str, str], ...]) -> bool:
    """Whether a template writes the calls of an answer, with tools or without."""
    function = {"name": "probe_of_calls", "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": function}]

    def is_written(arguments: Any, given: Tools | None) -> bool:
        messages = _called("probe_of_calls", arguments)
        try:
            text = render(template, messages, dict(named), generation_prompt=False, tools=given)
        except WrongInput:
            return False
        messages[1]["tool_calls"][0]["function"]["name"] = "another"
        other = render(template, messages, dict(named), generation_prompt=False, tools=given)
        return text != other

    return any(
        is_written(given, some) for given in ({"a": 1}, '{"a": 1}') for some in (None, tools)
    )


def _called(name: str, arguments: Any) -> list[dict[str, Any]]:
    """A chat in which the assistant calls a function."""
    call = {"name": name, "arguments": arguments}
    calls = [{"id": "abcdefgh1", "type": "function", "function": call}]
    asked = {"role": "user", "content": "a"}
    return [asked, {"role": "assistant", "content": "", "tool_calls": calls}]


@functools.lru_cache(maxsize=16)
def _reads_text(template: str, named: tuple[tuple[str, str], ...]) -> bool:
    """Whether a template takes the arguments of a call as a text alone, and no object."""

    def is_refused(arguments: Any) -> bool:
        try:
            render(template, _called("f", arguments), dict(named), generation_prompt=False)
        except WrongInput:
            return True
        return False

    return is_refused({"a": 1}) and not is_refused('{"a": 1}')


def render(
    template: str,
    messages: Messages,
    named: TemplateKwargs,
    *,
    generation_prompt: bool,
    tools: Tools | None = None,
) -> str:
    """The text of a chat. `named` is what the template may name beside it: `bos_token`, `eos_token`
    and the like, and arguments of its own. `tools`: what the model may call, in OpenAI's format.

    Raises:
        WrongInput: the template is not valid, or refuses these messages; its own reason is given.
    """
    return (
        render_marked(template, messages, named, generation_prompt=generation_prompt, tools=tools)
        .replace(BEGIN, "")
        .replace(END, "")
    )


def refused_kwarg(kwargs: TemplateKwargs) -> str | None:
    """Why these cannot be arguments of a template; None if they can."""
    for name in kwargs:
        if not name.isidentifier() or name.startswith("_"):
            return f"{name[:40]!r} is no name that a template could ask for"
        if name in GIVEN or name.endswith("_token"):
            return f"`{name}` is set by the request or the tokenizer; leave it out"
    return None


def render_marked(
    template: str,
    messages: Messages,
    named: TemplateKwargs,
    *,
    generation_prompt: bool = False,
    tools: Tools | None = None,
) -> str:
    """`render` with BEGIN and END around what stands in `{% generation %}` blocks."""
    return rendered(
        functools.partial(_compiled, template),
        messages,
        named,
        generation_prompt=generation_prompt,
        tools=tools,
    )


_REFUSALS = (
    *(jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError),
    *(ArithmeticError, RecursionError),
)
"""What a template raises for messages that it does not know; it may divide by a number of them."""


def rendered(
    compile: Callable[[], jinja2.Template],
    messages: Messages,
    named: TemplateKwargs,
    *,
    generation_prompt: bool = False,
    tools: Tools | None = None,
) -> str:
    """`render_marked` of a template as `compile` makes it."""
    try:
        return compile().render(
            {
                **named,
                "messages": list(messages),
                "tools": None if tools is None else list(tools),
                "documents": None,
                "add_generation_prompt": generation_prompt,
            }
        )
    except _REFUSALS as error:
        raise WrongInput(
            f"the chat template refuses these {len(messages)} messages ({error}); give roles and"
            " contents that it knows"
        ) from error


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    return environment_of().from_string(template)


def environment_of(
    kind: type[ImmutableSandboxedEnvironment] = ImmutableSandboxedEnvironment,
) -> ImmutableSandboxedEnvironment:
    """The sandbox that templates run in, with what they may call."""
    environment = kind(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = time_now
    return environment


def variables_of(template: str) -> set[str]:
    """What a template asks for by name that it does not set itself first."""
    return meta.find_undeclared_variables(environment_of().parse(template))


class _Generation(Extension):
    """The tag `{% generation %}...{% endgeneration %}`, which marks the assistant's text."""

    tags = {"generation"}  # noqa: RUF012  (a plain set is what jinja2 declares)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        inside = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (
            nodes.Output([nodes.TemplateData(mark)], lineno=line) for mark in (BEGIN, END)
        )
        return [begin, *inside, end]


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replaces Jinja's own filter, which escapes HTML: models were not trained on that."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def time_now(pattern: str) -> str:
    """What `strftime_now` tells a template."""
    return datetime.now().strftime(pattern)


def mask_look_alikes(messages: Any, special: Sequence[str]) -> tuple[Any, dict[str, str]]:
    """A copy of `messages`, or of any JSON, in which each look-alike of a special token or mark is
    replaced by one private-use character, and the table from character to original.
    """
    texts = list(strings_in(messages))
    looks, present = any_of_pattern(tuple(special)), set[str]()
    for text in texts:
        if special:
            present.update(looks.findall(text))
        if not text.isascii():
            present.update(MARKS.findall(text))
    if not present:
        return messages, {}
    used = {character for text in texts for character in text}
    free = (character for character in map(chr, PRIVATE_USE) if character not in used)
    masks = dict(zip(sorted(present), free, strict=False))
    pattern = any_of_pattern(tuple(present))

    def masked(value: Any) -> Any:
        if isinstance(value, str):
            return pattern.sub(lambda match: masks[match[0]], value)
        if isinstance(value, Mapping):
            return {masked(key): masked(item) for key, item in value.items()}
        return [masked(item) for item in value] if isinstance(value, list | tuple) else value

    return masked(messages), {character: token for token, character in masks.items()}


def has_look_alikes(texts: Sequence[str], special: re.Pattern[str] | None) -> bool:
    """Whether `mask_look_alikes` would replace something in one of the texts."""
    whole = "\n".join(texts)
    return bool(special and special.search(whole)) or bool(
        not whole.isascii() and MARKS.search(whole)
    )


def split_at_special(
    text: str, special: Sequence[str], originals: Mapping[str, str]
) -> Iterator[tuple[bool, str]]:
    """Split a rendered chat at its special tokens into (is it a special token, text), with masked
    look-alikes restored.
    """
    cut = any_of_pattern(tuple(special)).split(text)
    for index, piece in enumerate(cut):
        # The pattern has one group, so every second piece is a special token.
        if piece:
            yield index % 2 == 1, piece if index % 2 else unmask(piece, originals)


def unmask(text: str, originals: Mapping[str, str]) -> str:
    """The text with the look-alikes restored that `mask_look_alikes` replaced."""
    return "".join(originals.get(character, character) for character in text) if originals else text


@functools.lru_cache(maxsize=64)
def any_of_pattern(texts: tuple[str, ...]) -> re.Pattern[str]:
    """A pattern with one group that matches any of the texts, the longest one first."""
    return re.compile(f"({'|'.join(map(re.escape, sorted(texts, key=len, reverse=True)))})")


def strings_in(value: Any) -> Iterator[str]:
    """All texts in a value of JSON, keys of mappings included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from strings_in(key)
            yield from strings_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings_in(item)
