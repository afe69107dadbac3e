"""A document, which split it belongs to, and all documents of a split as `ingest` left them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from ingot.config.recipe import Recipe
from ingot.config.work import Data, ValidationShare
from ingot.data.raw import open_raw, read_group
from ingot.data.sources import Split


@dataclass(frozen=True, slots=True)
class Document:
    """A text with its identity: `FILE:ROW` of where it was read, stable when the data moves to another folder."""

    doc_id: str
    text: str


@dataclass(frozen=True)
class Shares:
    """Which share of the training sources is held out, and which share of the rest is trained on; by hash of `doc_id`."""

    validation: float | None
    fraction: float

    @classmethod
    def of(cls, data: Data) -> Shares:
        share = data.validation.fraction if isinstance(data.validation, ValidationShare) else None
        return cls(share, data.fraction)

    def split(self, source_split: Split, doc_id: str) -> Split | None:
        """Where a document of a training or validation source goes; None: nowhere. The same in every run."""
        if source_split == "validation":
            return "validation"
        if self.validation is not None and chosen(doc_id, "validation", self.validation):
            return "validation"
        return "train" if self.fraction >= 1.0 or chosen(doc_id, "fraction", self.fraction) else None


def chosen(doc_id: str, purpose: str, share: float) -> bool:
    """True for `share` of all identities, another independent choice for each `purpose`."""
    digest = hashlib.blake2b(doc_id.encode(), digest_size=8, person=purpose.encode()[:16]).digest()
    return int.from_bytes(digest, "little") < share * 2.0**64


def read_documents(recipe: Recipe, split: Split) -> Iterator[Document]:
    """The documents that `prepare` puts into `split`, in the order of its columns.

    Raises:
        WrongInput: `ingest` has not run, or for other sources than the recipe's.
    """
    raw = open_raw(recipe)
    shares = Shares.of(recipe.data)
    for source_split, sources in raw.splits.items():
        for part in (part for source in sources for part in source.parts):
            for group in range(len(part.groups)):
                for doc_id, text in read_group(raw.folder / part.path, group):
                    if shares.split(source_split, doc_id) == split:
                        yield Document(doc_id, text)
