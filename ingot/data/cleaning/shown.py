"""Examples of dropped documents with their texts, looked up by number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ingot.data.cleaning.corpus import Corpus
from ingot.data.cleaning.report import Example, Step
from ingot.data.ranges import Range

SHOWN_CHARACTERS = 160

Numbered = tuple[int, int | None, float | None]
"""(number, survivor's number, similarity)"""


def examples(
    corpus: Corpus, tasks: Sequence[Range], found: Mapping[Step, Sequence[Numbered]]
) -> dict[Step, list[Example]]:
    """For each step its examples; reads only the row groups that they lie in."""
    numbers = {
        number
        for rows in found.values()
        for row in rows
        for number in row[:2]
        if number is not None
    }
    texts = _texts(corpus, tasks, numbers)
    return {
        step: [
            Example(
                texts[number][0],
                _beginning(texts[number][1]),
                None if survivor is None else texts[survivor][0],
                similarity,
            )
            for number, survivor, similarity in rows
        ]
        for step, rows in found.items()
    }


def _texts(corpus: Corpus, tasks: Sequence[Range], numbers: set[int]) -> dict[int, tuple[str, str]]:
    """(doc_id, text) of each number."""
    found: dict[int, tuple[str, str]] = {}
    for task in tasks:
        first = corpus.number(task)
        wanted = np.zeros(task.documents, bool)
        wanted[
            [number - first for number in numbers if first <= number < first + task.documents]
        ] = True
        if wanted.any():
            for batch in corpus.read(task, lambda _: None, wanted):
                found |= zip(
                    batch.numbers.tolist(),
                    zip(batch.doc_ids.to_pylist(), batch.texts.to_pylist(), strict=True),
                    strict=True,
                )
    return found


def _beginning(text: str) -> str:
    words = " ".join(text[: 2 * SHOWN_CHARACTERS].split())
    return (
        words
        if len(words) <= SHOWN_CHARACTERS and len(text) <= 2 * SHOWN_CHARACTERS
        else words[:SHOWN_CHARACTERS] + "…"
    )
