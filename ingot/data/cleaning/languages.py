"""In which language a text is written, by py3langid (Lui and Baldwin 2012), which gives one answer
for one text.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ingot.base.errors import WrongInput
from ingot.data.cleaning.codepoints import Flags

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
    """Refuse what no text can be found to be.

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
