"""Filters that judge each document on its own: too short, too long, in another language, or dropped
by a step of another package.

Languages are identified by py3langid (Lui and Baldwin 2012), which is deterministic.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ingot.base.errors import WrongInput
from ingot.config.sections.data import Clean, CleaningSettings
from ingot.data.cleaning.arrays import Bytes, Flags
from ingot.data.cleaning.corpus import KEPT, reason

JUDGED_CHARACTERS = 2_000


@functools.cache
def _library() -> Any:
    try:
        import py3langid
    except ImportError as error:
        raise WrongInput(
            "data.clean.languages needs py3langid; pip install 'ingot[languages]'"
        ) from error
    return py3langid


def check_languages(languages: Sequence[str]) -> None:
    """Refuse languages that cannot be identified.

    Raises:
        WrongInput: py3langid is missing, or does not know one of the languages.
    """
    known = {language for language, _ in _library().rank("")}
    if unknown := sorted(set(languages) - known):
        raise WrongInput(
            f"data.clean.languages has {unknown[0]!r}, which is not one of"
            f" {' '.join(sorted(known))}; use ISO 639-1 codes"
        )


def in_languages(texts: pa.Array, languages: Sequence[str]) -> Flags:
    """Whether each text, judged by its first 2,000 characters, is in one of the languages."""
    identify, wanted = _library().classify, set(languages)
    beginnings = pc.utf8_slice_codeunits(texts, 0, JUDGED_CHARACTERS).to_pylist()
    return np.array([identify(beginning)[0] in wanted for beginning in beginnings], bool)


@dataclass(frozen=True)
class DocumentFilters:
    """The knobs of `data.clean` that apply to single documents."""

    min_chars: int
    max_chars: int | None
    languages: tuple[str, ...]
    steps: tuple[CleaningSettings, ...] = ()

    @classmethod
    def of(cls, knobs: Clean) -> DocumentFilters:
        """Raises WrongInput: a language that cannot be identified, or the library is missing."""
        if knobs.languages:
            check_languages(knobs.languages)
        return cls(knobs.min_chars, knobs.max_chars, tuple(knobs.languages), tuple(knobs.steps))

    def open(self) -> Callable[[pa.Array], Bytes]:
        """Called in a worker: returns a function that gives for each text 0, or the number of the
        first step that drops it. Lengths are in characters.
        """
        return functools.partial(
            self._reasons, {step.name: step.load_implementation()(step) for step in self.steps}
        )

    def _reasons(self, steps: Mapping[str, Callable[[str], bool]], texts: pa.Array) -> Bytes:
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
        for name, stays in steps.items():
            left = np.flatnonzero(found == KEPT)
            kept = [bool(stays(text)) for text in texts.take(pa.array(left)).to_pylist()]
            found[left[~np.array(kept, bool)]] = reason(name, list(steps))
        return found
