"""Near-duplicates, in stages: bands of MinHash signatures -> groups that share a band -> components
of candidates -> their n-gram sets -> clusters by exact similarity.

Only candidates' sets are kept, and those of one component lie in one bucket, so that every pair can
be compared within its bucket. A document without words has no n-grams and is not compared; it is
counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ingot.config.sections.data import Fuzzy
from ingot.data.batches.permutation import mix
from ingot.data.cleaning.arrays import (
    Columns,
    Hashes,
    Indices,
    between,
    bucket_of,
    firsts,
    joined,
    shares_of,
    sorted_by,
)
from ingot.data.cleaning.corpus import Corpus, DocumentBatch, drop_rows
from ingot.data.cleaning.exchange import (
    HashBucket,
    TaskFigures,
    files,
    read_rows,
    read_sets,
    write_rows,
    write_sets,
)
from ingot.data.cleaning.folding import fold
from ingot.data.cleaning.ngrams import HashedTexts, band_keys, ngrams, signatures, words
from ingot.data.cleaning.report import EXAMPLES
from ingot.data.cleaning.steps.clusters import (
    ALONE,
    Candidates,
    cluster,
    read_components,
    similarities,
    write_components,
)
from ingot.data.engines.engine import Advance
from ingot.data.raw.ranges import RawRange

RUN_ROWS = 1 << 21
KEYS = {"key": np.uint64, "number": np.int64}
ROUTED = {"bucket": np.uint32, **KEYS}


@dataclass(frozen=True)
class NearDuplicateStage:
    """What all stages share. Documents dropped by the steps in `after` are ignored."""

    corpus: Corpus
    knobs: Fuzzy
    after: tuple[str, ...]

    @property
    def folder(self) -> Path:
        return self.corpus.folder / "fuzzy"

    def grams(self, batch: DocumentBatch) -> HashedTexts:
        return ngrams(words(fold(batch.texts)), self.knobs.ngram)


@dataclass(frozen=True)
class SignStage(NearDuplicateStage):
    """From a range to the band keys of its documents."""

    def open(self) -> Callable[[RawRange, Advance], TaskFigures]:
        self.corpus.check()

        def sign(task: RawRange, advance: Advance) -> TaskFigures:
            empty = 0

            def rows() -> Iterator[Columns]:
                nonlocal empty
                for batch in self.corpus.read(task, advance, self.corpus.alive(task, self.after)):
                    grams = self.grams(batch)
                    some = np.flatnonzero(grams.counts)
                    empty += len(batch) - len(some)
                    offsets = np.append(grams.offsets[:-1][some], grams.offsets[-1])
                    keys = band_keys(
                        signatures(HashedTexts(grams.values, offsets), self.knobs.permutations),
                        self.knobs.similarity,
                    )
                    yield {
                        "key": keys.ravel(),
                        "number": np.repeat(batch.numbers[some], keys.shape[1]),
                    }

            write_rows(
                self.folder / f"keys-{task.name}.arrow",
                (sorted_by(run, "key", "number") for run in _runs(rows())),
            )
            return {"empty": empty}

        return sign


@dataclass(frozen=True)
class GroupStage(NearDuplicateStage):
    """From a bucket of keys to the groups of documents that share a key."""

    def open(self) -> Callable[[HashBucket, Advance], TaskFigures]:
        return self._group

    def _group(self, task: HashBucket, advance: Advance) -> TaskFigures:
        found = [
            bucket_of(run, "key", task.number, task.of)
            for path in files(self.folder, "keys-*.arrow")
            for run in read_rows(path)
        ]
        rows = sorted_by(joined(found, KEYS), "key", "number")
        first = firsts(rows["key"])
        shared = ~(first & np.append(first[1:], True)) if len(first) else first
        advance(sum(column.nbytes for column in rows.values()))
        write_rows(
            self.folder / f"groups-{task.name}.arrow",
            [{name: column[shared] for name, column in rows.items()}],
        )
        return {}


@dataclass(frozen=True)
class ConnectStage(NearDuplicateStage):
    """From all groups to components; a single task with bounded memory."""

    documents: int

    def open(self) -> Callable[[HashBucket, Advance], TaskFigures]:
        return lambda task, advance: {
            "candidates": write_components(
                components_file(self.folder), self.documents, self._edges()
            )
        }

    def _edges(self) -> Iterator[tuple[Indices, Indices]]:
        for path in files(self.folder, "groups-*.arrow"):
            for rows in read_rows(path):
                first = firsts(rows["key"])
                if len(first):
                    leaders = rows["number"][
                        np.maximum.accumulate(np.where(first, np.arange(len(first)), 0))
                    ]
                    yield leaders[~first], rows["number"][~first]


@dataclass(frozen=True)
class RouteStage(NearDuplicateStage):
    """From a file of groups to the same rows partitioned by their component's bucket."""

    buckets: int

    def open(self) -> Callable[[HashBucket, Advance], TaskFigures]:
        components = read_components(components_file(self.folder))

        def route(task: HashBucket, advance: Advance) -> TaskFigures:
            rows = joined(read_rows(self.folder / f"groups-{task.name}.arrow"), KEYS)
            rows = {"bucket": shares_of(_spread(components[rows["number"]]), self.buckets), **rows}
            write_rows(
                self.folder / f"routed-{task.name}.arrow",
                [sorted_by(rows, "bucket", "key", "number")],
            )
            return {}

        return route


