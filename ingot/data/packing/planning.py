"""Plans the rows of one part of columns: the packing stage that workers run.

Rows of texts and chats are packed best fit decreasing within windows of records. Of preferences,
pairs and labelled texts each row is one record, and records without a trained token are left out;
of masked texts each row is a piece of one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ingot.base.errors import WrongInput
from ingot.base.markers import FileEntry, entry_of
from ingot.config.sections.data import COLUMNS
from ingot.config.sections.objective import Documents
from ingot.config.spans import LEAST_TOKENS, SpanLengths
from ingot.data.columns.column import Column, ColumnWriter, bin_path, column_prefix, idx_path
from ingot.data.columns.manifest import MASK, token_columns
from ingot.data.engines.engine import Advance
from ingot.data.splits import Split

Ids = npt.NDArray[np.int64]

WINDOW = 65_536
"""Records planned together. A larger window would hardly reduce the padding, which is nearly
zero.
"""


@dataclass(frozen=True)
class PackingCounts:
    """Statistics of packing for one part or all parts."""

    rows: int = 0
    tokens: int = 0
    """Tokens in rows; for texts and chats, the rest of rows times seq_len is padding."""
    split: int = 0
    """Records longer than a row that were split into several pieces."""
    truncated: int = 0
    """Records longer than a row that were truncated to it."""
    lost: int = 0
    """Records left out because truncation removed every trained token of the record or of one of
    its sides.
    """
    too_long: int = 0
    """Records left out because they are longer than a row and `data.truncate` is `drop`."""
    untrained: int = 0
    """Records left out because they have no trained token: no mask is set, or they have too few
    tokens.
    """

    def __add__(self, other: PackingCounts) -> PackingCounts:
        return PackingCounts(
            *(
                getattr(self, field.name) + getattr(other, field.name)
                for field in fields(PackingCounts)
            )
        )


@dataclass(frozen=True)
class PlannedPart:
    """The table of one part."""

    counts: PackingCounts
    files: list[FileEntry]


def any_set(mask: Column, begins: Ids, ends: Ids) -> npt.NDArray[np.bool_]:
    """Whether the mask is set anywhere in each of the spans `begins` to `ends` of the stream; the
    spans ascend.
    """
    some = ends > begins
    found = np.zeros(len(begins), np.bool_)
    if some.any():
        begins, ends = begins[some], ends[some]
        values = mask.slice(int(begins[0]), int(ends[-1]))
        # Every other result is of the gap between two spans. The end of the last span is the end of
        # the values, which reduceat does not accept.
        edges = np.stack((begins, ends), axis=1).ravel()[:-1] - begins[0]
        found[some] = np.maximum.reduceat(values, edges)[::2] > 0
    return found


def truncation(how: str) -> str:
    """What a way of packing, such as `none` or `best_fit-left`, does with what is too long."""
    return how.partition("-")[2] or "right"


def first_set(mask: Column, begins: Ids, ends: Ids) -> Ids:
    """How far behind the beginning of each of the spans `begins` to `ends` the mask is first set;
    the length of a span where it is not.
    """
    if not len(begins):
        return begins
    values = mask.slice(int(begins[0]), int(ends[-1]))
    places = np.append(np.flatnonzero(values) + begins[0], ends[-1])
    found: Ids = np.minimum(places[np.searchsorted(places, begins)], ends) - begins
    return found


Flags = npt.NDArray[np.bool_]


def column_limits(documents: Documents, seq_len: int, target_len: int | None) -> dict[str, int]:
    """The maximum number of ids per row of each column of ids."""
    return {
        name: target_len if name == "target" and target_len is not None else seq_len
        for name in token_columns(COLUMNS[documents])
    }


@dataclass(frozen=True)
class TableStage:
    """From parts of columns to their row tables, named `table`. A kind of stage says which pieces
    of records are used, and how they make rows.
    """

    folder: Path
    table: str

    @property
    def columns(self) -> Sequence[str]:
        """The names of the columns that are read, that of the records' tokens first."""
        raise NotImplementedError

    def open(self) -> Callable[[tuple[Split, int], Advance], PlannedPart]:
        return self._make

    def _make(self, task: tuple[Split, int], advance: Advance) -> PlannedPart:
        split, number = task
        columns = {
            name: Column(column_prefix(self.folder, split, name, number)) for name in self.columns
        }
        prefix = column_prefix(self.folder, split, self.table, number)
        count = len(columns[self.columns[0]])
        counts = PackingCounts()
        with ColumnWriter(prefix, np.dtype("int64")) as writer:
            for first in range(0, count, WINDOW):
                last = min(first + WINDOW, count)
                pieces, done = self._pieces(columns, first, last)
                order, sizes = self._rows(pieces)
                writer.append(pieces[order].ravel(), sizes * 3)
                counts += replace(done, rows=len(sizes))
                advance(
                    sum(
                        (column.begin(last) - column.begin(first)) * column.dtype.itemsize
                        for column in columns.values()
                    )
                )
        return PlannedPart(
            counts,
            [entry_of(self.folder, path.name) for path in (bin_path(prefix), idx_path(prefix))],
        )

    def _pieces(
        self, columns: dict[str, Column], first: int, last: int
    ) -> tuple[Ids, PackingCounts]:
        """(record, begin, ids) of what is used of the records `first` to `last`, [P, 3], in order,
        and what is counted of it but for rows.
        """
        raise NotImplementedError

    def _rows(self, pieces: Ids) -> tuple[Ids, Ids]:
        """The pieces in the order of rows, and how many each row has."""
        return np.arange(len(pieces)), np.ones(len(pieces), np.int64)


