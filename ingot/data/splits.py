"""Which split a document belongs to: by a hash of its identity, so that it is the same in every run
and on every engine.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

from ingot.base.errors import WrongInput
from ingot.config.recipe import Recipe
from ingot.config.sections.data import Data, ValidationShare

Split = Literal["train", "validation"]


@dataclass(frozen=True)
class Shares:
    """Which share of the training sources is held out, and which share of the rest is trained on;
    by hash of `doc_id`.
    """

    validation: float | None
    fraction: float

    @classmethod
    def of(cls, data: Data) -> Shares:
        share = data.validation.fraction if isinstance(data.validation, ValidationShare) else None
        return cls(share, data.fraction)

    def split(self, source_split: Split, doc_id: str) -> Split | None:
        """Where a document of a training or validation source goes; None: nowhere. The same in
        every run.
        """
        if source_split == "validation":
            return "validation"
        if self.validation is not None and chosen(doc_id, "validation", self.validation):
            return "validation"
        return (
            "train" if self.fraction >= 1.0 or chosen(doc_id, "fraction", self.fraction) else None
        )


def chosen(doc_id: str, purpose: str, share: float) -> bool:
    """True for `share` of all identities, another independent choice for each `purpose`."""
    digest = hashlib.blake2b(doc_id.encode(), digest_size=8, person=purpose.encode()[:16]).digest()
    return int.from_bytes(digest, "little") < share * 2.0**64


def check_held_out(recipe: Recipe, verb: str) -> None:
    """Raises WrongInput where `verb` needs held-out documents and the recipe holds none out."""
    if missing := recipe.missing_held_out(verb):
        raise WrongInput("\n".join(message for message, _ in missing))
