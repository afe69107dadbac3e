"""The report of cleaning: each document's fate as one number, and for each step the number and size
of the documents dropped, with examples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingot.base.markers import entry_of
from ingot.base.storage import atomic_file
from ingot.data.cleaning.arrays import Columns, Indices
from ingot.data.cleaning.corpus import NO_SURVIVOR, STEPS, UNKNOWN, Corpus, reason
from ingot.data.cleaning.exchange import TaskFigures
from ingot.data.engines.engine import Advance
from ingot.data.raw.ranges import RawRange

EXAMPLES = 5


@dataclass(frozen=True)
class DroppedExample:
    """A dropped document, the beginning of its text, and the document kept instead, if any."""

    doc_id: str
    text: str
    survivor: str | None = None
    similarity: float | None = None


@dataclass(frozen=True)
class StepReport:
    """What one step dropped: documents, and bytes of their texts in normal form."""

    step: str
    documents: int
    bytes: int
    examples: list[DroppedExample]


@dataclass(frozen=True)
class CleaningReport:
    """Documents and bytes examined, what each step dropped, and further counts as notes; `outside`:
    documents that `data.fraction` leaves out of every split, of which nothing else is told.
    """

    documents: int = 0
    bytes: int = 0
    steps: list[StepReport] = field(default_factory=list)
    notes: dict[str, int] = field(default_factory=dict)
    outside: int = 0

    @classmethod
    def of(cls, value: dict[str, Any]) -> CleaningReport:
        """A report from its JSON form, `dataclasses.asdict`."""
        steps = [
            StepReport(
                **{**step, "examples": [DroppedExample(**example) for example in step["examples"]]}
            )
            for step in value["steps"]
        ]
        return cls(**{**value, "steps": steps})


SHOWN_CHARACTERS = 160

Numbered = tuple[int, int | None, float | None]
"""(number, survivor's number, similarity)"""


def examples(
    corpus: Corpus, tasks: Sequence[RawRange], found: Mapping[str, Sequence[Numbered]]
) -> dict[str, list[DroppedExample]]:
    """Examples of each step's drops; reads only the row groups that contain them."""
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
            DroppedExample(
                texts[number][0],
                _beginning(texts[number][1]),
                None if survivor is None else texts[survivor][0],
                similarity,
            )
            for number, survivor, similarity in rows
        ]
        for step, rows in found.items()
    }


def _texts(
    corpus: Corpus, tasks: Sequence[RawRange], numbers: set[int]
) -> dict[int, tuple[str, str]]:
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


@dataclass(frozen=True)
class RangeGroup:
    """Ranges whose fates are written by one task."""

    number: int
    ranges: tuple[RawRange, ...]

    @property
    def name(self) -> str:
        return f"ranges-{self.number:05d}"


@dataclass(frozen=True)
class FateStage:
    """From ranges to `out/RANGE.npy`: for each document 0 if it is kept, else the number of the
    step that dropped it. `others` are the steps of other packages, applied by the survey.
    """

    corpus: Corpus
    steps: tuple[str, ...]
    others: tuple[str, ...]
    out: Path

    def open(self) -> Callable[[RangeGroup, Advance], TaskFigures]:
        return lambda task, advance: {"ranges": [self._seal(one) for one in task.ranges]}

    def _seal(self, task: RawRange) -> TaskFigures:
        survey, first = self.corpus.survey(task), self.corpus.number(task)
        fates, sizes = survey["reason"].copy(), survey["bytes"]
        drops = {step: self.corpus.drops(step, task) for step in self.steps}
        for step, rows in drops.items():
            fates[rows["number"] - first] = reason(step)
        path = fates_file(self.out, task.name)
        with atomic_file(path) as stream:
            np.save(stream, fates)
        entry = entry_of(self.out.parent, str(path.relative_to(self.out.parent)))
        told = {
            step: _told(reason(step, self.others), fates, sizes, drops.get(step), first)
            for step in (*STEPS, *self.others)
        }
        return {
            "file": [entry.path, entry.bytes, entry.sha256],
            "steps": {step: value for step, value in told.items() if value["documents"]},
        }


def fates_file(folder: Path, name: str) -> Path:
    return folder / f"{name}.npy"


def _told(
    number: int, fates: NDArray[np.uint8], sizes: Indices, drops: Columns | None, first: int
) -> dict[str, Any]:
    places = np.flatnonzero(fates == number)
    examples: list[tuple[int, int | None, float | None]]
    if drops is None:
        examples = [(first + place, None, None) for place in places[:EXAMPLES].tolist()]
    else:
        examples = [_example(drops, row) for row in range(min(EXAMPLES, len(drops["number"])))]
    return {"documents": len(places), "bytes": int(sizes[places].sum()), "examples": examples}


def _example(drops: Columns, row: int) -> tuple[int, int | None, float | None]:
    """(number, survivor, similarity). A survivor within the range may itself be a duplicate of a
    document in an earlier range.
    """
    survivor, similarity = int(drops["survivor"][row]), float(drops["similarity"][row])
    at = int(np.searchsorted(drops["number"], survivor))
    if at < len(drops["number"]) and drops["number"][at] == survivor:
        survivor = int(drops["survivor"][at])
    return (
        int(drops["number"][row]),
        None if survivor == NO_SURVIVOR else survivor,
        None if similarity == UNKNOWN else similarity,
    )


def merged(told: Sequence[TaskFigures], step: str) -> dict[str, Any]:
    """The sums of one step over all ranges, and its first examples."""
    found = [one["steps"][step] for one in told if step in one["steps"]]
    examples = sorted(
        (example for one in found for example in one["examples"]), key=lambda example: example[0]
    )
    return {
        "documents": sum(one["documents"] for one in found),
        "bytes": sum(one["bytes"] for one in found),
        "examples": examples[:EXAMPLES],
    }