@dataclass(frozen=True)
class SingleRecordStage(TableStage):
    """The stage for kinds with one record per row."""

    documents: Documents
    seq_len: int
    target_len: int | None
    truncate: str = "right"

    @property
    def columns(self) -> Sequence[str]:
        return COLUMNS[self.documents]

    def _pieces(
        self, columns: dict[str, Column], first: int, last: int
    ) -> tuple[Ids, PackingCounts]:
        """(record, begin, ids) of the kept records among `first` to `last`, [P, 3]: the ids of each
        column from `begin` on.
        """
        most = column_limits(self.documents, self.seq_len, self.target_len)
        lengths = {name: columns[name].lengths(first, last).astype(np.int64) for name in most}
        longer = np.logical_or.reduce([lengths[name] > most[name] for name in most])
        cut = (
            self._cut_prompts(columns, first, lengths)
            if self.truncate == "left"
            else np.zeros(last - first, np.int64)
        )
        kept = {name: np.minimum(lengths[name] - cut, most[name]) for name in most}
        before, after = np.ones(last - first, np.bool_), np.ones(last - first, np.bool_)
        for name in most:
            if f"{name}_{MASK}" in columns:
                mask = columns[f"{name}_{MASK}"]
                begins = columns[name].begin(first) + np.cumsum(lengths[name]) - lengths[name]
                before &= any_set(mask, begins + 1, begins + lengths[name])
                after &= any_set(mask, begins + cut + 1, begins + cut + kept[name])
            else:
                before &= lengths[name] > 0
        too_long: Flags = before & longer & (self.truncate == "drop")
        rows: Flags = before & after & ~too_long
        record, own = np.flatnonzero(rows), next(iter(kept.values()))
        counts = PackingCounts(
            tokens=int(sum(sizes[rows].sum() for sizes in kept.values())),
            truncated=int((longer & rows).sum()),
            lost=int((before & ~after & ~too_long).sum()),
            too_long=int(too_long.sum()),
            untrained=int((~before).sum()),
        )
        return np.stack((record + first, cut[record], own[record]), axis=1), counts

    def _cut_prompts(self, columns: dict[str, Column], first: int, lengths: dict[str, Ids]) -> Ids:
        """How many ids of the prompt of each record are cut off: as many as one of its sides is too
        long, but the last one, which predicts the answer.
        """
        over, prompt = [], []
        for name, sizes in lengths.items():
            begins = columns[name].begin(first) + np.cumsum(sizes) - sizes
            over.append(sizes - self.seq_len)
            prompt.append(first_set(columns[f"{name}_{MASK}"], begins, begins + sizes) - 1)
        found: Ids = np.minimum.reduce([np.maximum.reduce(over), *prompt]).clip(0)
        return found


