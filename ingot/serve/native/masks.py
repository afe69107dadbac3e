"""Texts with masks, for a masked language model: which folders hold one, how such texts are read,
and what they are with their masks filled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ingot.base.errors import WrongInput
from ingot.config.models.source import kind_of
from ingot.config.models.types import UNFIT, installed_types
from ingot.models.generation.fillmask import MaskChoices
from ingot.models.hf.folder import stored_shapes
from ingot.models.hf.loading import MASKED_HEADS
from ingot.tokenizers.tokenizer import Tokenizer

ANY_MASK = "[MASK]"
"""What stands for the mask token of any tokenizer."""


def fills_masks(folder: Path, config: Mapping[str, Any]) -> bool:
    """Whether a folder holds a masked language model with its head, which some that are named after
    one lack: sentence-transformers leave it out.
    """
    kind = str(config.get("model_type"))
    known = kind in installed_types("masked") and kind not in UNFIT["masked"]
    return (
        known
        and kind_of(config) == "masked"
        and any(name.split(".")[0] in MASKED_HEADS for name in stored_shapes(folder))
    )


def encode_with_masks(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a framed text with masks. `[MASK]` stands for the tokenizer's own mask token, so
    that one text may be asked of any model.

    Raises:
        WrongInput: nothing is masked, or nothing can be.
    """
    own = tokenizer.named.get("mask_token")
    if tokenizer.mask is None or own is None:
        raise WrongInput(
            "the model's tokenizer has no mask token, so that there is nothing to fill; ask for"
            " embeddings"
        )
    ids = tokenizer.encode_masked(text if own in text else text.replace(ANY_MASK, own))
    if tokenizer.mask not in ids:
        raise WrongInput(f"the text has no mask; put {own} where a token is to be found")
    return ids


def fill(tokenizer: Tokenizer, ids: Sequence[int], choices: MaskChoices) -> str:
    """A text with the likeliest token at each of its masks."""
    best = iter(mask[0][0] for mask in choices.masks)
    return tokenizer.decode([next(best) if token == tokenizer.mask else token for token in ids])


def told(tokenizer: Tokenizer, choices: MaskChoices) -> list[list[dict[str, Any]]]:
    """What could stand at each mask, under the names that transformers' fill-mask pipeline has."""
    return [
        [
            {"token": token, "token_str": tokenizer.decode([token]), "score": score}
            for token, score in mask
        ]
        for mask in choices.masks
    ]
