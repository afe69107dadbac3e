"""What the configuration files beside a tokenizer say: named tokens, added tokens, the chat
template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ingot.base.errors import WrongInput

MODEL_FILES = ("tokenizer.model", "spiece.model")

REFERENCE_KEY = "ingot_reference"
"""The key of tokenizer_config.json that names the file which is right, where a tokenizer.json made
of it lies beside it.
"""

CONVERSION_KEY, EXACT = "ingot_conversion", "exact"
"""The key that says how far that tokenizer.json can be trusted, and what it says where the ids were
the same throughout.
"""

CONFIG = "tokenizer_config.json"
NAMED = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
Files = Mapping[str, str | bytes]
"""Name -> content of a tokenizer's files; models are bytes, all else is text."""


def text_of(files: Files, name: str) -> str | None:
    """A file's text; None where there is no such file."""
    content = files.get(name)
    return content.decode() if isinstance(content, bytes) else content


def read_config(files: Files, where: str) -> dict[str, Any]:
    """`special_tokens_map.json` and `tokenizer_config.json` as one, without what is null; the
    latter wins.
    """
    merged: dict[str, Any] = {}
    for name in ("special_tokens_map.json", CONFIG):
        if (text := text_of(files, name)) is not None:
            merged |= {
                key: value
                for key, value in _json_object(text, f"{where}/{name}").items()
                if value is not None
            }
    return merged


def named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and the like by name; a configuration spells a token as text, or as a mapping
    with `content`.
    """
    named = {}
    for name in NAMED:
        value = config.get(name)
        text = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(text, str):
            named[name] = text
    return named


def chat_template(files: Files, config: Mapping[str, Any]) -> str | None:
    """The chat template: a file of its own wins over the configuration, where it may be a list of
    named ones.
    """
    if (own := text_of(files, "chat_template.jinja")) is not None:
        return own
    template = config.get("chat_template")
    if isinstance(template, list):
        template = next(
            (item["template"] for item in template if item.get("name") == "default"), None
        )
    return template if isinstance(template, str) else None


def _json_object(text: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise WrongInput(
            f"{where} is not JSON ({error}); fetch or save the tokenizer again"
        ) from None
    if not isinstance(value, dict):
        raise WrongInput(f"{where} is not a JSON object; fetch or save the tokenizer again")
    return value


@dataclass(frozen=True)
class AddedVocabulary:
    """A token beside the model's own vocabulary."""

    id: int
    content: str
    special: bool


def added_tokens(config: Mapping[str, Any]) -> list[AddedVocabulary]:
    """`added_tokens_decoder` of a tokenizer_config.json, by id; [] where there is none."""
    found = config.get("added_tokens_decoder")
    if not isinstance(found, Mapping):
        return []
    tokens = [
        AddedVocabulary(int(index), token["content"], bool(token.get("special")))
        for index, token in found.items()
    ]
    return sorted(tokens, key=lambda token: token.id)
