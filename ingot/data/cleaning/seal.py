"""The last stage: what all steps dropped, as one number for each document, and the sums and
examples for the report.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingot.base.markers import entry_of
from ingot.base.storage import atomic_file
from ingot.data.cleaning.codepoints import Indices
from ingot.data.cleaning.corpus import NO_SURVIVOR, UNKNOWN, Corpus
from ingot.data.cleaning.exchange import Columns, Told
from ingot.data.cleaning.report import EXAMPLES, STEPS, Step, reason
from ingot.data.engines.engine import Advance
from ingot.data.ranges import Range


@dataclass(frozen=True)
class Few:
    """Some ranges that are sealed by one task."""

    number: int
    ranges: tuple[Range, ...]

    @property
    def name(self) -> str:
        return f"ranges-{self.number:05d}"


@dataclass(frozen=True)
class Seal:
    """From ranges to `out/RANGE.npy`: for each document 0 where it stays, else the number of what
    dropped it.
    """

    corpus: Corpus
    steps: tuple[Step, ...]
    out: Path

    def open(self) -> Callable[[Few, Advance], Told]:
        return lambda task, advance: {"ranges": [self._seal(one) for one in task.ranges]}

    def _seal(self, task: Range) -> Told:
        survey, first = self.corpus.survey(task), self.corpus.number(task)
        fates, sizes = survey["reason"].copy(), survey["bytes"]
        drops = {step: self.corpus.drops(step, task) for step in self.steps}
        for step, rows in drops.items():
            fates[rows["number"] - first] = reason(step)
        path = fates_file(self.out, task.name)
        with atomic_file(path) as stream:
            np.save(stream, fates)
        entry = entry_of(self.out.parent, str(path.relative_to(self.out.parent)))
        told = {step: _told(step, fates, sizes, drops.get(step), first) for step in STEPS}
        return {
            "file": [entry.path, entry.bytes, entry.sha256],
            "steps": {step: value for step, value in told.items() if value["documents"]},
        }


def fates_file(folder: Path, name: str) -> Path:
    return folder / f"{name}.npy"


def _told(
    step: Step, fates: NDArray[np.uint8], sizes: Indices, drops: Columns | None, first: int
) -> dict[str, Any]:
    places = np.flatnonzero(fates == reason(step))
    examples: list[tuple[int, int | None, float | None]]
    if drops is None:
        examples = [(first + place, None, None) for place in places[:EXAMPLES].tolist()]
    else:
        examples = [_example(drops, row) for row in range(min(EXAMPLES, len(drops["number"])))]
    return {"documents": len(places), "bytes": int(sizes[places].sum()), "examples": examples}


def _example(drops: Columns, row: int) -> tuple[int, int | None, float | None]:
    """(number, survivor, similarity). A survivor within the range may itself have given way to one
    of an earlier range.
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


def merged(told: Sequence[Told], step: Step) -> dict[str, Any]:
    """The sums of one step over all ranges, and the first of its examples."""
    found = [one["steps"][step] for one in told if step in one["steps"]]
    examples = sorted(
        (example for one in found for example in one["examples"]), key=lambda example: example[0]
    )
    return {
        "documents": sum(one["documents"] for one in found),
        "bytes": sum(one["bytes"] for one in found),
        "examples": examples[:EXAMPLES],
    }
