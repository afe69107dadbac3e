"""Plans rows of preferences, pairs and labelled texts: one record a row, but for those in which
nothing could be learnt.

The table is that of `packing`: of each row one triple (record, 0, ids of its first column that lie
in it).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ingot.base.markers import entry_of
from ingot.config.sections.data import COLUMNS
from ingot.config.sections.objective import Documents
from ingot.data.columns import Column, ColumnWriter, bin_path, column_prefix, idx_path
from ingot.data.engines.engine import Advance
from ingot.data.kinds import MASK, token_columns
from ingot.data.rowcounts import WINDOW, Counts, Ids, PartRows, any_set
from ingot.data.sources import Split

Flags = npt.NDArray[np.bool_]


def limits(documents: Documents, seq_len: int, target_len: int | None) -> dict[str, int]:
    """How many ids of each column of ids lie in a row."""
    return {
        name: target_len if name == "target" and target_len is not None else seq_len
        for name in token_columns(COLUMNS[documents])
    }


@dataclass(frozen=True)
class PickParts:
    """The stage: from parts of columns to their row tables, called `table`."""

    folder: Path
    table: str
    documents: Documents
    seq_len: int
    target_len: int | None

    def open(self) -> Callable[[tuple[Split, int], Advance], PartRows]:
        return self._make

    def _make(self, task: tuple[Split, int], advance: Advance) -> PartRows:
        split, number = task
        columns = {
            name: Column(column_prefix(self.folder, split, name, number))
            for name in COLUMNS[self.documents]
        }
        prefix, count, counts = (
            column_prefix(self.folder, split, self.table, number),
            len(columns[COLUMNS[self.documents][0]]),
            Counts(),
        )
        with ColumnWriter(prefix, np.dtype("int64")) as writer:
            for first in range(0, count, WINDOW):
                last = min(first + WINDOW, count)
                pieces, done = self._pieces(columns, first, last)
                writer.append(pieces.ravel(), np.full(len(pieces), 3))
                counts += done
                advance(
                    sum(
                        (column.begin(last) - column.begin(first)) * column.dtype.itemsize
                        for column in columns.values()
                    )
                )
        return PartRows(
            counts,
            [entry_of(self.folder, path.name) for path in (bin_path(prefix), idx_path(prefix))],
        )

    def _pieces(self, columns: dict[str, Column], first: int, last: int) -> tuple[Ids, Counts]:
        """(record, 0, ids) of the records `first` to `last` that are kept, [P, 3]."""
        most = limits(self.documents, self.seq_len, self.target_len)
        lengths = {name: columns[name].lengths(first, last).astype(np.int64) for name in most}
        kept = {name: np.minimum(lengths[name], most[name]) for name in most}
        before, after = np.ones(last - first, np.bool_), np.ones(last - first, np.bool_)
        for name in most:
            if f"{name}_{MASK}" in columns:
                mask, begins = (
                    columns[f"{name}_{MASK}"],
                    columns[name].begin(first) + np.cumsum(lengths[name]) - lengths[name],
                )
                before &= any_set(mask, begins + 1, begins + lengths[name])
                after &= any_set(mask, begins + 1, begins + kept[name])
            else:
                before &= lengths[name] > 0
        rows: Flags = before & after
        longer = np.logical_or.reduce([lengths[name] > most[name] for name in most])
        record, own = np.flatnonzero(rows), next(iter(kept.values()))
        counts = Counts(
            rows=len(record),
            tokens=int(sum(sizes[rows].sum() for sizes in kept.values())),
            truncated=int((longer & rows).sum()),
            lost=int((before & ~after).sum()),
            untrained=int((~before).sum()),
        )
        return np.stack((record + first, np.zeros_like(record), own[record]), axis=1), counts
