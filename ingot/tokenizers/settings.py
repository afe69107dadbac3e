"""Reads the configuration files beside a tokenizer: named tokens, added tokens, chat template."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
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
_KINDS = {
    "chat_template": "a text, or a list of {name: text, template: text}",
    "additional_special_tokens": "a list of texts or of {content: text}",
    "added_tokens_decoder": "{id: {content: text}}",
}
"""How transformers writes what has several parts."""
Files = Mapping[str, str | bytes]
"""Name -> content of a tokenizer's files; models are bytes, all else is text."""


def text_of(files: Files, name: str) -> str | None:
    """A file's text; None where there is no such file."""
    content = files.get(name)
    return content.decode() if isinstance(content, bytes) else content


def read_config(files: Files, where: str) -> dict[str, Any]:
    """`special_tokens_map.json` and `tokenizer_config.json` merged, without null values; the latter
    wins.

    Raises:
        WrongInput: a file is not a JSON object, or a value of it is of another kind than
            transformers writes.
    """
    merged: dict[str, Any] = {}
    for name in ("special_tokens_map.json", CONFIG):
        if (text := text_of(files, name)) is not None:
            found = _json_object(text, f"{where}/{name}")
            given = {key: value for key, value in found.items() if value is not None}
            _check_kinds(given, f"{where}/{name}")
            merged |= given
    return merged


def _check_kinds(config: Mapping[str, Any], where: str) -> None:
    """Raises WrongInput for values that are of another kind than is read below."""
    templates = config.get("chat_template", "")
    listed = config.get("additional_special_tokens", [])
    added = config.get("added_tokens_decoder", {})
    fine = {
        "chat_template": isinstance(templates, str)
        or _all(templates, lambda one: _has_text(one, "name") and _has_text(one, "template")),
        "additional_special_tokens": _all(
            listed, lambda one: isinstance(one, str) or _has_text(one, "content")
        ),
        "added_tokens_decoder": isinstance(added, dict)
        and all(map(str.isdecimal, added))
        and _all(list(added.values()), lambda one: _has_text(one, "content")),
    }
    if wrong := [name for name, holds in fine.items() if not holds]:
        raise WrongInput(
            f"{where}: {wrong[0]} is not as transformers writes it, {_KINDS[wrong[0]]}; mend it, or"
            " fetch or save the tokenizer again"
        )


def _all(values: Any, fine: Callable[[Any], bool]) -> bool:
    return isinstance(values, list) and all(map(fine, values))


def _has_text(value: Any, key: str) -> bool:
    return isinstance(value, dict) and isinstance(value.get(key), str)


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
    given = config.get("chat_template")
    if isinstance(given, list):
        given = next((item["template"] for item in given if item["name"] == "default"), None)
    return None if given is None else str(given)


def _json_object(text: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise WrongInput(
            f"{where} is not JSON ({error}); fetch or save the tokenizer again"
        ) from None
    if not isinstance(value, dict):
        raise WrongInput(f"{where} is not a JSON object; fetch or save the tokenizer again")
    try:  # JSON can escape what UTF-8 cannot encode
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise WrongInput(
            f"{where} holds half of a surrogate pair; fetch or save the tokenizer again"
        ) from None
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
    ids = _json_object(text, where)
    if wrong := [content for content, index in ids.items() if type(index) is not int or index < 0]:
        raise WrongInput(f"{where}: `{wrong[0][:60]}` has no id; fetch or save the tokenizer again")
    found = {
        str(index): {"content": content, "special": content in special}
        for content, index in ids.items()
    }
    return {**config, "added_tokens_decoder": found}


def listed_tokens(config: Mapping[str, Any]) -> list[str]:
    """`additional_special_tokens`, as text."""
    return [
        token["content"] if isinstance(token, Mapping) else token
        for token in config.get("additional_special_tokens", ())
    ]


def added_tokens(config: Mapping[str, Any]) -> list[AddedVocabulary]:
    """`added_tokens_decoder` of a tokenizer_config.json, by id; [] where there is none."""
    tokens = [
        AddedVocabulary(int(index), token["content"], bool(token.get("special")))
        for index, token in config.get("added_tokens_decoder", {}).items()
    ]
    return sorted(tokens, key=lambda token: token.id)
