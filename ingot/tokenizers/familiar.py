"""Whether weights have met the ids of a tokenizer: by the tokenizer that lies beside them. And
whether a model finds in a text what it is read at.
"""

from __future__ import annotations

from pathlib import Path

from ingot.base.errors import WrongInput
from ingot.config.models.types import ENDS_AT_EOS
from ingot.config.recipe import Recipe
from ingot.tokenizers.load import load_tokenizer
from ingot.tokenizers.tokenizer import Tokenizer

COMPARED = 2000
MOST_OTHERS = 0.5
"""Ids compared, and the share of them that may stand for other text: tokenizers of one family
differ in special tokens and in ids behind the vocabulary, others in nearly all.
"""
ADVICE = "leave it empty for the model's own, or set model.init=random"


def never_met(recipe: Recipe) -> str:
    """What is wrong with a tokenizer that is learnt for weights that there are already."""
    return (
        f"the weights of {recipe.model.source} have never met the ids of a tokenizer learnt here;"
        f" {ADVICE}"
    )


def why_unfamiliar(recipe: Recipe, tokenizer: Tokenizer, folder: Path) -> str | None:
    """What is wrong with going on from the weights of `folder` with this tokenizer; None: nothing
    that can be seen.
    """
    given, source = recipe.tokenizer.source, recipe.model.source
    try:
        own = load_tokenizer(folder, check=False)
    except WrongInput:
        return never_met(recipe) if recipe.trains_tokenizer else None
    ids = _compared(tokenizer, own)
    others = sum(_text(tokenizer, one) != _text(own, one) for one in ids)
    if others <= MOST_OTHERS * len(ids):
        return None
    return (
        f"the weights of {source} were not trained with {given}: {others / len(ids):.0%} of its ids"
        f" stand for other text there; {ADVICE}"
    )


def check_own(recipe: Recipe, tokenizer: Tokenizer, folder: Path) -> None:
    """Raises WrongInput if the tokenizer of the columns was that of `model.source`, where another
    one lies by now.
    """
    if recipe.tokenizer.source is None and (strange := why_read_otherwise(tokenizer, folder)):
        raise WrongInput(
            f"model.source {recipe.model.source} {strange}: it has another tokenizer than when the"
            " data was prepared; run `ingot prepare`"
        )


def check_end(recipe: Recipe, model_type: str, tokenizer: Tokenizer) -> None:
    """Raises WrongInput if a classifier of this type reads a text at an end that the tokenizer puts
    nowhere.
    """
    if model_type in ENDS_AT_EOS and not tokenizer.alone[1]:
        raise WrongInput(
            f"{recipe.model.source} reads the class of a text at its EOS, and this tokenizer puts"
            " none behind a text; take one that does (tokenizer.source), such as the model's own"
        )


def check_reference(source: str, tokenizer: Tokenizer, folder: Path) -> None:
    """Raises WrongInput if the reference in `folder` reads the ids of the data as other text."""
    if strange := why_read_otherwise(tokenizer, folder):
        raise WrongInput(
            f"objective.reference {source} {strange}; choose a reference of the same tokenizer, or"
            f" set tokenizer.source to {source}"
        )


def why_read_otherwise(tokenizer: Tokenizer, folder: Path) -> str | None:
    """What is wrong with giving ids of this tokenizer to the model in `folder`; None: nothing that
    can be seen. Added tokens, special or not, may differ: a base model has not met those of its
    chats, which may be reserved entries of its own by another name.
    """
    try:
        theirs = load_tokenizer(folder, check=False)
    except WrongInput:
        return None
    added = {one.token_id(text) for one in (tokenizer, theirs) for text in one.special_texts}
    for one in _compared(tokenizer, theirs):
        if one not in added and (read := _text(theirs, one)) != (meant := _text(tokenizer, one)):
            return f"reads the id {one:,} as {read!r}, which stands for {meant!r} in the data"
    return None


def _compared(one: Tokenizer, other: Tokenizer) -> range:
    """Ids of both."""
    count = min(one.vocab_size, other.vocab_size)
    return range(0, count, max(1, count // COMPARED))


def _text(tokenizer: Tokenizer, index: int) -> str:
    """What an id stands for. Libraries write a token in several ways (`Ġa`, `▁a`), so that its text
    is compared.
    """
    return tokenizer.decode([index]).strip()
