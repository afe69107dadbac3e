"""Rows of `seq_len` tokens cut from prepared columns, each made when it is asked for. Holds offsets of parts, never of documents."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ingot.base.errors import WrongInput
from ingot.data.columns import Column
from ingot.data.manifest import Part, Prepared, read_prepared
from ingot.data.sources import Split

IGNORE = -100
"""The label of a position that no loss is taken at."""

Ids = npt.NDArray[np.int64]


class Row(NamedTuple):
    """One row, four arrays [T].

    labels: the next token, or -100 where that belongs to another document or to none. segments: number of the document
    within the row from 1, 0 where the row is padding. positions: count from 0 at each document's first token in the row.
    """

    tokens: Ids
    labels: Ids
    positions: Ids
    segments: Ids


def open_rows(columns: Path, split: Split, seq_len: int, *, pad_last: bool, weights: Sequence[float] | None = None) -> Rows:
    """The rows of a split. Costs the same for any size: sizes of files are checked, nothing is read.

    Args:
        pad_last: keep the last row of a source, which is not full, and fill it up; else it is left out.
        weights: the `weight` of each source as the recipe has it now; None: as it was when the data were prepared.

    Raises:
        WrongInput: the columns are missing or torn, or there is not one row.
    """
    rows = Rows(columns, read_prepared(columns), split, seq_len, pad_last=pad_last, weights=weights)
    if not len(rows):
        raise WrongInput(f"{columns} has {rows.tokens:,} {split} tokens, not one row of data.seq_len={seq_len}; lower it or add documents")
    return rows


class Rows:
    """Random access to the rows of one split; row ids count through the sources. Safe to read from several threads."""

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

    def __init__(
        self, columns: Path, prepared: Prepared, split: Split, seq_len: int, *, pad_last: bool, weights: Sequence[float] | None = None
    ) -> None:
        sources = prepared.splits[split]
        self.seq_len = seq_len
        self.fingerprint, self.set_fingerprint, self.tokenizer = prepared.data, prepared.sets[split], prepared.tokenizer
        self.documents, self.tokens, self.bytes = (prepared.total(split, what) for what in ("documents", "tokens", "bytes"))
        self.sizes = [-(-source.tokens // seq_len) if pad_last else source.tokens // seq_len for source in sources]
        given = [source.weight for source in sources] if weights is None else list(weights)
        if len(given) != len(sources):
            raise WrongInput(f"{columns} was prepared from {len(sources)} sources, the recipe has {len(given)}; run `ingot prepare` again")
        self.weights = None if len(given) == 1 or all(weight == 1.0 for weight in given) else given
        self._streams = [_Stream(columns, source.parts) for source in sources]
        self._ends = list(itertools.accumulate(self.sizes))

    def __len__(self) -> int:
        return self._ends[-1]

    @property
    def left_out(self) -> int:
        """Tokens at the ends of sources that are in no row."""
        return max(0, self.tokens - len(self) * self.seq_len)

    def row(self, i: int) -> Row:
        """Row `i`. Raises IndexError beyond the last one."""
        if not 0 <= i < len(self):
            raise IndexError(f"row {i} of {len(self)}")
        source = bisect.bisect_right(self._ends, i)
        number = i - (self._ends[source] - self.sizes[source])
        stream, starts = self._streams[source].read(number * self.seq_len, self.seq_len + 1)
        return _cut(stream, starts, self.seq_len)


def _cut(stream: Ids, starts: Ids, length: int) -> Row:
    """A row from `length` + 1 tokens of the stream (fewer at its end) and the places in them where documents begin."""
    size = min(len(stream), length)
    row = Row(*(np.full(length, fill, np.int64) for fill in (0, IGNORE, 0, 0)))
    row.tokens[:size] = stream[:size]
    row.labels[: len(stream) - 1] = stream[1:]
    # A document's last token has no next one, neither here nor at the end of the row. Empty documents begin where the next does.
    inner = starts[starts > 0]
    inner = inner[np.diff(inner, prepend=0) > 0]
    row.labels[inner - 1] = IGNORE
    inner = inner[inner < size]
    edges = np.concatenate(([0], inner, [size]))
    lengths = np.diff(edges)
    row.positions[:size] = np.arange(size) - np.repeat(edges[:-1], lengths)
    row.segments[:size] = np.repeat(np.arange(1, len(edges)), lengths)
    return row


@dataclass
class _Stream:
    """All tokens of a source's parts one after the other, memory-mapped part by part when first touched."""

    columns: Path
    parts: Sequence[Part]

    def __post_init__(self) -> None:
        self._ends = list(itertools.accumulate(part.tokens for part in self.parts))
        self._open: dict[int, Column] = {}

    def read(self, begin: int, count: int) -> tuple[Ids, Ids]:
        """Up to `count` tokens from `begin` on, and where among them documents begin."""
        end = min(begin + count, self._ends[-1] if self._ends else 0)
        tokens, starts, done = np.empty(end - begin, np.int64), list[Ids](), 0
        number = bisect.bisect_right(self._ends, begin)
        while begin + done < end:
            first = self._ends[number] - self.parts[number].tokens
            low, high = begin + done - first, min(end, self._ends[number]) - first
            column = self._column(number)
            tokens[done : done + high - low] = column.slice(low, high)
            starts.append(column.starts(low, high) - low + done)
            done, number = done + high - low, number + 1
        return tokens, starts[0] if len(starts) == 1 else np.concatenate(starts)

    def _column(self, number: int) -> Column:
        column = self._open.get(number)
        if column is None:
            part = self.parts[number]
            column = Column(self.columns / part.path)
            if (len(column), column.elements) != (part.documents, part.tokens):
                raise WrongInput(
                    f"{self.columns / part.path} has {len(column):,} documents and {column.elements:,} tokens, manifest.json says "
                    f"{part.documents:,} and {part.tokens:,}; run `ingot prepare` again"
                )
            self._open[number] = column
        return column
