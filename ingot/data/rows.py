"""Rows of `seq_len` tokens made from prepared columns when they are asked for. Holds offsets of parts, never of documents."""

from __future__ import annotations

import bisect
import itertools
import queue
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ingot.base.errors import WrongInput
from ingot.data.columns import Column, bin_path, column_prefix, idx_path, token_dtype
from ingot.data.manifest import MANIFEST, Part, Prepared, read_prepared
from ingot.data.packing import MASK, marker_name, read_packed
from ingot.data.sources import Split

IGNORE = -100
"""The label of a position that no loss is taken at."""

BLOCK_TOKENS = 32_768
"""How many tokens are worked on at once: what is needed beside the result stays in the processor's cache."""

Ids = npt.NDArray[np.int64]


class Row(NamedTuple):
    """One row, four arrays [T], or several of them, [B, T].

    labels: the next token, or -100 where that belongs to another document or to none, or where its mask says that it is not
    to be learnt. segments: number of the document within the row from 1, 0 where the row is padding. positions: count from 0
    at each document's first token in the row.
    """

    tokens: Ids
    labels: Ids
    positions: Ids
    segments: Ids


def open_rows(
    columns: Path, split: Split, seq_len: int, *, pad_last: bool, pack: str = "cut", weights: Sequence[float] | None = None
) -> Rows:
    """The rows of a split. Costs the same for any size: sizes of files are checked, nothing is read.

    Args:
        pack: `cut` cuts the stream of all documents; `best_fit` and `none` are rows that `packing.pack` has planned.
        pad_last: for `cut`, keep the last row of a source, which is not full, and fill it up; else it is left out.
        weights: the `weight` of each source as the recipe has it now; None: as it was when the data were prepared.

    Raises:
        WrongInput: the columns are missing or torn, rows were not planned, or there is not one row.
    """
    rows = Rows(columns, read_prepared(columns), split, seq_len, pad_last=pad_last, pack=pack, weights=weights)
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
    left_out: int
    """Tokens that are in no row."""
    markers: list[str]
    """The files in `columns` that vouch for all parts."""
    touched: queue.SimpleQueue[Path | None]
    """Every file of a part that was opened, for who wants to look at its checksum."""

    def __init__(
        self, columns: Path, prepared: Prepared, split: Split, seq_len: int, *, pad_last: bool, pack: str = "cut",
        weights: Sequence[float] | None = None,
    ) -> None:
        sources = prepared.splits[split]
        self.columns, self.seq_len = columns, seq_len
        self.markers = [MANIFEST] if pack == "cut" else [MANIFEST, marker_name(pack, seq_len)]
        self.touched = queue.SimpleQueue()
        self.fingerprint, self.set_fingerprint, self.tokenizer = prepared.data, prepared.sets[split], prepared.tokenizer
        self.documents, self.tokens, self.bytes = (prepared.total(split, what) for what in ("documents", "tokens", "bytes"))
        given = [source.weight for source in sources] if weights is None else list(weights)
        if len(given) != len(sources):
            raise WrongInput(f"{columns} was prepared from {len(sources)} sources, the recipe has {len(given)}; run `ingot prepare` again")
        self.weights = None if len(given) == 1 or all(weight == 1.0 for weight in given) else given
        self._masked = MASK in [column["name"] for column in prepared.columns]
        self._dtype = token_dtype(prepared.vocab_size)
        self._sources: list[_Stream] | list[_Table]
        if pack == "cut":
            if self._masked:
                raise WrongInput(f"{columns} holds chats, which data.pack=cut would cut apart; set it to best_fit or none")
            self.sizes = [-(-source.tokens // seq_len) if pad_last else source.tokens // seq_len for source in sources]
            self._sources = [_Stream(_Opening(columns, split, self._dtype, self.touched), source.parts) for source in sources]
            self.left_out = max(0, self.tokens - sum(self.sizes) * seq_len)
        else:
            packed = read_packed(columns, prepared, seq_len, pack)
            self.sizes = [sum(parts) for parts in packed.rows[split]]
            self._sources = [
                _Table(_Opening(columns, split, self._dtype, self.touched), source.parts, f"rows-{pack}-{seq_len}", rows, masked=self._masked)
                for source, rows in zip(sources, packed.rows[split], strict=True)
            ]
            self.left_out = self.tokens - packed.counts[split].tokens
        self._ends = list(itertools.accumulate(self.sizes))

    def __len__(self) -> int:
        return self._ends[-1]

    def row(self, i: int) -> Row:
        """Row `i`, [T]. Raises IndexError beyond the last one."""
        return Row(*(field[0] for field in self.batch([i])))

    def batch(self, ids: Sequence[int], out: Ids | None = None) -> Row:
        """The rows `ids`, [B, T]. What costs something is done for many of them at once.

        Args:
            out: [4, B, T] to fill, each of the four contiguous, for who asks again and again: fresh memory costs the system more than rows do.

        Raises:
            IndexError: an id is beyond the last row.
            WrongInput: a part is not the one that was prepared.
        """
        made = np.empty((4, len(ids), self.seq_len), np.int64) if out is None else out
        step = max(1, BLOCK_TOKENS // self.seq_len)
        for first in range(0, len(ids), step):
            some = ids[first : first + step]
            draft = _Draft(len(some), self.seq_len, self._dtype, masked=self._masked)
            for place, i in enumerate(some):
                if not 0 <= i < len(self):
                    raise IndexError(f"row {i} of {len(self)}")
                source = bisect.bisect_right(self._ends, i)
                self._sources[source].fill(draft, place, i - (self._ends[source] - self.sizes[source]))
            draft.finish(Row(*made[:, first : first + step]))
        return Row(*made)


class _Draft:
    """Rows under way. A row is T + 1 elements of the stream, as the label of its last token is the one after it.

    `cuts` are the places in those, counted through all rows, at which a document begins, or padding: the first of each row,
    too, and ascending. So what stands before one has no label.
    """

    def __init__(self, size: int, length: int, dtype: np.dtype[Any], *, masked: bool) -> None:
        self.size, self.length = size, length
        self.stream = np.empty((size, length + 1), dtype)
        self.mask = np.zeros((size, length + 1), np.uint8) if masked else None
        self.cuts: list[int] = []
        self._padding: list[int] = []
        self._after: list[tuple[int, int]] = []

    def pad(self, row: int, begin: int) -> None:
        """Nothing follows in `row` from `begin` on."""
        self.cuts.append(row * (self.length + 1) + begin)
        if begin < self.length:
            self._padding.append(row * self.length + begin)

    def label(self, row: int, place: int, token: int) -> None:
        """The document of the token before `place` goes on with `token` in another row."""
        self._after.append((row * self.length + place - 1, token))

    def finish(self, out: Row) -> None:
        """Write all rows to `out`."""
        size, length = self.size, self.length
        tokens, labels, positions, segments = (field.reshape(-1) for field in out)
        np.copyto(out.tokens, self.stream[:, :-1])
        np.copyto(out.labels, self.stream[:, 1:])
        if self.mask is not None:
            np.putmask(out.labels, self.mask[:, 1:] == 0, IGNORE)
        cuts = np.array(self.cuts)
        # Empty documents begin where the next one does.
        row, place = np.divmod(cuts[np.diff(cuts, prepend=-1) > 0], length + 1)
        labels[(row * length + place - 1)[place > 0]] = IGNORE
        for at, token in self._after:
            labels[at] = token
        inside = place < length
        row, place = row[inside], place[inside]
        begins = row * length + place
        lengths = np.diff(begins, append=size * length)
        count = np.arange(len(row))
        numbers = count - np.maximum.accumulate(np.where(place == 0, count, 0)) + 1
        numbers[np.searchsorted(begins, self._padding)] = 0
        np.subtract(np.arange(size * length), np.repeat(begins, lengths), out=positions)
        segments[:] = np.repeat(numbers, lengths)
        if self._padding:
            padding = np.flatnonzero(segments == 0)
            tokens[padding], labels[padding], positions[padding] = 0, IGNORE, 0


class _Opening(NamedTuple):
    """What is the same for all parts of a split. `touched` is told every file that is opened."""

    columns: Path
    split: Split
    dtype: np.dtype[Any]
    touched: queue.SimpleQueue[Path | None]


class _Parts:
    """The parts of a source, memory-mapped one by one when first touched."""

    def __init__(self, opening: _Opening, parts: Sequence[Part], sizes: Sequence[int]) -> None:
        self._opening, self._parts = opening, parts
        self._sizes, self._ends = sizes, list(itertools.accumulate(sizes))
        self._open: dict[tuple[str, int], Column] = {}

    def column(self, name: str, index: int) -> Column:
        column = self._open.get((name, index))
        if column is None:
            column = self._open[name, index] = self._opened(name, index)
        return column

    def _opened(self, name: str, index: int) -> Column:
        part = self._parts[index]
        column = Column(column_prefix(self._opening.columns, self._opening.split, name, part.number))
        dtype = np.dtype("int64" if name.startswith("rows-") else "uint8" if name == MASK else self._opening.dtype)
        if column.dtype != dtype:
            raise WrongInput(f"{bin_path(column.prefix)} holds {column.dtype}, manifest.json says {dtype}; run `ingot prepare` again")
        rows = name.startswith("rows-")
        found, wanted = (len(column), column.elements), (part.documents, part.tokens)
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


class _Stream(_Parts):
    """All tokens of a source one after the other, cut every `length` tokens."""

    def __init__(self, opening: _Opening, parts: Sequence[Part]) -> None:
        super().__init__(opening, parts, [part.tokens for part in parts])

    def fill(self, draft: _Draft, row: int, number: int) -> None:
        """Make row `number` of this source row `row` of the draft."""
        begin, done = number * draft.length, 0
        wanted = min(draft.length + 1, self._ends[-1] - begin)
        index = bisect.bisect_right(self._ends, begin)
        base = row * (draft.length + 1)
        draft.cuts.append(base)
        line = draft.stream[row]
        while done < wanted:
            column = self.column("tokens", index)
            low = begin + done - (self._ends[index] - self._sizes[index])
            high = min(low + wanted - done, self._sizes[index])
            line[done : done + high - low] = column.slice(low, high)
            shift = base + done - low
            draft.cuts += [start + shift for start in column.starts(low, high)]
            done, index = done + high - low, index + 1
        if done <= draft.length:
            draft.pad(row, done)


class _Table(_Parts):
    """Rows of a source that were planned: each says which pieces of which records lie in it."""

    def __init__(self, opening: _Opening, parts: Sequence[Part], table: str, rows: Sequence[int], *, masked: bool) -> None:
        super().__init__(opening, parts, rows)
        self._table, self._masked = table, masked

    def fill(self, draft: _Draft, row: int, number: int) -> None:
        """Make row `number` of this source row `row` of the draft."""
        index = bisect.bisect_right(self._ends, number)
        table, tokens = self.column(self._table, index), self.column("tokens", index)
        mask = self.column(MASK, index) if self._masked else None
        pieces = table[number - (self._ends[index] - self._sizes[index])].tolist()
        base, place, line = row * (draft.length + 1), 0, draft.stream[row]
        for record, begin, size in zip(pieces[::3], pieces[1::3], pieces[2::3], strict=True):
            first, length = tokens.span(record)
            end = place + size
            if end > draft.length or begin < 0 or size < 1 or begin + size > length:
                raise WrongInput(f"{bin_path(table.prefix)} plans row {number} of what is not there; it is damaged, run `ingot prepare` again")
            draft.cuts.append(base + place)
            line[place:end] = tokens.slice(first + begin, first + begin + size)
            if mask is not None and draft.mask is not None:
                draft.mask[row, place:end] = mask.slice(first + begin, first + begin + size)
            elif begin + size < length:
                # Of a document that was split, the first token of the next piece is what the last one of this piece predicts.
                draft.label(row, end, int(tokens.slice(first + begin + size, first + begin + size + 1)[0]))
            place = end
        draft.pad(row, place)
