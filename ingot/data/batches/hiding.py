"""What every way of hiding a part of a text has in common: the frame of a piece, and the key that
decides what is hidden of it.
"""

from __future__ import annotations

import abc
import hashlib
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ingot.data.batches.permutation import CIRCLE, GOLDEN, Words, mix
from ingot.data.columns.reader import Ids


@dataclass(frozen=True)
class Hiding(abc.ABC):
    """Hides a part of a text as a function of a key: the same key hides the same, wherever and
    however often it is asked.
    """

    writes: ClassVar[bool] = False
    """Whether what is hidden becomes a target of its own, rather than labels in its place."""
    frame: tuple[Ids, Ids]
    """What the tokenizer puts around each piece of a text."""
    seed: int

    @property
    def room(self) -> int:
        """How many tokens of a row are not of the text."""
        return len(self.frame[0]) + len(self.frame[1])

    def framed(self, body: Ids) -> Ids:
        """A text as the model reads it."""
        return np.concatenate((self.frame[0], body.astype(np.int64), self.frame[1]))

    def of_sample(self, sample: int) -> Words:
        """The key of a place in the endless sequence of training samples: a text gets another one
        each time that it is read.
        """
        seed = mix(np.array([self.seed % CIRCLE], np.uint64))
        return mix(seed + np.uint64((sample + 1) * GOLDEN % CIRCLE))

    @staticmethod
    def of_content(ids: Ids) -> Words:
        """The key of a held-out text, which is its content: whatever seed, division of the data and
        order, the model is asked for the same tokens.
        """
        digest = hashlib.blake2b(ids.astype("<i8").tobytes(), digest_size=8).digest()
        return np.frombuffer(digest, "<u8").astype(np.uint64)

    def sample(self, body: Ids, place: int | None, number: int = 0) -> tuple[Ids, Ids]:
        """What the model reads of a piece of a text, and what it is asked for. `place`: that of a
        training sample, of which this is piece `number`; None for held-out ones.
        """
        ids = self.framed(body)
        key = self.of_content(ids) if place is None else self.of_sample(place)
        if place is not None and number:
            key = mix(key + np.uint64(number))
        return self.hide(ids, key)

    @abc.abstractmethod
    def hide(self, ids: Ids, key: Words) -> tuple[Ids, Ids]:
        """(tokens, labels) of a framed text `[T]`: what the model reads, and what it is asked
        for.
        """

    @abc.abstractmethod
    def most_labels(self, seq_len: int) -> int:
        """The most labels of a row in which the model reads `seq_len` tokens."""
