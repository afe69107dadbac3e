"""Reads the configuration files beside a tokenizer: named tokens, added tokens, chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ingot.base.errors import WrongInput

MODEL_FILES = ("tokenizer.model", "spiece.model")

REFERENCE_KEY = "ingot_reference"
"""The key of tokenizer_config.json that names the model file which defines the tokenizer, where a
tokenizer.json converted from it lies beside it.
"""

CONVERSION_KEY, EXACT = "ingot_conversion", "exact"
"""The key that records how that tokenizer.json compares with the model, and its value if all ids
were equal.
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
    """`special_tokens_map.json` and `tokenizer_config.json` merged, without null values; the latter
    wins.
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
    """`bos_token` and similar names with their texts; a configuration gives a token as text, or as
    a mapping with `content`.
    """
    named = {}
    for name in NAMED:
        value = config.get(name)
        text = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(text, str):
            named[name] = text
    return named


def chat_template(files: Files, config: Mapping[str, Any]) -> str | None:
    """The chat template: a separate file wins over the configuration, which may hold a list of
    named templates.
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
    """A token that is added to the model's own vocabulary."""

    id: int
    content: str
    special: bool


def with_added_tokens(config: dict[str, Any], text: str | None, where: str) -> dict[str, Any]:
    """The configuration with what `added_tokens.json` adds, in which transformers before 4.34 wrote
    what it now writes as `added_tokens_decoder`; it does not say which of them are special.
    """
    if text is None or config.get("added_tokens_decoder"):
        return config
    special = {*named_tokens(config).values(), *listed_tokens(config)}
    found = {
        str(index): {"content": content, "special": content in special}
        for content, index in _json_object(text, where).items()
    }
    return {**config, "added_tokens_decoder": found}


def listed_tokens(config: Mapping[str, Any]) -> list[str]:
    """`additional_special_tokens`, as text."""
    return [
        token["content"] if isinstance(token, Mapping) else str(token)
        for token in config.get("additional_special_tokens") or ()
    ]


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
