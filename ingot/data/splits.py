"""Which split a document belongs to: determined by a hash of its identity, so that it is the same
in every run and on every engine.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ingot.base.errors import WrongInput
from ingot.config.recipe import Recipe
from ingot.config.sections.data import Data, ValidationShare

Split = Literal["train", "validation"]
APART = re.compile(r"~[0-9a-f]{8}(?=:\d+$|$)")
"""What tells a file from one of the same name in another source, at the end of its name."""


@dataclass(frozen=True)
class Shares:
    """The share of training documents that is held out, and the share of the rest that is trained
    on; by hash of `doc_id`, or for what is held out of what `group` finds at its beginning.
    """

    validation: float | None
    fraction: float
    group: str | None = None

    @classmethod
    def of(cls, data: Data) -> Shares:
        if not isinstance(data.validation, ValidationShare):
            return cls(None, data.fraction)
        return cls(data.validation.fraction, data.fraction, data.validation.group)

    def identity(self) -> dict[str, Any]:
        """What the splits depend on."""
        return asdict(self)

    def split(self, source_split: Split, doc_id: str) -> Split | None:
        """The split of a document of a training or validation source; None for no split.
        Deterministic.
        """
        if source_split == "validation":
            return "validation"
        if self.validation is not None and chosen(
            self._group_of(doc_id), "validation", self.validation
        ):
            return "validation"
        return (
            "train" if self.fraction >= 1.0 or chosen(doc_id, "fraction", self.fraction) else None
        )

    def _group_of(self, doc_id: str) -> str:
        found = re.match(self.group, doc_id) if self.group else None
        return doc_id if found is None else found[found.re.groups and 1] or doc_id


def chosen(doc_id: str, purpose: str, share: float) -> bool:
    """True for `share` of all identities, independently for each `purpose`. Other sources of the
    recipe have no part in it: a file is what it is called in its own.

    Hence rows of equal number in files of equal name of two sources are drawn alike, which keeps
    the languages or versions of a document together. To draw them apart, each identity would have
    to hold its source's path, and data that were moved, or any held out before, be drawn anew.
    """
    return _hash(doc_id, purpose) < share * 2.0**64


def drawn(doc_id: str, purpose: str, count: int) -> int:
    """A number below `count`, as random as `chosen`."""
    return _hash(doc_id, purpose) * count >> 64


def _hash(doc_id: str, purpose: str) -> int:
    own = APART.sub("", doc_id) if "~" in doc_id else doc_id
    digest = hashlib.blake2b(own.encode(), digest_size=8, person=purpose.encode()[:16]).digest()
    return int.from_bytes(digest, "little")


def check_held_out(recipe: Recipe, verb: str) -> None:
    """Raises WrongInput if `verb` needs held-out documents and the recipe has none."""
    if missing := recipe.missing_held_out(verb):
        raise WrongInput("\n".join(message for message, _ in missing))
