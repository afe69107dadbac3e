"""The documents of a range as cleaning sees them: numbered plain text in normal form, without those
that earlier steps dropped.

A document's number is its place among all documents, validation sources before training sources,
each in reading order. It does not depend on how the work is divided; of duplicate documents the one
with the smallest number is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ingot.base.errors import WrongInput
from ingot.config.sections.objective import PLAIN, Documents
from ingot.data.cleaning.arrays import Columns, Flags, Indices, between, joined, sorted_by
from ingot.data.cleaning.exchange import files, read_rows
from ingot.data.cleaning.folding import check_fold
from ingot.data.cleaning.unicode import normalize
from ingot.data.documents.kinds import OF_SEVERAL_TEXTS, plain_text, whole_text
from ingot.data.engines.engine import Advance
from ingot.data.raw.ranges import RawRange
from ingot.data.raw.store import read_table
from ingot.data.splits import Shares

STEPS = ("min_chars", "max_chars", "languages", "exact", "fuzzy", "contamination")
"""ingot's own steps; steps of other packages are numbered after them."""

KEPT, ELSEWHERE = 0, 255
"""Values of a document's fate other than a step's number: it is kept; or `data.fraction` leaves it
out of every split, and cleaning ignores it.
"""


def reason(step: str, others: Sequence[str] = ()) -> int:
    """The number recorded for a document that this step dropped: 1 + its index in `STEPS`, or after
    those, in `others`, the steps of other packages.
    """
    return 1 + (*STEPS, *others).index(step)


DROPS = {"number": np.int64, "survivor": np.int64, "similarity": np.float32}
NO_SURVIVOR = -1
UNKNOWN = -1.0


@dataclass(frozen=True)
class DocumentBatch:
    """Documents that were read together: numbers, identities, texts; and, if asked for, all that
    documents of several texts hold.
    """

    numbers: Indices
    doc_ids: pa.Array
    texts: pa.Array
    whole: pa.Array | None = None

    def __len__(self) -> int:
        return len(self.numbers)

    def where(self, keep: Flags) -> DocumentBatch:
        return self.take(np.flatnonzero(keep))

    def take(self, order: Indices) -> DocumentBatch:
        rows = pa.array(order)
        whole = None if self.whole is None else self.whole.take(rows)
        return DocumentBatch(
            self.numbers[order], self.doc_ids.take(rows), self.texts.take(rows), whole
        )


