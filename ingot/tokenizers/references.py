"""Which reference a tokenizer's files ask for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ingot.base.errors import WrongInput
from ingot.tokenizers.pieces import PiecesReference
from ingot.tokenizers.ranks import RanksReference, is_ranks
from ingot.tokenizers.reference import JsonReference, Reference
from ingot.tokenizers.settings import Files, text_of

MODELS = ("tokenizer.model", "spiece.model")
MARK = "ingot_reference"
"""The key of tokenizer_config.json that names the file which is right, where a tokenizer.json made
of it lies beside it.
"""
CONVERSION, EXACT = "ingot_conversion", "exact"
"""The key that says how far that tokenizer.json can be trusted, and what it says where the ids were
the same throughout.
"""


def open_reference(files: Files, config: Mapping[str, Any], where: str) -> Reference:
    """The reference of these files: the one that the configuration names, else `tokenizer.json`,
    else a model.

    Raises:
        WrongInput: there is none, or its file cannot be read.
    """
    names = [str(config[MARK])] if config.get(MARK) in files else ["tokenizer.json", *MODELS]
    name = next((name for name in names if name in files), None)
    if name is None:
        raise WrongInput(
            f"{where} has none of {', '.join(names)}; copy the tokenizer's files there"
        )
    if name == "tokenizer.json":
        return JsonReference(str(text_of(files, name)), where)
    data = files[name]
    data = data if isinstance(data, bytes) else data.encode()
    return open_model(
        data,
        config,
        f"{where}/{name}",
        text_of(files, "tokenizer.json") if config.get(CONVERSION) == EXACT else None,
    )


def open_model(
    data: bytes, config: Mapping[str, Any], where: str, converted: str | None = None
) -> RanksReference | PiecesReference:
    """The reference of a model's bytes, whichever of the two kinds it is. `converted` is a
    tokenizer.json that says the same.
    """
    reference = (
        RanksReference(data, config, where)
        if is_ranks(data)
        else PiecesReference(data, config, where)
    )
    reference.converted = converted
    return reference
