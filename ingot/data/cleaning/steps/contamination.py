"""Drops training documents that contain evaluation data: word n-grams in common with the validation
documents.

The n-grams of all validation documents, and of the files of `against`, become one sorted file,
which workers memory-map. One of these documents with fewer words than an n-gram counts as a whole:
only a training document of exactly the same words matches it, since a few words occur in many
innocent texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ingot.base.storage import atomic_file
from ingot.config.sections.data import Clean, Contamination
from ingot.data.cleaning.arrays import Columns, Flags, Hashes, Indices, bucket_of, distinct, firsts
from ingot.data.cleaning.corpus import Corpus, DocumentBatch, drop_rows
from ingot.data.cleaning.exchange import (
    HashBucket,
    TaskFigures,
    files,
    read_rows,
    write_rows,
)
from ingot.data.cleaning.folding import fold
from ingot.data.cleaning.ngrams import HashedTexts, ngrams, words
from ingot.data.cleaning.unicode import normalize
from ingot.data.engines.engine import Advance
from ingot.data.raw.ranges import RawRange
from ingot.data.sources.records import whole_records

BITS = 24


@dataclass(frozen=True)
class ContaminationStage:
    """What the stages share. Documents dropped by the steps in `after` are ignored."""

    corpus: Corpus
    knobs: Contamination
    after: tuple[str, ...]

    @property
    def folder(self) -> Path:
        return self.corpus.folder / "contamination"

    @property
    def file(self) -> Path:
        """The n-grams of all validation documents: 64-bit hashes, ascending, each once."""
        return self.folder / "evaluation.bin"

    def read(
        self, task: RawRange, advance: Advance, split: str
    ) -> Iterator[tuple[DocumentBatch, HashedTexts]]:
        """The documents of a range that belong to a split, with their n-grams."""
        for batch in self.corpus.read(task, advance, self.corpus.alive(task, self.after)):
            own = batch.where(self.corpus.in_split(batch, task, split))
            yield own, ngrams(words(fold(own.texts)), self.knobs.ngram)


def read_against(knobs: Clean) -> Hashes:
    """The n-grams of the records in the files of `contamination.against`, ascending, each once.

    Raises:
        WrongInput: there is no such file, or a record in it cannot be read.
    """
    assert knobs.contamination is not None
    knob = "data.clean.contamination.against"
    texts = [
        " ".join(_texts(record.values))
        for source in knobs.against
        for record in whole_records(source, knob)
    ]
    folded = fold(normalize(pa.array(texts, pa.string()), knobs.normalize))
    return distinct(ngrams(words(folded), knobs.contamination.ngram).values)


def _texts(value: Any) -> Iterator[str]:
    """All texts in a record, at any depth, in order."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(part)


def write_against(folder: Path, grams: Hashes) -> None:
    """Put them beside the n-grams of the validation documents, for `MergeNgrams`."""
    write_rows(folder / "grams-against.arrow", [{"gram": grams}])


@dataclass(frozen=True)
class EvaluationNgrams(ContaminationStage):
    """From a range to the n-grams of its validation documents."""

    def open(self) -> Callable[[RawRange, Advance], TaskFigures]:
        self.corpus.check()

        def look(task: RawRange, advance: Advance) -> TaskFigures:
            found = [grams.values for _, grams in self.read(task, advance, "validation")]
            write_rows(
                self.folder / f"grams-{task.name}.arrow",
                [{"gram": distinct(np.concatenate([np.zeros(0, np.uint64), *found]))}],
            )
            return {}

        return look


@dataclass(frozen=True)
class MergeNgrams(ContaminationStage):
    """From the n-grams of all ranges to one file; a single task, which holds a share of the hashes
    in memory at a time.
    """

    shares: int

    def open(self) -> Callable[[HashBucket, Advance], TaskFigures]:
        return self._merge

    def _merge(self, task: HashBucket, advance: Advance) -> TaskFigures:
        runs = [run for path in files(self.folder, "grams-*.arrow") for run in read_rows(path)]
        count = 0
        with atomic_file(self.file, durable=False) as stream:
            for share in range(self.shares):
                found = distinct(
                    np.concatenate(
                        [
                            np.zeros(0, np.uint64),
                            *(bucket_of(run, "gram", share, self.shares)["gram"] for run in runs),
                        ]
                    )
                )
                stream.write(found.tobytes())
                count += len(found)
        return {"grams": count}


@dataclass(frozen=True)
class SearchNgrams(ContaminationStage):
    """From a range to its training documents that contain at least `matches` different ones of the
    n-grams; of a document that has fewer, all of its own.
    """

    def open(self) -> Callable[[RawRange, Advance], TaskFigures]:
        self.corpus.check()
        known = _mapped(self.file)
        sieve = _sieve(known)

        def search(task: RawRange, advance: Advance) -> TaskFigures:
            gone = [np.zeros(0, np.int64)]
            for batch, grams in self.read(task, advance, "train"):
                found = matching_ngrams(grams, known, sieve)
                wanted = np.full(len(grams), self.knobs.matches)
                for text in np.flatnonzero((found > 0) & (found < self.knobs.matches)).tolist():
                    own = grams.values[grams.offsets[text] : grams.offsets[text + 1]]
                    wanted[text] = min(self.knobs.matches, len(distinct(own)))
                gone.append(batch.numbers[found >= wanted])
            drops: Columns = drop_rows(np.concatenate(gone))
            write_rows(self.corpus.local_drops("contamination", task), [drops])
            return {}

        return search


def matching_ngrams(grams: HashedTexts, known: Hashes, sieve: Flags) -> Indices:
    """The number of distinct n-grams of each text that are in `known`."""
    perhaps = np.flatnonzero(sieve[grams.values >> np.uint64(64 - BITS)])
    values = grams.values[perhaps]
    if not len(known) or not len(values):
        return np.zeros(len(grams), np.int64)
    at = np.searchsorted(known, values)
    at[at == len(known)] = 0
    hits = known[at] == values
    texts = np.searchsorted(grams.offsets, perhaps[hits], side="right") - 1
    order = np.lexsort((values[hits], texts))
    texts, values = texts[order], values[hits][order]
    return np.bincount(texts[firsts(texts, values)], minlength=len(grams))


def _mapped(path: Path) -> Hashes:
    if not path.stat().st_size:
        return np.zeros(0, np.uint64)
    found: NDArray[np.uint64] = np.memmap(path, np.uint64, "r")
    return found


def _sieve(known: Hashes) -> Flags:
    """Whether any known hash begins with these bits: a filter that avoids most searches."""
    found = np.zeros(1 << BITS, bool)
    step = 1 << 22
    for begin in range(0, len(known), step):
        found[np.asarray(known[begin : begin + step]) >> np.uint64(64 - BITS)] = True
    return found
