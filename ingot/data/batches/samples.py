"""Samples of preferences, rated answers, pairs, labelled texts and masked texts, made from prepared
columns on demand: one record, or one piece of a masked text, each.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ingot.base.errors import WrongInput
from ingot.config.sections.data import COLUMNS
from ingot.data.batches.hiding import Hiding
from ingot.data.columns.column import Column, bin_path
from ingot.data.columns.manifest import LABEL, MASK, ColumnPart, PreparedData
from ingot.data.columns.reader import IGNORE, Ids, PartReader, PreparedSplit, SplitFiles, placed
from ingot.data.documents.preferences import SIDES
from ingot.data.packing.tables import read_packed, table_name
from ingot.data.splits import Split

MULTIPLE = 16
"""Samples are padded to the longest one, rounded up to this many ids: few distinct shapes and
little padding.
"""


GOLDEN = 0.381966
"""A share that is far from all small fractions."""
(BODY,) = COLUMNS["masked"]


class RowArrays(NamedTuple):
    """Some rows, int64. tokens, positions, segments: [R, S], where S is `seq_len` in packed rows of
    texts and chats, and in samples of other kinds the length of the longest, rounded up.

    segments: the number of the document, or of the piece of a masked text, within the row from 1;
    0 in padding. positions: count from 0 at the first token of each in the row; 0 in padding of
    samples, as tokens are.
    labels: of texts, chats and preferences the next token where it is of the same document and is
    trained, else -100, [R, S]; of pairs the target, not shifted, -100 behind its end, [R, T]; of
    labelled texts the class, [R]; of masked texts the tokens that are asked for, not shifted, else
    -100, [R, S], or the hidden spans as the target of a pair, [R, T].
    A preference is two rows: 2i is the chosen side of sample i, 2i + 1 the rejected one. So is a
    rated answer: 2i is itself, 2i + 1 its prompt with the answer of another record
    (`_SampleSource.other`).
    """

    tokens: Ids
    labels: Ids
    positions: Ids
    segments: Ids


class AlikeRatings(NamedTuple):
    """What held-out answers of one rating alone do not tell, and why, in words."""

    untold: tuple[str, ...]
    why: str


def alike_ratings(ratings: npt.NDArray[Any], held_out: int = 0) -> AlikeRatings | None:
    """None where there are good and bad ones: the loss is that of the good ones, and the accuracy
    compares both. `held_out`: of how many answers these are the first, if they are not all.
    """
    good = np.count_nonzero(ratings)
    if 0 < good < len(ratings):
        return None
    which, are = ("all", "are") if good else ("none", "is")
    first, mend = "", "give data.validation good and bad ones"
    if len(ratings) < held_out:
        first, mend = "first ", "raise train.evaluate_rows, or mix good and bad ones"
    return AlikeRatings(
        ("accuracy",) if good else ("loss", "perplexity", "bits_per_byte", "accuracy"),
        f"{which} of the {first}{len(ratings):,} held-out rated answers {are} good; {mend}",
    )


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
        hiding: Hiding | None = None,
    ) -> None:
        self.kind, self.target_len, self._hiding = prepared.documents, target_len, hiding
        self.writes = self.kind == "pair" or (hiding is not None and hiding.writes)
        own = target_len if self.kind == "pair" else None
        table = table_name(pack, seq_len, own)
        super().__init__(columns, prepared, split, seq_len, table, weights)
        if pack.partition("-")[0] != "none" and self.kind != "masked":
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

    def fields(
        self, ids: Sequence[int], count: int | None = None, places: Sequence[int] | None = None
    ) -> RowArrays:
        """The samples `ids`, then dummy samples up to `count`: padding only, labels -100.

        Args:
            places: where each stands in the sequence of training samples, which decides about the
                tokens that are hidden; None for held-out ones, in which they are always the same.

        Raises:
            IndexError: an id is beyond the last sample.
            WrongInput: a part is not the one that was prepared.
        """
        count = len(ids) if count is None else count
        if self.kind == "masked":
            rows = [self._sources[source].pieces(number) for source, number in map(self._at, ids)]
            return self._masked(rows, count, places)
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

    def _masked(
        self, found: Sequence[Sequence[Ids]], count: int, places: Sequence[int] | None
    ) -> RowArrays:
        """Rows of pieces of texts, each in its frame, with a part of them hidden."""
        hiding = self._hiding
        if hiding is None:
            raise ValueError("masked texts were opened without what says what is hidden of them")
        at = [None] * len(found) if places is None else places
        rows = [
            [hiding.sample(body, place, number) for number, body in enumerate(bodies)]
            for bodies, place in zip(found, at, strict=True)
        ]
        most = hiding.most_labels(self.seq_len)
        labels, _ = padded([_joined(row, 1) for row in rows], count, most, IGNORE)
        tokens, live = padded([_joined(row, 0) for row in rows], count, self.seq_len, 0)
        if all(len(row) == 1 for row in rows):
            return _fields(tokens, labels, live)
        sizes = [[len(tokens) for tokens, _ in row] for row in rows]
        numbers = [np.repeat(np.arange(len(row)) + 1, row) for row in sizes]
        places_in = [np.concatenate([np.arange(size) for size in row]) for row in sizes]
        segments, _ = padded(numbers, count, self.seq_len, 0)
        positions, _ = padded(places_in, count, self.seq_len, 0)
        return RowArrays(tokens, labels, positions, segments)

    def ratings(self, ids: Sequence[int], count: int) -> Ids:
        """Of the rated answers `ids` 1 where one is good, else 0; then 0 up to `count`. Of other
        kinds of samples there is none, `[0]`.
        """
        if self.kind != "rated":
            return np.empty(0, np.int64)
        made = np.zeros(count, np.int64)
        made[: len(ids)] = [int(self._record(i)[LABEL][0]) for i in ids]
        return made

    def _answers(self, rows: Sequence[tuple[Ids, Ids]], count: int) -> RowArrays:
        """Rows of ids and their masks, two for each of `count` samples."""
        tokens, live = padded([ids[: self.seq_len] for ids, _ in rows], 2 * count, self.seq_len, 0)
        mask, _ = padded([mask[: self.seq_len] for _, mask in rows], 2 * count, self.seq_len, 0)
        labels = np.full_like(tokens, IGNORE)
        np.copyto(labels[:, :-1], tokens[:, 1:], where=mask[:, 1:] == 1)
        return _fields(tokens, labels, live)

    def documents_of(self, count: int) -> Ids:
        """The number of the document that each of the first `count` samples is of or a piece of,
        from 0 in the order of the samples, `[count]`.
        """
        records = [self._at(i) for i in range(count)]
        found = [self._sources[source].record_of(number) for source, number in records]
        new = [
            index == 0 or (one, records[index][0]) != (found[index - 1], records[index - 1][0])
            for index, one in enumerate(found)
        ]
        return np.cumsum(new, dtype=np.int64) - 1

    def _record(self, i: int, *, other: bool = False) -> dict[str, Ids]:
        source, number = self._at(i)
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
        part, as far apart for all. Of five rows or more the distance is neither 1 nor half of
        them, so that the answers to one prompt, side by side or in two halves, do not meet. A part
        of one row has no other: its answer stands behind its own prompt.
        """
        index, place = placed(self._ends, number)
        first, size = number - place, self._sizes[index]
        return first + (place + max(1, round(GOLDEN * size))) % size

    def record_of(self, number: int) -> tuple[int, int]:
        """The part and the record that row `number` is of."""
        index, _, planned = self._planned(number)
        return index, int(planned[0])

    def record(self, number: int, names: Sequence[str]) -> dict[str, Ids]:
        """The columns `names` of the record that is row `number` of this source."""
        index, table, piece = self._planned(number)
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

    def pieces(self, number: int) -> list[Ids]:
        """The pieces of masked texts that are row `number` of this source."""
        index, table, row = self._planned(number)
        planned, column = row.tolist(), self.column(BODY, index)
        found = [
            column[record][begin : begin + size]
            for record, begin, size in zip(planned[::3], planned[1::3], planned[2::3], strict=False)
            if 0 <= record < len(column)
        ]
        if not found or 3 * len(found) < len(planned) or not all(map(len, found)):
            raise self._damaged(table, number)
        return found

    def _planned(self, number: int) -> tuple[int, Column, Ids]:
        """The part of row `number`, its row table, and the pieces that this plans for the row."""
        index, place = placed(self._ends, number)
        table = self.column(self._table, index)
        return index, table, table[place]

    def _damaged(self, table: Column, number: int) -> WrongInput:
        return WrongInput(
            f"{bin_path(table.prefix)} plans row {number} of what is not there; it is damaged, run"
            " `ingot prepare --again`"
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


def _joined(row: Sequence[tuple[Ids, Ids]], part: int) -> Ids:
    """The tokens (0) or the labels (1) of a row, piece behind piece."""
    return np.concatenate([piece[part] for piece in row])


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


def _fields(tokens: Ids, labels: Ids, live: Ids) -> RowArrays:
    """Add positions and segments to rows whose first `live` ids are not padding."""
    place = np.arange(tokens.shape[1])
    there = place < live[:, None]
    return RowArrays(tokens, labels, np.where(there, place, 0), there.astype(np.int64))
