"""Samples of preferences, rated answers, pairs and labelled texts, made from prepared columns on
demand: one record each.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ingot.base.errors import WrongInput
from ingot.config.sections.data import COLUMNS
from ingot.data.columns.column import Column, bin_path
from ingot.data.columns.manifest import LABEL, MASK, ColumnPart, PreparedData
from ingot.data.columns.reader import IGNORE, Ids, PartReader, PreparedSplit, SplitFiles
from ingot.data.packing.tables import read_packed, table_name
from ingot.data.splits import Split

MULTIPLE = 16
"""Samples are padded to the longest one, rounded up to this many ids: few distinct shapes and
little padding.
"""


GOLDEN = 0.381966
"""A share that is far from all small fractions."""
SIDES = ("chosen", "rejected")


class SampleArrays(NamedTuple):
    """Some samples, int64. tokens, positions, segments: [R, S], where S is the length of the
    longest, rounded up.

    segments: 1 where there is a token, 0 where there is padding; positions: count from 0; both and
    tokens are 0 in padding.
    labels: of preferences the next token where it is trained, else -100, [R, S]; of pairs the
    target, not shifted, -100 behind its end, [R, T]; of labelled texts the class, [R]. A preference
    is two rows: 2i is the chosen side of sample i, 2i + 1 the rejected one. So is a rated answer:
    2i is itself, 2i + 1 its prompt with the answer of another record (`_SampleSource.other`).
    """

    tokens: Ids
    labels: Ids
    positions: Ids
    segments: Ids


class Samples(PreparedSplit):
    """Random access to the samples of one split, numbered across the sources. Safe to read from
    several threads.
    """

    _sources: Sequence[_SampleSource]

    def __init__(
        self,
        columns: Path,
        prepared: PreparedData,
        split: Split,
        seq_len: int,
        *,
        pack: str,
        weights: Sequence[float] | None = None,
        target_len: int,
    ) -> None:
        self.kind, self.target_len = prepared.documents, target_len
        own = target_len if self.kind == "pair" else None
        table = table_name(pack, seq_len, own)
        super().__init__(columns, prepared, split, seq_len, table, weights)
        if pack.partition("-")[0] != "none":
            raise WrongInput(
                f"{columns} holds a {self.kind} in each record, which data.pack={pack} cannot put"
                " side by side; set it to none"
            )
        packed = read_packed(columns, prepared, seq_len, pack, own)
        self._closing = prepared.closing
        self._sources = [
            _SampleSource(self._opening, source.parts, table, rows)
            for source, rows in zip(prepared.splits[split], packed.rows[split], strict=True)
        ]
        self._sized(packed.rows[split])
        self.left_out = self.tokens - packed.counts[split].tokens

    def fields(self, ids: Sequence[int], count: int | None = None) -> SampleArrays:
        """The samples `ids`, then dummy samples up to `count`: padding only, labels -100.

        Raises:
            IndexError: an id is beyond the last sample.
            WrongInput: a part is not the one that was prepared.
        """
        count = len(ids) if count is None else count
        found = [self._record(i) for i in ids]
        if self.kind == "preference":
            sides = [(record[name], record[f"{name}_{MASK}"]) for record in found for name in SIDES]
            return self._answers(sides, count)
        if self.kind == "rated":
            answers = [(record["answer"], record[f"answer_{MASK}"]) for record in found]
            others = [self._record(i, other=True) for i in ids]
            mixed = [
                mismatched(*own, other["answer"], other[f"answer_{MASK}"])
                for own, other in zip(answers, others, strict=True)
            ]
            both = [row for pair in zip(answers, mixed, strict=True) for row in pair]
            return self._answers(both, count)
        first = "source" if self.kind == "pair" else "tokens"
        tokens, live = padded(
            [_truncated(record[first], self.seq_len, self._closing) for record in found],
            count,
            self.seq_len,
            0,
        )
        if self.kind == "pair":
            labels = padded(
                [_truncated(record["target"], self.target_len, self._closing) for record in found],
                count,
                self.target_len,
                IGNORE,
            )[0]
        else:
            labels = np.full(count, IGNORE, np.int64)
            labels[: len(found)] = [int(record[LABEL][0]) for record in found]
        return _fields(tokens, labels, live)

    def ratings(self, ids: Sequence[int], count: int) -> Ids:
        """Of the rated answers `ids` 1 where one is good, else 0; then 0 up to `count`. Of other
        kinds of samples there is none, `[0]`.
        """
        if self.kind != "rated":
            return np.empty(0, np.int64)
        made = np.zeros(count, np.int64)
        made[: len(ids)] = [int(self._record(i)[LABEL][0]) for i in ids]
        return made

    def _answers(self, rows: Sequence[tuple[Ids, Ids]], count: int) -> SampleArrays:
        """Rows of ids and their masks, two for each of `count` samples."""
        tokens, live = padded([ids[: self.seq_len] for ids, _ in rows], 2 * count, self.seq_len, 0)
        mask, _ = padded([mask[: self.seq_len] for _, mask in rows], 2 * count, self.seq_len, 0)
        labels = np.full_like(tokens, IGNORE)
        np.copyto(labels[:, :-1], tokens[:, 1:], where=mask[:, 1:] == 1)
        return _fields(tokens, labels, live)

    def _record(self, i: int, *, other: bool = False) -> dict[str, Ids]:
        if not 0 <= i < len(self):
            raise IndexError(f"row {i} of {len(self)}")
        source = bisect.bisect_right(self._ends, i)
        number = i - (self._ends[source] - self.sizes[source])
        found = self._sources[source]
        return found.record(found.other(number) if other else number, COLUMNS[self.kind])


class _SampleSource(PartReader):
    """The records of a source that its row tables list."""

    def __init__(
        self, opening: SplitFiles, parts: Sequence[ColumnPart], table: str, rows: Sequence[int]
    ) -> None:
        super().__init__(opening, parts, rows)
        self._table = table

    def other(self, number: int) -> int:
        """The row whose answer is put behind the prompt of row `number`: another one of the same
        part, as far apart for all. The distance is neither 1 nor half of the rows, so that the
        answers to one prompt, side by side or in two halves, do not meet.
        """
        index = bisect.bisect_right(self._ends, number)
        first, size = self._ends[index] - self._sizes[index], self._sizes[index]
        return first + (number - first + max(1, round(GOLDEN * size))) % size

    def record(self, number: int, names: Sequence[str]) -> dict[str, Ids]:
        """The columns `names` of the record that is row `number` of this source."""
        index = bisect.bisect_right(self._ends, number)
        table = self.column(self._table, index)
        piece = table[number - (self._ends[index] - self._sizes[index])]
        if len(piece) != 3:
            raise self._damaged(table, number)
        columns = [self.column(name, index) for name in names]
        found = {
            # Of a prompt that is too long the first ids may be cut off.
            name: column[int(piece[0])][0 if name == LABEL else int(piece[1]) :]
            for name, column in zip(names, columns, strict=True)
            if 0 <= piece[0] < len(column)
        }
        if len(found) < len(names) or any(not len(values) for values in found.values()):
            raise self._damaged(table, number)
        return found

    def _damaged(self, table: Column, number: int) -> WrongInput:
        return WrongInput(
            f"{bin_path(table.prefix)} plans row {number} of what is not there; it is damaged, run"
            " `ingot prepare` again"
        )


def mismatched(ids: Ids, mask: Ids, other: Ids, other_mask: Ids) -> tuple[Ids, Ids]:
    """The prompt of one answered chat, which is what stands before its first trained token, with
    the answer of another: ids and mask.
    """
    begin, from_there = int(np.argmax(mask != 0)), int(np.argmax(other_mask != 0))
    return (
        np.concatenate((ids[:begin], other[from_there:])),
        np.concatenate((mask[:begin], other_mask[from_there:])),
    )


def _truncated(ids: Ids, most: int, closing: int) -> Ids:
    """Truncate ids to `most`, keeping the last `closing` ids at the end."""
    if len(ids) <= most:
        return ids
    last = min(closing, most)
    return np.concatenate((ids[: most - last], ids[len(ids) - last :]))


def padded(rows: Sequence[Ids], count: int, most: int, fill: int) -> tuple[Ids, Ids]:
    """Pad the rows to one length of at most `most` and to `count` rows with `fill`; returns the
    rows and the length of each, [count].
    """
    longest = max((len(row) for row in rows), default=0)
    width = min(max(-(-longest // MULTIPLE), 1) * MULTIPLE, most)
    made = np.full((count, width), fill, np.int64)
    live = np.zeros(count, np.int64)
    for place, row in enumerate(rows):
        made[place, : len(row)] = row
        live[place] = len(row)
    return made, live


def _fields(tokens: Ids, labels: Ids, live: Ids) -> SampleArrays:
    """Add positions and segments to rows whose first `live` ids are not padding."""
    place = np.arange(tokens.shape[1])
    there = place < live[:, None]
    return SampleArrays(tokens, labels, np.where(there, place, 0), there.astype(np.int64))
