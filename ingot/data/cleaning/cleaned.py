"""The result of cleaning: which documents are kept, and reading them in normal form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from ingot.base.errors import WrongInput
from ingot.config.sections.objective import PLAIN, Documents
from ingot.data.cleaning.corpus import KEPT
from ingot.data.cleaning.folding import check_fold
from ingot.data.cleaning.report import CleaningReport, fates_file
from ingot.data.cleaning.unicode import normalize
from ingot.data.documents.kinds import with_texts
from ingot.data.raw.ranges import RawRange


@dataclass(frozen=True)
class CleaningResult:
    """Which documents are kept, and in which normal form. Small: one byte per document lies in
    `folder` (None: all are kept).

    `fold` is the identity of the Unicode tables that were used (`fold_identity`).
    """

    folder: Path | None
    form: str
    identity: str
    report: CleaningReport
    fold: str = ""

    @classmethod
    def nothing(cls) -> CleaningResult:
        """Keep every document unchanged."""
        return cls(None, "none", "nothing", CleaningReport())

    @property
    def dropped(self) -> dict[str, int]:
        """Number of documents dropped by each step."""
        return {step.step: step.documents for step in self.report.steps}

    def tables(self, task: RawRange, tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
        """The kept documents of a range or of a piece of one, in normal form. `tables` must be all
        of its documents, in order.

        Raises:
            WrongInput: cleaning's file for this range is missing or belongs to other documents, or
                this process has other Unicode tables.
        """
        if task.kind == "tokens":
            yield from tables
            return
        if self.form != "none":
            check_fold(self.fold)
        fates = None if self.folder is None else _fates(self.folder, task)
        place = 0
        for table in tables:
            if fates is not None:
                here = fates[place : place + len(table)]
                place += len(table)
                table = table if not here.any() else table.filter(pa.array(here == KEPT))
            yield self._normal(task, table)

    def _normal(self, task: RawRange, table: pa.Table) -> pa.Table:
        if self.form == "none" or not len(table):
            return table
        texts = table.column("text").combine_chunks()
        if isinstance(texts, pa.ChunkedArray):
            texts = pa.concat_arrays(texts.chunks)
        made = texts if task.kind == "tokens" else normalize_stored(task.kind, texts, self.form)
        return table.set_column(table.schema.get_field_index("text"), "text", made)


def _fates(folder: Path, task: RawRange) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    path = fates_file(folder, task.name)
    try:
        found = np.load(path, mmap_mode="r")[task.offset : task.offset + task.documents]
    except (OSError, ValueError, EOFError) as error:
        raise WrongInput(f"{path} is missing or damaged; run `ingot prepare --again`") from error
    if len(found) != task.documents:
        raise WrongInput(
            f"{path} holds {len(found)} of {task.documents} documents; remove {folder.parent} and"
            " run `ingot prepare --again`"
        )
    return np.asarray(found)


def normalize_stored(documents: Documents, stored: pa.Array, form: str) -> pa.Array:
    """The documents with their texts in a normal form, computed by the same library as for all
    other texts.

    Raises:
        WrongInput: as `plain_texts`.
    """
    if documents in PLAIN:
        return normalize(stored, form)
    if form == "none" or normalize(stored, form).equals(stored):
        return stored

    def change(texts: list[str]) -> list[str]:
        made: list[str] = normalize(pa.array(texts, pa.string()), form).to_pylist()
        return made

    return pa.array(
        [with_texts(documents, text, change) for text in stored.to_pylist()], pa.string()
    )
