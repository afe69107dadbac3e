"""What `Rows` and `Samples` have in common: the prepared parts of a split, memory-mapped while in
use, and their properties.
"""

from __future__ import annotations

import bisect
import itertools
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ingot.base.errors import Failed, WrongInput
from ingot.base.markers import read_marker
from ingot.base.openfiles import open_file_limit
from ingot.base.remote.deferred import PARTIAL, DeferredFiles, deferred_files_of
from ingot.data.columns.column import Column, bin_path, column_prefix, idx_path
from ingot.data.columns.manifest import MANIFEST, ColumnPart, PreparedData, column_dtype
from ingot.data.splits import Split

IGNORE = -100
"""The label of a position that does not contribute to the loss."""

TRIES = 5
OPEN_SHARE = 16
"""A split has a sixteenth as many columns open as this process may have files, which is an eighth
of those files: a column has two, whose maps keep them open.
"""

Ids = npt.NDArray[np.int64]


class PreparedSplit:
    """A split of prepared data. Row ids count across the sources."""

    part_rows: list[list[int]]
    """Rows of each part of each source; for a stream cut across parts, one entry with all rows of a
    source.
    """
    sizes: list[int]
    """Rows of each source."""
    weights: list[float] | None
    """Shares of the sources; None if each counts by its size."""
    fingerprint: str
    """Identity of the prepared data of this split: tokens, documents, tokenizer. Independent of
    `seq_len` and weights, which only cut and order them.
    """
    set_fingerprint: str
    """Identity of the texts of this split, independent of the tokenizer."""
    tokenizer: str
    """Identity of the tokenizer that produced the ids."""
    left_out: int
    """Tokens that are in no row."""
    markers: list[str]
    """The marker files in `columns` that list all parts."""
    touched: queue.SimpleQueue[Path | None]
    """Every file of a part that was opened, for the checksum thread."""
    deferred: DeferredFiles | None
    """Where missing parts are fetched from; their checksums are verified on arrival."""
    _sources: Sequence[PartReader]

    def __init__(
        self,
        columns: Path,
        prepared: PreparedData,
        split: Split,
        seq_len: int,
        table: str | None,
        weights: Sequence[float] | None,
    ) -> None:
        sources = prepared.splits[split]
        self.columns, self.seq_len = columns, seq_len
        self.markers = [MANIFEST] if table is None else [MANIFEST, f"{table}.json"]
        self.touched = queue.SimpleQueue()
        self.fingerprint = prepared.data[split]
        self.set_fingerprint = prepared.sets[split]
        self.tokenizer = prepared.tokenizer
        self.documents, self.tokens, self.bytes = (
            prepared.total(split, what) for what in ("documents", "tokens", "bytes")
        )
        given = [source.weight for source in sources] if weights is None else list(weights)
        if len(given) != len(sources):
            raise WrongInput(
                f"{columns} was prepared from {len(sources)} sources, the recipe has {len(given)};"
                " run `ingot prepare --again`"
            )
        self.weights = None if len(given) == 1 or all(weight == 1.0 for weight in given) else given
        self._opening = opening(columns, prepared, split, self.markers, self.touched)
        self.deferred = self._opening.deferred
        self._names = [*prepared.names, *([] if table is None else [table])]
        self._places = [
            (source, part)
            for source, about in enumerate(sources)
            for part in range(len(about.parts))
        ]

    def _sized(self, part_rows: list[list[int]]) -> None:
        self.part_rows, self.sizes = part_rows, [sum(rows) for rows in part_rows]
        self._ends = list(itertools.accumulate(self.sizes))

    def __len__(self) -> int:
        return self._ends[-1]

    def _at(self, i: int) -> tuple[int, int]:
        """The source of row or sample `i`, and its number there."""
        if not 0 <= i < len(self):
            raise IndexError(f"row {i} of {len(self)}")
        return placed(self._ends, i)

    def bring(self, part: int, *, wait: bool = True) -> bool:
        """Fetch the files of a part, numbered across the sources. Without `wait`, returns False if
        another process is fetching one of them.
        """
        source, index = self._places[part]
        return all(self._sources[source].bring(name, index, wait=wait) for name in self._names)

    def has(self, part: int) -> bool:
        """Whether all files of the part are here already."""
        source, index = self._places[part]
        return all(self._sources[source].has(name, index) for name in self._names)

    def brought(self) -> set[int]:
        """The parts of which `bring` fetched a file that is still on disk, complete or not."""
        if self.deferred is None:
            return set()
        here = {path.name.removesuffix(PARTIAL) for path in self.deferred.folder.iterdir()}
        files = (
            self._sources[source].files(name, index)
            for source, index in self._places
            for name in self._names
        )
        return {
            number // len(self._names)
            for number, some in enumerate(files)
            if any(path.name in here for path in some)
        }

    def drop(self, part: int) -> None:
        """Remove what `bring` fetched."""
        source, index = self._places[part]
        for name in self._names:
            self._sources[source].drop(name, index)


class OpenColumns:
    """The columns of a split that are open, at most `most`: the one unused for longest is forgotten
    first, and closed once no array views it any more. Threads may use it at the same time.
    """

    def __init__(self, most: int) -> None:
        self._most, self._lock = most, threading.Lock()
        self._columns: OrderedDict[tuple[str, int], Column] = OrderedDict()

    def get(self, name: str, number: int, opened: Callable[[], Column]) -> Column:
        """A column of part `number`, made by `opened` if it is not open."""
        key = name, number
        with self._lock:
            if (column := self._columns.get(key)) is not None:
                self._columns.move_to_end(key)
                return column
        column = opened()  # it may have to be fetched, which others need not wait for
        with self._lock:
            self._columns[key] = column
            while len(self._columns) > self._most:
                self._columns.popitem(last=False)
        return column

    def forget(self, name: str, number: int) -> None:
        with self._lock:
            self._columns.pop((name, number), None)