@dataclass(frozen=True)
class PieceStage(SingleRecordStage):
    """The stage for masked texts: a row is a piece of `least` to `seq_len` ids of a text, which has
    as many of them as it needs; a shorter text has none. What frames a piece is not counted.
    """

    least: int = 1
    packs: int | None = None
    """What frames a piece, where several go into a row; None: each is a row."""

    def _rows(self, pieces: Ids) -> tuple[Ids, Ids]:
        if self.packs is None:
            return super()._rows(pieces)
        framing = self.packs
        return _by_row(best_fit(pieces[:, 2] + framing, self.seq_len + framing))

    def _pieces(
        self, columns: dict[str, Column], first: int, last: int
    ) -> tuple[Ids, PackingCounts]:
        """(record, begin, ids) of the pieces of the records `first` to `last`, [P, 3], in order."""
        (column,) = columns.values()
        lengths = column.lengths(first, last).astype(np.int64)
        number = -(-lengths // self.seq_len) * (lengths >= self.least)
        pieces = _cut(lengths, number, self.seq_len, first)
        # A last piece that is too short takes from the one before it, which is full.
        lacking = np.maximum(self.least - pieces[:, 2], 0)
        pieces[:, 1] -= lacking
        pieces[:-1, 2] -= lacking[1:]
        pieces[:, 2] += lacking
        return pieces, PackingCounts(
            tokens=int(pieces[:, 2].sum()),
            split=int((number > 1).sum()),
            untrained=int((number == 0).sum()),
        )


def longest_piece(seq_len: int, framing: int, how: str) -> int:
    """How many ids of a text go into a row of `seq_len`, `framing` of which are around it."""
    spans, room = SpanLengths.of_plan(how), seq_len - framing
    return room if spans is None else spans.longest(room)


def piece_stage(
    folder: Path, table: str, documents: Documents, seq_len: int, framing: int, how: str
) -> PieceStage:
    """The stage for masked texts that `how` packs into rows of which the model reads `seq_len` ids,
    `framing` of them around the text. Raises WrongInput if there is no room for a text.
    """
    longest = longest_piece(seq_len, framing, how)
    least = 1 if SpanLengths.of_plan(how) is None else LEAST_TOKENS
    if longest < 2 * least - 1:  # so that a full piece can leave `least` of its tokens to the next
        raise WrongInput(
            f"data.seq_len {seq_len} has no room for a token beside the {framing} that the"
            " tokenizer puts around each text; raise it"
        )
    several = framing if how.startswith("best_fit") else None
    return PieceStage(folder, table, documents, longest, None, least=least, packs=several)


def _cut(lengths: Ids, number: Ids, most: int, first: int, skipped: Ids | int = 0) -> Ids:
    """(record, begin, length), [P, 3], of `number` pieces of up to `most` ids of each record, one
    after another, the first of them behind `skipped` ids; records are counted from `first`.
    """
    record = np.repeat(np.arange(len(lengths)), number)
    piece = np.arange(len(record)) - np.repeat(np.cumsum(number) - number, number)
    begin = piece * most + np.broadcast_to(skipped, lengths.shape)[record]
    return np.stack((record + first, begin, np.minimum(lengths[record] - begin, most)), axis=1)


@dataclass(frozen=True)
class PackStage(TableStage):
    """The stage for texts and chats."""

    how: str
    seq_len: int
    masked: bool

    @property
    def columns(self) -> Sequence[str]:
        return ("tokens", MASK) if self.masked else ("tokens",)

    def _rows(self, pieces: Ids) -> tuple[Ids, Ids]:
        if not self.how.startswith("best_fit"):
            return super()._rows(pieces)
        return _by_row(best_fit(pieces[:, 2], self.seq_len))

    def _pieces(
        self, columns: dict[str, Column], first: int, last: int
    ) -> tuple[Ids, PackingCounts]:
        """(record, begin, ids) of all pieces of the records `first` to `last`, [P, 3], in order."""
        tokens, mask = columns["tokens"], columns.get(MASK)
        lengths = tokens.lengths(first, last).astype(np.int64)
        long = lengths > self.seq_len
        cut = np.zeros_like(lengths)
        if mask is None:
            # The last token has no label, so a record of k * seq_len + 1 tokens gets no piece of
            # one token.
            number = np.where(lengths > 1, -(-(lengths - 1) // self.seq_len), 0)
            counts = PackingCounts(
                split=int((number > 1).sum()), untrained=int((number == 0).sum())
            )
        else:
            kept = np.minimum(lengths, self.seq_len)
            begins = tokens.begin(first) + np.cumsum(lengths) - lengths
            if truncation(self.how) == "left":
                cut = lengths - kept
            trained = any_set(mask, begins + cut + 1, begins + cut + kept)
            before = any_set(mask, begins + 1, begins + lengths)
            too_long = before & long & (truncation(self.how) == "drop")
            number = (trained & ~too_long).astype(np.int64)
            counts = PackingCounts(
                truncated=int((long & trained & ~too_long).sum()),
                lost=int((before & ~trained & ~too_long).sum()),
                too_long=int(too_long.sum()),
                untrained=int((~before).sum()),
            )
        pieces = _cut(lengths, number, self.seq_len, first, cut)
        return pieces, replace(counts, tokens=int(pieces[:, 2].sum()))


def best_fit(sizes: Ids, capacity: int) -> Ids:
    """Assign each size to a bin of at most `capacity`: best fit decreasing.

    The largest size goes first, each into the bin where it leaves the least room; ties go by order.
    `sizes` are between 1 and `capacity`.
    """
    bins = [0] * len(sizes)
    order = np.argsort(-sizes, kind="stable")
    # Bit r is set if some bin has exactly r left; the lowest set bit from `size` on is the best
    # fit.
    room, with_room, opened = 0, list[list[int]]([] for _ in range(capacity + 1)), 0
    for item, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        fitting = room >> size
        if fitting:
            left = size + (fitting & -fitting).bit_length() - 1
            chosen = with_room[left].pop()
            if not with_room[left]:
                room ^= 1 << left
        else:
            chosen, left, opened = opened, capacity, opened + 1
        bins[item] = chosen
        left -= size
        if left:
            with_room[left].append(chosen)
            room |= 1 << left
    return np.array(bins, np.int64)


def _by_row(bins: Ids) -> tuple[Ids, Ids]:
    """Pieces ordered by row, and how many each row has. Rows are ordered by their first pieces."""
    if not len(bins):
        return bins, bins
    _, first, row, sizes = np.unique(
        bins, return_index=True, return_inverse=True, return_counts=True
    )
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return np.argsort(rank[row], kind="stable"), sizes[order]
