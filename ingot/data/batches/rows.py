"""Rows of `seq_len` tokens, made from prepared columns on demand. Memory holds offsets of parts,
not of documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ingot.base.errors import WrongInput
from ingot.data.batches.hiding import Hiding
from ingot.data.batches.samples import RowArrays, Samples
from ingot.data.columns.column import bin_path, token_dtype
from ingot.data.columns.manifest import MASK, ColumnPart, PreparedData, read_prepared
from ingot.data.columns.reader import IGNORE, Ids, PartReader, PreparedSplit, SplitFiles, placed
from ingot.data.packing.tables import ONE_PER_ROW, read_packed, table_name
from ingot.data.splits import Split

__all__ = ["BLOCK_TOKENS", "IGNORE", "Ids", "Rows", "Samples", "open_rows"]

BLOCK_TOKENS = 32_768
"""Tokens processed at once, so that temporary arrays stay in the processor's cache."""


def open_rows(
    columns: Path,
    split: Split,
    seq_len: int,
    *,
    pad_last: bool,
    pack: str = "cut",
    weights: Sequence[float] | None = None,
    target_len: int = 128,
    by_part: bool = False,
    hiding: Hiding | None = None,
) -> Rows | Samples:
    """The rows of a split: `Rows` for texts and chats, `Samples` for other kinds. The cost does not
    depend on the data's size: file sizes are checked, nothing is read.

    Args:
        pack: `cut` cuts the stream of all documents; `best_fit` and `none` use rows planned by
            `packing.pack`.
        target_len: tokens in the target of a pair.
        pad_last: with `cut`, keep the incomplete last row of a source and pad it; otherwise it is
            dropped.
        weights: the `weight` of each source in the current recipe; None: as at `prepare`.
        by_part: with `cut`, let no row span two parts; the incomplete last row of a part is
            dropped.
        hiding: what is hidden of masked texts.

    Raises:
        WrongInput: the columns are missing or damaged, rows were not planned, or there is not one
            row.
    """
    prepared = read_prepared(columns)
    rows: Rows | Samples
    if prepared.documents in ONE_PER_ROW:
        rows = Samples(
            columns,
            prepared,
            split,
            seq_len,
            pack=pack,
            weights=weights,
            target_len=target_len,
            hiding=hiding,
        )
    else:
        rows = Rows(
            columns,
            prepared,
            split,
            seq_len,
            pad_last=pad_last,
            pack=pack,
            weights=weights,
            by_part=by_part,
        )
    if not len(rows):
        raise WrongInput(f"{columns}{_why_none(rows, split, seq_len, pack)}")
    return rows


def _why_none(rows: Rows | Samples, split: Split, seq_len: int, pack: str) -> str:
    """Why there is not one row, and the next step."""
    if isinstance(rows, Samples):
        return (
            f": of {rows.documents:,} {split} documents none can be learnt from with"
            f" data.seq_len={seq_len}; raise it or add documents"
        )
    way = "lower it or add documents"
    if pack != "cut" and rows.tokens:
        way = "within it nothing that is trained remains of any document; raise it"
    return f" has {rows.tokens:,} {split} tokens, not one row of data.seq_len={seq_len}; {way}"


