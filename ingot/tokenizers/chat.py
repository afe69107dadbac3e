"""A chat as text, by a Jinja template in the sandbox that Hugging Face's templates are written for. Encodes nothing.

Look-alikes of special tokens in messages can be masked before rendering, so that afterwards the template's own special
tokens are told apart from them.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ingot.base.errors import WrongInput

PRIVATE_USE = range(0xF0000, 0xFFFFE)


def render(template: str, messages: Sequence[Mapping[str, Any]], special: Mapping[str, str], *, generation_prompt: bool) -> str:
    """The text of a chat. `special` are the tokens that templates name: `bos_token`, `eos_token` and the like.

    Raises:
        WrongInput: the template is not valid, or refuses these messages; its own reason is given.
    """
    try:
        return _compiled(template).render(
            messages=list(messages), tools=None, documents=None, add_generation_prompt=generation_prompt, **special
        )
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        raise WrongInput(f"the chat template refuses these {len(messages)} messages ({error}); give roles and contents that it knows") from error


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    return environment.from_string(template)


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks what an assistant wrote; as text it is what stands between."""

    tags = {"generation"}  # noqa: RUF012  (a plain set is what jinja2 declares)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None,
             sort_keys: bool = False) -> str:
    """Jinja's own filter escapes HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def mask(messages: Any, special: Sequence[str]) -> tuple[Any, dict[str, str]]:
    """A copy of `messages` in which each look-alike of a special token is one private character, and what each stands for."""
    texts = list(_strings(messages))
    present = [token for token in sorted(special, key=len, reverse=True) if any(token in text for text in texts)]
    if not present:
        return messages, {}
    used = {character for text in texts for character in text}
    free = (character for character in map(chr, PRIVATE_USE) if character not in used)
    masks = dict(zip(present, free, strict=False))
    pattern = _any_of(present)

    def masked(value: Any) -> Any:
        if isinstance(value, str):
            return pattern.sub(lambda match: masks[match[0]], value)
        if isinstance(value, Mapping):
            return {key: masked(item) for key, item in value.items()}
        return [masked(item) for item in value] if isinstance(value, list | tuple) else value

    return masked(messages), {character: token for token, character in masks.items()}


def pieces(text: str, special: Sequence[str], originals: Mapping[str, str]) -> Iterator[tuple[bool, str]]:
    """A rendered chat cut at its special tokens: (is it a special token, its text), masked look-alikes as they were."""
    cut = _any_of(sorted(special, key=len, reverse=True)).split(text)
    for index, piece in enumerate(cut):
        # The pattern has one group, so every second piece is a special token.
        if piece:
            yield index % 2 == 1, piece if index % 2 else "".join(originals.get(character, character) for character in piece)


def _any_of(texts: Sequence[str]) -> re.Pattern[str]:
    return re.compile(f"({'|'.join(map(re.escape, texts))})")


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)