@dataclass(frozen=True)
class GatherStage(NearDuplicateStage):
    """From a range to the n-gram sets of its candidates, partitioned by their component's
    bucket.
    """

    buckets: int

    def open(self) -> Callable[[RawRange, Advance], TaskFigures]:
        self.corpus.check()
        components = read_components(components_file(self.folder))

        def gather(task: RawRange, advance: Advance) -> TaskFigures:
            first = self.corpus.number(task)
            own = np.asarray(components[first : first + task.documents])
            write_sets(
                self.folder / f"sets-{task.name}.arrow", self._sets(task, advance, own, first)
            )
            return {}

        return gather

    def _sets(
        self, task: RawRange, advance: Advance, components: Indices, first: int
    ) -> Iterator[tuple[Columns, Hashes, Indices]]:
        for batch in self.corpus.read(task, advance, components != ALONE):
            buckets = shares_of(_spread(components[batch.numbers - first]), self.buckets)
            order = np.argsort(buckets, kind="stable")
            found = self.grams(batch.take(order)).sets()
            yield (
                {"bucket": buckets[order], "number": batch.numbers[order]},
                found.values,
                found.offsets,
            )


@dataclass(frozen=True)
class VerifyStage(NearDuplicateStage):
    """From a bucket of components to the documents that duplicate an earlier one."""

    def open(self) -> Callable[[HashBucket, Advance], TaskFigures]:
        return self._verify

    def _verify(self, task: HashBucket, advance: Advance) -> TaskFigures:
        members = self._members(task)
        routed = [
            between(run, "bucket", task.number, task.number + 1)
            for path in files(self.folder, "routed-*.arrow")
            for run in read_rows(path)
        ]
        rows = sorted_by(joined(routed, ROUTED), "key", "number")
        places = np.searchsorted(members.numbers, rows["number"])
        groups = np.split(places, np.flatnonzero(firsts(rows["key"]))[1:]) if len(places) else []
        found, bounded = cluster(members, groups, self.knobs.similarity)
        gone = np.flatnonzero(found != np.arange(len(members)))
        drops = drop_rows(members.numbers[gone], members.numbers[found[gone]])
        for row, place in enumerate(gone[:EXAMPLES].tolist()):
            drops["similarity"][row] = similarities(
                members.sets[found[place]], [members.sets[place]]
            )[0]
        write_rows(self.folder / f"drops-{task.name}.arrow", [drops])
        return {"bounded": bounded}

    def _members(self, task: HashBucket) -> Candidates:
        """The sets of a bucket, as views of the memory-mapped files."""
        numbers, sets = [np.zeros(0, np.int64)], list[Hashes]()
        for path in files(self.folder, "sets-*.arrow"):
            for columns, values, offsets in read_sets(path):
                first, last = np.searchsorted(
                    columns["bucket"], np.array([task.number, task.number + 1], np.uint32)
                ).tolist()
                numbers.append(columns["number"][first:last])
                sets += [values[offsets[row] : offsets[row + 1]] for row in range(first, last)]
        return _by_number(np.concatenate(numbers), sets)


def components_file(folder: Path) -> Path:
    return folder / "components.npy"


def _by_number(numbers: Indices, sets: list[Hashes]) -> Candidates:
    order = np.argsort(numbers)
    return Candidates(numbers[order], [sets[place] for place in order.tolist()])


def _spread(components: Indices) -> Hashes:
    return mix(components.astype(np.uint64) + np.uint64(1))


def _runs(batches: Iterator[Columns]) -> Iterator[Columns]:
    """Concatenate batches into runs of some million rows, so that few runs have to be sorted."""
    waiting, rows = list[Columns](), 0
    for batch in batches:
        waiting.append(batch)
        rows += len(batch["key"])
        if rows >= RUN_ROWS:
            yield joined(waiting, KEYS)
            waiting, rows = [], 0
    if rows:
        yield joined(waiting, KEYS)
