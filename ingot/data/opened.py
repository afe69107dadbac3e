"""What rows and samples have in common: the prepared parts of a split, memory-mapped when first touched, and what is known of them."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ingot.base.errors import WrongInput
from ingot.data.columns import Column, bin_path, column_prefix, idx_path
from ingot.data.kinds import column_dtype
from ingot.data.manifest import MANIFEST, Part, Prepared
from ingot.data.sources import Split

IGNORE = -100
"""The label of a position that no loss is taken at."""

Ids = npt.NDArray[np.int64]


class Opened:
    """A split of prepared data. Row ids count through the sources."""

    sizes: list[int]
    """Rows of each source."""
    weights: list[float] | None
    """Shares of the sources; None where each counts by its size."""
    fingerprint: str
    """Identity of the prepared data: tokens, documents, tokenizer. Not of `seq_len` and weights, which order and cut them."""
    set_fingerprint: str
    """Identity of the texts of this split, the same for any tokenizer."""
    tokenizer: str
    """Identity of the tokenizer that the ids are of."""
    left_out: int
    """Tokens that are in no row."""
    markers: list[str]
    """The files in `columns` that vouch for all parts."""
    touched: queue.SimpleQueue[Path | None]
    """Every file of a part that was opened, for who wants to look at its checksum."""

    def __init__(self, columns: Path, prepared: Prepared, split: Split, seq_len: int, table: str | None, weights: Sequence[float] | None) -> None:
        sources = prepared.splits[split]
        self.columns, self.seq_len = columns, seq_len
        self.markers = [MANIFEST] if table is None else [MANIFEST, f"{table}.json"]
        self.touched = queue.SimpleQueue()
        self.fingerprint, self.set_fingerprint, self.tokenizer = prepared.data, prepared.sets[split], prepared.tokenizer
        self.documents, self.tokens, self.bytes = (prepared.total(split, what) for what in ("documents", "tokens", "bytes"))
        given = [source.weight for source in sources] if weights is None else list(weights)
        if len(given) != len(sources):
            raise WrongInput(f"{columns} was prepared from {len(sources)} sources, the recipe has {len(given)}; run `ingot prepare` again")
        self.weights = None if len(given) == 1 or all(weight == 1.0 for weight in given) else given
        self._opening = Opening(columns, split, prepared.vocab_size, self.touched)

    def _sized(self, sizes: list[int]) -> None:
        self.sizes, self._ends = sizes, list(itertools.accumulate(sizes))

    def __len__(self) -> int:
        return self._ends[-1]


class Opening(NamedTuple):
    """What is the same for all parts of a split. `touched` is told every file that is opened."""

    columns: Path
    split: Split
    vocab_size: int
    touched: queue.SimpleQueue[Path | None]


class Parts:
    """The parts of a source, memory-mapped one by one when first touched."""

    def __init__(self, opening: Opening, parts: Sequence[Part], sizes: Sequence[int]) -> None:
        self._opening, self._parts = opening, parts
        self._sizes, self._ends = sizes, list(itertools.accumulate(sizes))
        self._open: dict[tuple[str, int], Column] = {}

    def column(self, name: str, index: int) -> Column:
        column = self._open.get((name, index))
        if column is None:
            column = self._open[name, index] = self._opened(name, index)
        return column

    def _opened(self, name: str, index: int) -> Column:
        part, rows = self._parts[index], name.startswith("rows-")
        column = Column(column_prefix(self._opening.columns, self._opening.split, name, part.number))
        dtype = np.dtype("int64") if rows else column_dtype(name, self._opening.vocab_size)
        if column.dtype != dtype:
            raise WrongInput(f"{bin_path(column.prefix)} holds {column.dtype}, manifest.json says {dtype}; run `ingot prepare` again")
        found, wanted = (len(column), column.elements), (part.documents, part.elements(name))
        if rows and found[0] != self._sizes[index]:
            raise WrongInput(f"{bin_path(column.prefix)} has {found[0]:,} rows, {self._sizes[index]:,} were planned; run `ingot prepare` again")
        if not rows and found != wanted:
            raise WrongInput(
                f"{bin_path(column.prefix)} has {found[0]:,} documents and {found[1]:,} tokens, manifest.json says "
                f"{wanted[0]:,} and {wanted[1]:,}; run `ingot prepare` again"
            )
        for path in (bin_path(column.prefix), idx_path(column.prefix)):
            self._opening.touched.put(path)
        return column
