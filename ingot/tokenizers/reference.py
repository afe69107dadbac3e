"""The reference tokenizer behind the face: opened without its traps, and what its configuration files say."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from ingot.base.errors import WrongInput

NAMED = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
# A character that no text holds stands before a vocabulary entry that text must not reach.
UNREACHABLE = "\U0010ffff"


def parse(text: str, where: str) -> tokenizers.Tokenizer:
    """A reference tokenizer that neither cuts nor pads, whatever its file asks for.

    Raises:
        WrongInput: `text` is no tokenizer.json.
    """
    try:
        reference = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise WrongInput(f"{where}/tokenizer.json cannot be read ({str(error)[:120]}); fetch or save the tokenizer again") from error
    reference.no_truncation()
    reference.no_padding()
    return reference


def without_leaks(reference: tokenizers.Tokenizer, special: Sequence[str]) -> tokenizers.Tokenizer:
    """The reference, such that no text becomes a special token.

    The library's own switch keeps added tokens from matching, but where a special token is also a piece of the model's
    vocabulary (T5's `</s>`) the model finds it in text all the same. Such pieces get a name that no text holds.
    """
    reference.encode_special_tokens = True
    leaks = {text for text in special if reference.token_to_id(text) in reference.encode(text, add_special_tokens=False).ids}
    if not leaks:
        return reference
    state = json.loads(reference.to_str())
    rename = {text: UNREACHABLE + text for text in leaks}
    vocabulary = state["model"]["vocab"]
    if isinstance(vocabulary, dict):
        state["model"]["vocab"] = {rename.get(text, text): token for text, token in vocabulary.items()}
    else:
        state["model"]["vocab"] = [[rename.get(text, text), score] for text, score in vocabulary]
    for token in state["added_tokens"]:
        token["content"] = rename.get(token["content"], token["content"])
    state["post_processor"] = None
    sealed = parse(json.dumps(state, ensure_ascii=False), "tokenizer")
    sealed.encode_special_tokens = True
    return sealed


def tokens_around(reference: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """Ids that the reference by itself puts before and after a text, found by looking."""
    bare, framed = (reference.encode("a", add_special_tokens=framed).ids for framed in (False, True))
    for begin in range(len(framed) - len(bare) + 1):
        if framed[begin : begin + len(bare)] == bare:
            return framed[:begin], framed[begin + len(bare) :]
    return [], []


def read_config(files: Mapping[str, str], where: str) -> dict[str, Any]:
    """`special_tokens_map.json` and `tokenizer_config.json` as one, without what is null; the latter wins."""
    merged: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if name in files:
            merged |= {key: value for key, value in _json_object(files[name], f"{where}/{name}").items() if value is not None}
    return merged


def named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and the like by name; a configuration spells a token as text, or as a mapping with `content`."""
    named = {}
    for name in NAMED:
        value = config.get(name)
        text = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(text, str):
            named[name] = text
    return named


def chat_template(files: Mapping[str, str], config: Mapping[str, Any]) -> str | None:
    """The chat template: a file of its own wins over the configuration, where it may be a list of named ones."""
    if "chat_template.jinja" in files:
        return files["chat_template.jinja"]
    template = config.get("chat_template")
    if isinstance(template, list):
        template = next((item["template"] for item in template if item.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def state_of(reference: tokenizers.Tokenizer) -> dict[str, Any]:
    """What decides about ids, without what is empty or decides about character offsets only: the same after re-saving."""
    state = json.loads(reference.to_str())
    return {name: _bare(state.get(name)) for name in ("model", "normalizer", "pre_tokenizer", "added_tokens")}


def _bare(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _bare(item) for key, item in value.items() if key != "trim_offsets" and item is not None and item != "" and item is not False}
    return [_bare(item) for item in value] if isinstance(value, list) else value


def _json_object(text: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise WrongInput(f"{where} is not JSON ({error}); fetch or save the tokenizer again") from None
    if not isinstance(value, dict):
        raise WrongInput(f"{where} is not a JSON object; fetch or save the tokenizer again")
    return value
