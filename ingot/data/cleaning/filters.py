"""Which documents are too short, too long or in another language. Each document is judged by
itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ingot.config.sections.data import Clean
from ingot.data.cleaning.codepoints import Bytes
from ingot.data.cleaning.languages import check_languages, in_languages
from ingot.data.cleaning.report import KEPT, reason


@dataclass(frozen=True)
class Filters:
    """The knobs of `data.clean` that look at one document."""

    min_chars: int
    max_chars: int | None
    languages: tuple[str, ...]

    @classmethod
    def of(cls, knobs: Clean) -> Filters:
        """Raises WrongInput: a language that cannot be told, or no library to tell it."""
        if knobs.languages:
            check_languages(knobs.languages)
        return cls(knobs.min_chars, knobs.max_chars, tuple(knobs.languages))

    def reasons(self, texts: pa.Array) -> Bytes:
        """For each text 0, or the number of the first step that drops it. Lengths are in
        characters.
        """
        found = np.full(len(texts), KEPT, np.uint8)
        lengths = pc.utf8_length(texts).to_numpy(zero_copy_only=False)
        found[lengths < self.min_chars] = reason("min_chars")
        if self.max_chars is not None:
            found[lengths > self.max_chars] = reason("max_chars")
        if self.languages:
            left = np.flatnonzero(found == KEPT)
            found[left[~in_languages(texts.take(pa.array(left)), self.languages)]] = reason(
                "languages"
            )
        return found