@dataclass(frozen=True)
class Corpus:
    """The locations of the documents and of all stages' files, and what is the same for all
    stages.
    """

    raw: Path
    folder: Path
    form: str
    shares: Shares
    first_training: int
    fold: str

    def check(self) -> None:
        """Refuse to work in a process with other Unicode tables; called when a stage is opened."""
        check_fold(self.fold)

    def number(self, task: RawRange) -> int:
        """The number of a range's first document."""
        return task.begin + (0 if task.split == "validation" else self.first_training)

    def read(
        self,
        task: RawRange,
        advance: Advance,
        wanted: Flags | None = None,
        *,
        whole: bool = False,
    ) -> Iterator[DocumentBatch]:
        """The documents of a range that are `wanted` (None: all); row groups without a wanted
        document are not read. `whole`: with all that documents of several texts hold.
        """
        number, place = self.number(task), 0
        counts = group_sizes(self.raw / task.path)
        for group in range(task.first, task.last):
            here = slice(place, place + counts[group])
            place += counts[group]
            if wanted is not None and not wanted[here].any():
                continue
            table = read_table(self.raw / task.path, group)
            batch = DocumentBatch(
                np.arange(number + here.start, number + here.stop),
                _whole(table, "doc_id"),
                _whole(table, "text"),
            )
            if wanted is not None:
                batch = batch.where(wanted[here])
            texts = batch.texts if task.kind == "tokens" else plain_texts(task.kind, batch.texts)
            everything = (
                pa.array([whole_text(text) for text in batch.texts.to_pylist()], pa.string())
                if whole and task.kind in OF_SEVERAL_TEXTS
                else None
            )
            advance(batch.texts.nbytes)
            yield DocumentBatch(
                batch.numbers,
                batch.doc_ids,
                normalize(texts, self.form),
                None if everything is None else normalize(everything, self.form),
            )

    def alive(self, task: RawRange, steps: Sequence[str]) -> Flags:
        """Flags of the documents of a range that the filters and these steps kept."""
        found: Flags = self.survey(task)["reason"] == KEPT
        for step in steps:
            found[self.drops(step, task)["number"] - self.number(task)] = False
        return found

    def survey(self, task: RawRange) -> Columns:
        """The first stage's columns for a range: `reason`, `bytes`."""
        return read_rows(self.survey_file(task))[0]

    def survey_file(self, task: RawRange) -> Path:
        return self.folder / "survey" / f"{task.name}.arrow"

    def drops(self, step: str, task: RawRange) -> Columns:
        """The drops of a step in a range: `number`, ascending, `survivor`, `similarity`."""
        first = self.number(task)
        found = [
            between(rows, "number", first, first + task.documents)
            for path in files(self.folder / step, "drops-*.arrow")
            for rows in read_rows(path)
        ]
        own = self.local_drops(step, task)
        return sorted_by(joined(found + (read_rows(own) if own.exists() else []), DROPS), "number")

    def local_drops(self, step: str, task: RawRange) -> Path:
        """The path of the drops of a stage that works by ranges."""
        return self.folder / step / f"{task.name}.arrow"

    def elsewhere(self, batch: DocumentBatch, task: RawRange) -> Flags:
        """Flags of the documents of a batch that `data.fraction` leaves out of every split."""
        if self.shares.fraction >= 1.0 or task.split == "validation":
            return np.zeros(len(batch), bool)
        return np.array(
            [self.shares.split(task.split, doc_id) is None for doc_id in batch.doc_ids.to_pylist()],
            bool,
        )

    def in_split(self, batch: DocumentBatch, task: RawRange, split: str) -> Flags:
        """Flags of the documents of a batch that belong to `split`."""
        if task.split == "validation" or (
            self.shares.validation is None and self.shares.fraction >= 1.0
        ):
            return np.full(len(batch), task.split == split)
        return np.array(
            [
                self.shares.split(task.split, doc_id) == split
                for doc_id in batch.doc_ids.to_pylist()
            ],
            bool,
        )


def group_sizes(path: Path) -> list[int]:
    """Documents of each row group of a raw part.

    Raises:
        WrongInput: the file is missing or damaged.
    """
    try:
        with pq.ParquetFile(path) as file:
            return [
                file.metadata.row_group(group).num_rows
                for group in range(file.metadata.num_row_groups)
            ]
    except (pa.ArrowException, OSError) as error:
        raise WrongInput(
            f"{path} is damaged ({str(error)[:120]}); run `ingot ingest --again`"
        ) from error


def _whole(table: pa.Table, name: str) -> pa.Array:
    column = table.column(name).combine_chunks()
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def drop_rows(numbers: Indices, survivors: Indices | None = None) -> Columns:
    """Rows of drops, with the survivors where they are known; similarities are not known."""
    gone = np.full(len(numbers), NO_SURVIVOR, np.int64) if survivors is None else survivors
    return {
        "number": numbers,
        "survivor": gone,
        "similarity": np.full(len(numbers), UNKNOWN, np.float32),
    }


def plain_texts(documents: Documents, stored: pa.Array) -> pa.Array:
    """The text content of each document as one string.

    Raises:
        WrongInput: a text is not what `ingest` stores for this kind.
    """
    return (
        stored
        if documents in PLAIN
        else pa.array([plain_text(documents, text) for text in stored.to_pylist()], pa.string())
    )
