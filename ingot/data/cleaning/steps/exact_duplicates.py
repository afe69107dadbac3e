"""The survey of every document, and exact duplicates: texts that are equal when folded, of chats
and pairs all that they hold.

Workers hash documents; each bucket of hashes is then compared by one worker. Within a range, only
the first document of each hash is passed on, so a bucket holds at most one row per hash and range.

A text that is empty when folded (white space, lone diacritics) is not a duplicate of another such
text: it is counted in a note and left to `min_chars`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ingot.data.cleaning.arrays import Bytes, Columns, bucket_of, firsts, joined, sorted_by
from ingot.data.cleaning.corpus import ELSEWHERE, KEPT, Corpus, DocumentBatch, drop_rows
from ingot.data.cleaning.exchange import HashBucket, TaskFigures, files, read_rows, write_rows
from ingot.data.cleaning.folding import digests, fold
from ingot.data.cleaning.steps.filters import DocumentFilters
from ingot.data.engines.engine import Advance
from ingot.data.raw.ranges import RawRange

ROWS = {"high": np.uint64, "low": np.uint64, "number": np.int64}


@dataclass(frozen=True)
class SurveyStage:
    """From a range to `reason` and `bytes` of each document; with `exact`, also the hashes of those
    that are kept.
    """

    corpus: Corpus
    filters: DocumentFilters
    exact: bool

    def open(self) -> Callable[[RawRange, Advance], TaskFigures]:
        self.corpus.check()
        return functools.partial(self._look, self.filters.open())

    def _look(
        self, reasons_of: Callable[[pa.Array], Bytes], task: RawRange, advance: Advance
    ) -> TaskFigures:
        reasons, sizes, hashed = [np.zeros(0, np.uint8)], [np.zeros(0, np.int64)], list[Columns]()
        empty = 0
        for batch in self.corpus.read(task, advance, whole=self.exact):
            found = reasons_of(batch.texts)
            found[self.corpus.elsewhere(batch, task)] = ELSEWHERE
            reasons.append(found)
            sizes.append(
                pc.binary_length(batch.texts).to_numpy(zero_copy_only=False).astype(np.int64)
            )
            if self.exact:
                rows, without = _hashed(batch.where(found == KEPT))
                hashed.append(rows)
                empty += without
        columns: Columns = {"reason": np.concatenate(reasons), "bytes": np.concatenate(sizes)}
        write_rows(self.corpus.survey_file(task), [columns])
        if self.exact:
            self._send(task, joined(hashed, ROWS))
        counted = columns["reason"] != ELSEWHERE
        return {
            "documents": int(counted.sum()),
            "bytes": int(columns["bytes"][counted].sum()),
            "outside": int((~counted).sum()),
            "empty": empty,
        }

    def _send(self, task: RawRange, rows: Columns) -> None:
        rows = sorted_by(rows, "high", "low", "number")
        first = firsts(rows["high"], rows["low"])
        write_rows(self.corpus.local_drops("exact", task), [_later(rows)])
        write_rows(
            self.corpus.folder / "exact" / f"hashes-{task.name}.arrow",
            [{name: column[first] for name, column in rows.items()}],
        )


@dataclass(frozen=True)
class ExactDuplicateStage:
    """From a bucket of hashes to the documents that repeat an earlier one."""

    corpus: Corpus

    def open(self) -> Callable[[HashBucket, Advance], TaskFigures]:
        return self._compare

    def _compare(self, task: HashBucket, advance: Advance) -> TaskFigures:
        folder = self.corpus.folder / "exact"
        found = [
            bucket_of(run, "high", task.number, task.of)
            for path in files(folder, "hashes-*.arrow")
            for run in read_rows(path)
        ]
        rows = sorted_by(joined(found, ROWS), "high", "low", "number")
        advance(sum(column.nbytes for column in rows.values()))
        write_rows(folder / f"drops-{task.name}.arrow", [_later(rows)])
        return {}


def _hashed(batch: DocumentBatch) -> tuple[Columns, int]:
    """Hashes of the documents that are not empty when folded, and the number of empty ones."""
    folded = fold(batch.texts)
    some = folded.ends > folded.begins
    if batch.whole is not None:
        folded = fold(batch.whole)
    hashes = digests(folded)[some]
    return {"high": hashes[:, 0], "low": hashes[:, 1], "number": batch.numbers[some]}, int(
        (~some).sum()
    )


def _later(rows: Columns) -> Columns:
    """Of sorted rows, all but the first of each hash, as drops whose survivor is that first one."""
    first = firsts(rows["high"], rows["low"])
    survivors = (
        rows["number"][np.maximum.accumulate(np.where(first, np.arange(len(first)), 0))]
        if len(first)
        else rows["number"]
    )
    return sorted_by(drop_rows(rows["number"][~first], survivors[~first]), "number")