class SplitFiles(NamedTuple):
    """What all parts of a split share. Every file is put into `touched` when it is first opened;
    `sums` has the SHA-256 of files that are fetched on demand.
    """

    columns: Path
    split: Split
    vocab_size: int
    touched: queue.SimpleQueue[Path | None]
    deferred: DeferredFiles | None
    sums: Mapping[str, str]
    open: OpenColumns


def opening(
    columns: Path,
    prepared: PreparedData,
    split: Split,
    markers: Sequence[str] = (MANIFEST,),
    touched: queue.SimpleQueue[Path | None] | None = None,
) -> SplitFiles:
    """What a `PartReader` of this split needs; `markers` list its files."""
    elsewhere = deferred_files_of(columns)
    entries = (
        [entry for name in markers for entry in (read_marker(columns, name) or {}).get("files", [])]
        if elsewhere
        else []
    )
    sums = {entry["path"]: entry["sha256"] for entry in entries}
    return SplitFiles(
        columns,
        split,
        prepared.vocab_size,
        queue.SimpleQueue() if touched is None else touched,
        elsewhere,
        sums,
        OpenColumns(max(1, open_file_limit() // OPEN_SHARE)),
    )


def placed(ends: Sequence[int], number: int) -> tuple[int, int]:
    """Which of several lists holds item `number` of all of them, and its number there. `ends`: the
    items up to the end of each list.
    """
    index = bisect.bisect_right(ends, number)
    return index, number - (ends[index - 1] if index else 0)


class PartReader:
    """The parts of a source, each memory-mapped when it is used."""

    def __init__(
        self, opening: SplitFiles, parts: Sequence[ColumnPart], sizes: Sequence[int]
    ) -> None:
        self._opening, self._parts = opening, parts
        self._sizes, self._ends = sizes, list(itertools.accumulate(sizes))
        self._touched: set[tuple[str, int]] = set()

    def column(self, name: str, index: int) -> Column:
        return self._opening.open.get(
            name, self._parts[index].number, lambda: self._opened(name, index)
        )

    def bring(self, name: str, index: int, *, wait: bool = True) -> bool:
        """Fetch the files of a column. Without `wait`, returns False if another process is fetching
        one of them.
        """
        opening = self._opening
        if opening.deferred is None or self.has(name, index):
            return True
        return all(
            opening.deferred.bring(path.name, opening.sums[path.name], wait=wait)
            for path in self.files(name, index)
        )

    def has(self, name: str, index: int) -> bool:
        """Whether the files of a column are here: part of the run folder, or fetched."""
        files, elsewhere = self.files(name, index), self._opening.deferred
        return all(path.exists() for path in files) or (
            elsewhere is not None and all((elsewhere.folder / path.name).exists() for path in files)
        )

    def drop(self, name: str, index: int) -> None:
        """Remove fetched files; the run folder's own files stay."""
        if (elsewhere := self._opening.deferred) is not None:
            self._opening.open.forget(name, self._parts[index].number)
            for path in self.files(name, index):
                elsewhere.drop(path.name)

    def files(self, name: str, index: int) -> tuple[Path, Path]:
        """The paths of a part's column in the run folder."""
        prefix = column_prefix(
            self._opening.columns, self._opening.split, name, self._parts[index].number
        )
        return bin_path(prefix), idx_path(prefix)

    def _brought(self, name: str, index: int, elsewhere: DeferredFiles) -> Column:
        """Open a fetched column. A file just fetched may be gone again if another process is more
        than a window ahead and removed it.
        """
        files = [elsewhere.folder / path.name for path in self.files(name, index)]
        for _ in range(TRIES):
            self.bring(name, index)
            try:
                return Column(files[0].with_suffix(""))
            except WrongInput:
                if all(path.exists() for path in files):
                    raise
        raise Failed(
            f"{files[0]} was taken away {TRIES} times before it could be read; raise data.window"
        )

    def _opened(self, name: str, index: int) -> Column:
        part, rows, files = self._parts[index], name.startswith("rows-"), self.files(name, index)
        is_own = self._opening.deferred is None or all(path.exists() for path in files)
        column = (
            Column(files[0].with_suffix(""))
            if is_own or self._opening.deferred is None
            else self._brought(name, index, self._opening.deferred)
        )
        dtype = np.dtype("int64") if rows else column_dtype(name, self._opening.vocab_size)
        if column.dtype != dtype:
            raise WrongInput(
                f"{bin_path(column.prefix)} holds {column.dtype}, manifest.json says {dtype}; run"
                " `ingot prepare --again`"
            )
        found, wanted = (len(column), column.elements), (part.records, part.elements(name))
        if rows and found[0] != self._sizes[index]:
            raise WrongInput(
                f"{bin_path(column.prefix)} has {found[0]:,} rows, {self._sizes[index]:,} were"
                " planned; run `ingot prepare --again`"
            )
        if not rows and found != wanted:
            raise WrongInput(
                f"{bin_path(column.prefix)} has {found[0]:,} documents and {found[1]:,} tokens,"
                f" manifest.json says {wanted[0]:,} and {wanted[1]:,}; run `ingot prepare --again`"
            )
        if is_own and (name, index) not in self._touched:
            self._touched.add((name, index))
            for path in files:
                self._opening.touched.put(path)
        return column