class Rows(PreparedSplit):
    """Random access to the rows of one split. Safe to read from several threads."""

    _sources: Sequence[_StreamSource | _PartwiseSource | _PlannedSource]

    def __init__(
        self,
        columns: Path,
        prepared: PreparedData,
        split: Split,
        seq_len: int,
        *,
        pad_last: bool,
        pack: str = "cut",
        weights: Sequence[float] | None = None,
        by_part: bool = False,
    ) -> None:
        table = None if pack == "cut" else table_name(pack, seq_len)
        super().__init__(columns, prepared, split, seq_len, table, weights)
        sources, opening = prepared.splits[split], self._opening
        self._masked = MASK in prepared.names
        self._dtype = token_dtype(prepared.vocab_size)
        if table is None:
            if self._masked:
                raise WrongInput(
                    f"{columns} holds chats, which data.pack=cut would cut apart; set it to"
                    " best_fit or none"
                )
            if by_part:
                self._sized(
                    [[part.tokens // seq_len for part in source.parts] for source in sources]
                )
                self._sources = [
                    _PartwiseSource(opening, source.parts, rows)
                    for source, rows in zip(sources, self.part_rows, strict=True)
                ]
            else:
                self._sized(
                    [
                        [-(-source.tokens // seq_len) if pad_last else source.tokens // seq_len]
                        for source in sources
                    ]
                )
                self._sources = [_StreamSource(opening, source.parts) for source in sources]
            self.left_out = max(0, self.tokens - sum(self.sizes) * seq_len)
        else:
            packed = read_packed(columns, prepared, seq_len, pack)
            self._sized(packed.rows[split])
            self._sources = [
                _PlannedSource(opening, source.parts, table, rows, masked=self._masked)
                for source, rows in zip(sources, packed.rows[split], strict=True)
            ]
            self.left_out = self.tokens - packed.counts[split].tokens

    def row(self, i: int) -> RowArrays:
        """Row `i`, [T]. Raises IndexError beyond the last one."""
        return RowArrays(*(field[0] for field in self.batch([i])))

    def batch(self, ids: Sequence[int], out: Ids | None = None) -> RowArrays:
        """The rows `ids`, [B, T], computed in blocks.

        Args:
            out: [4, B, T] to fill, each of the four contiguous; reusing memory is faster than
                allocating it.

        Raises:
            IndexError: an id is beyond the last row.
            WrongInput: a part is not the one that was prepared.
        """
        made = np.empty((4, len(ids), self.seq_len), np.int64) if out is None else out
        step = max(1, BLOCK_TOKENS // self.seq_len)
        for first in range(0, len(ids), step):
            some = ids[first : first + step]
            draft = _RowBuffer(len(some), self.seq_len, self._dtype, masked=self._masked)
            for place, i in enumerate(some):
                source, number = self._at(i)
                self._sources[source].fill(draft, place, number)
            draft.finish(RowArrays(*made[:, first : first + step]))
        return RowArrays(*made)


class _RowBuffer:
    """Rows being filled. A row takes T + 1 elements of the stream: the label of its last token is
    the element after it.

    `cuts` are the places, counted across all rows of T + 1 elements and ascending, at which a
    document or padding begins; they include the start of each row. The token before a cut has no
    label.
    """

    def __init__(self, size: int, length: int, dtype: np.dtype[Any], *, masked: bool) -> None:
        self.size, self.length = size, length
        self.stream = np.empty((size, length + 1), dtype)
        self.mask = np.zeros((size, length + 1), np.uint8) if masked else None
        self.cuts: list[int] = []
        self._padding: list[int] = []
        self._after: list[tuple[int, int]] = []

    def pad(self, row: int, begin: int) -> None:
        """Mark `row` as padding from `begin` on."""
        self.cuts.append(row * (self.length + 1) + begin)
        if begin < self.length:
            self._padding.append(row * self.length + begin)

    def label(self, row: int, place: int, token: int) -> None:
        """Set the label of the token before `place` to `token`, since its document continues in
        another row.
        """
        self._after.append((row * self.length + place - 1, token))

    def finish(self, out: RowArrays) -> None:
        """Write all rows to `out`."""
        size, length = self.size, self.length
        tokens, labels, positions, segments = (field.reshape(-1) for field in out)
        np.copyto(out.tokens, self.stream[:, :-1])
        np.copyto(out.labels, self.stream[:, 1:])
        if self.mask is not None:
            np.putmask(out.labels, self.mask[:, 1:] == 0, IGNORE)
        cuts = np.array(self.cuts)
        # An empty document begins where the next one does.
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


class _StreamSource(PartReader):
    """All tokens of a source as one stream, cut every `length` tokens."""

    def __init__(self, opening: SplitFiles, parts: Sequence[ColumnPart]) -> None:
        super().__init__(opening, parts, [part.tokens for part in parts])

    def fill(self, draft: _RowBuffer, row: int, number: int) -> None:
        """Write row `number` of this source into row `row` of the draft."""
        begin, done = number * draft.length, 0
        wanted = min(draft.length + 1, self._ends[-1] - begin)
        index, low = placed(self._ends, begin)
        base = row * (draft.length + 1)
        draft.cuts.append(base)
        line = draft.stream[row]
        while done < wanted:
            column = self.column("tokens", index)
            high = min(low + wanted - done, self._sizes[index])
            line[done : done + high - low] = column.slice(low, high)
            shift = base + done - low
            draft.cuts += [start + shift for start in column.starts(low, high)]
            done, index, low = done + high - low, index + 1, 0
        if done <= draft.length:
            draft.pad(row, done)


class _PartwiseSource(PartReader):
    """The tokens of each part cut every `length` tokens: no row spans two parts."""

    def fill(self, draft: _RowBuffer, row: int, number: int) -> None:
        """Write row `number` of this source into row `row` of the draft."""
        index, place = placed(self._ends, number)
        low, base = place * draft.length, row * (draft.length + 1)
        column = self.column("tokens", index)
        high = min(low + draft.length + 1, column.elements)
        draft.stream[row][: high - low] = column.slice(low, high)
        draft.cuts += [base, *(start + base - low for start in column.starts(low, high))]
        if high - low <= draft.length:
            draft.pad(row, high - low)


class _PlannedSource(PartReader):
    """The planned rows of a source: a row table lists the pieces of records in each row."""

    def __init__(
        self,
        opening: SplitFiles,
        parts: Sequence[ColumnPart],
        table: str,
        rows: Sequence[int],
        *,
        masked: bool,
    ) -> None:
        super().__init__(opening, parts, rows)
        self._table, self._masked = table, masked

    def fill(self, draft: _RowBuffer, row: int, number: int) -> None:
        """Write row `number` of this source into row `row` of the draft."""
        index, planned = placed(self._ends, number)
        table, tokens = self.column(self._table, index), self.column("tokens", index)
        mask = self.column(MASK, index) if self._masked else None
        pieces = table[planned].tolist()
        base, place, line = row * (draft.length + 1), 0, draft.stream[row]
        for record, begin, size in zip(pieces[::3], pieces[1::3], pieces[2::3], strict=True):
            first, length = tokens.span(record)
            end = place + size
            if end > draft.length or begin < 0 or size < 1 or begin + size > length:
                raise WrongInput(
                    f"{bin_path(table.prefix)} plans row {number} of what is not there; it is"
                    " damaged, run `ingot prepare --again`"
                )
            draft.cuts.append(base + place)
            line[place:end] = tokens.slice(first + begin, first + begin + size)
            if mask is not None and draft.mask is not None:
                draft.mask[row, place:end] = mask.slice(first + begin, first + begin + size)
            elif begin + size < length:
                # In a split document, the label of a piece's last token is the first token of the
                # next piece.
                draft.label(
                    row, end, int(tokens.slice(first + begin + size, first + begin + size + 1)[0])
                )
            place = end
        draft.pad(row, place)
