"""Held-out documents that are trained on as well, word for word: what is measured on them is what
was remembered, so `prepare` tells.

Every part of the columns keeps the hashes of a sample of its documents: those whose hash is at most
`largest`. A document's copies have its hash and so are in the sample with it, whichever parts they
are in; and samples with different bounds are comparable up to the smaller one. However many
documents there are, about MOST_SAMPLED are in the samples of all parts together.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ingot.data.cleaning.arrays import Hashes
from ingot.data.splits import Split

MOST_SAMPLED = 2_000_000
LARGEST = 2**64 - 1


@dataclass(frozen=True)
class HashSample:
    """The hashes of a part's documents that are at most `largest`, by split, as base64 of
    little-endian numbers of 64 bits; -1: none were kept.
    """

    largest: int = -1
    hashes: dict[Split, str] = field(default_factory=dict)

    def of(self, split: Split, largest: int) -> Hashes:
        """The hashes of a split's documents that are at most `largest`."""
        found = np.frombuffer(base64.b64decode(self.hashes.get(split, "")), "<u8")
        return up_to(largest, found)


def up_to(largest: int, hashes: Hashes) -> Hashes:
    return hashes[hashes <= np.uint64(largest)]


def largest_hash(documents: int) -> int:
    """The bound with which about MOST_SAMPLED of so many documents are in the sample."""
    return LARGEST if documents <= MOST_SAMPLED else LARGEST * MOST_SAMPLED // documents


def encoded(hashes: Sequence[Hashes]) -> str:
    """Hashes as `HashSample` stores them."""
    return base64.b64encode(np.concatenate(hashes).astype("<u8").tobytes()).decode()


def held_out_copies(samples: Sequence[HashSample]) -> tuple[int, int]:
    """How many of the held-out documents in the samples are trained on as well, and how many there
    are.
    """
    largest = min((sample.largest for sample in samples), default=-1)
    if largest < 0:
        return 0, 0
    trained, held_out = (
        np.concatenate([sample.of(split, largest) for sample in samples])
        for split in ("train", "validation")
    )
    return int(np.isin(held_out, trained, kind="sort").sum()), len(held_out)
