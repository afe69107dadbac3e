"""The texts of chats and other documents that are stored as JSON: what is compared is what was
said, whoever said it.
"""

from __future__ import annotations

import pyarrow as pa

from ingot.config.sections.objective import Documents
from ingot.data.cleaning.normal import normalize
from ingot.data.stored import plain_text, with_said


def plain_texts(documents: Documents, stored: pa.Array) -> pa.Array:
    """What is said in each document, as one text.

    Raises:
        WrongInput: a text is not what `ingest` stores for this kind.
    """
    return (
        stored
        if documents == "text"
        else pa.array([plain_text(documents, text) for text in stored.to_pylist()], pa.string())
    )


def normalize_stored(documents: Documents, stored: pa.Array, form: str) -> pa.Array:
    """Documents whose texts are in a normal form, by the library that normalises all other texts.

    Raises:
        WrongInput: as `plain_texts`.
    """
    if documents == "text":
        return normalize(stored, form)
    if form == "none" or normalize(stored, form).equals(stored):
        return stored

    def change(texts: list[str]) -> list[str]:
        made: list[str] = normalize(pa.array(texts, pa.string()), form).to_pylist()
        return made

    return pa.array(
        [with_said(documents, text, change) for text in stored.to_pylist()], pa.string()
    )
