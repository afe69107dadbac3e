"""Plans which records share a row: best fit decreasing within windows of records, written down as a
table of rows per part.

A row table is a column of its own, `SPLIT.rows-PACK-SEQ_LEN-NNNNN`, int64: each of its records is a
row, and its elements are triples (record, begin, length), the pieces of the part's records that lie
in the row one after the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from ingot.base.errors import WrongInput
from ingot.base.markers import entry_of, fingerprint, read_marker, write_marker
from ingot.base.progress import Progress
from ingot.config.sections.objective import Documents
from ingot.data.columns import Column, ColumnWriter, bin_path, column_prefix, idx_path
from ingot.data.engines.engine import Advance, Engine
from ingot.data.kinds import MASK
from ingot.data.manifest import Prepared, lacking
from ingot.data.picking import PickParts
from ingot.data.rowcounts import WINDOW, Counts, Ids, PartRows, any_set
from ingot.data.sources import Split

PICKED: tuple[Documents, ...] = ("preference", "pair", "labelled")
"""Kinds of documents of which each row is one record."""
PLAN = "pack-1"
"""Named in the marker; raise it when the same columns would give other rows."""


@dataclass(frozen=True)
class Packed:
    """The row tables of one way of packing. `rows` has the rows of each part of each source of each
    split.
    """

    pack: str
    seq_len: int
    rows: dict[Split, list[list[int]]]
    counts: dict[Split, Counts]
    documents: Documents = "text"
    target_len: int | None = None

    @property
    def total(self) -> Counts:
        return sum(self.counts.values(), Counts())

    @property
    def padding(self) -> float:
        """The share of all positions that no token is in; 0 where there is one record a row, since
        batches are no longer than their longest.
        """
        return (
            0.0
            if self.documents in PICKED
            else 1.0 - self.total.tokens / max(1, self.total.rows * self.seq_len)
        )

    def __str__(self) -> str:
        total = self.total
        told = f"{total.rows:,} {self._rows}"
        for count, words in (
            (total.split, "records were split over several rows"),
            (
                total.truncated,
                "records were longer and cut"
                + ("" if self.documents in PICKED else f" to their first {self.seq_len:,} tokens"),
            ),
            (
                total.lost,
                "records were left out: what remained of them has nothing that is trained",
            ),
            (total.untrained, "records were left out: nothing in them is trained"),
        ):
            told += f"; {count:,} {words}" if count else ""
        return told

    @property
    def _rows(self) -> str:
        if self.documents == "preference":
            return f"preferences of up to {self.seq_len:,} tokens a side"
        if self.documents == "pair":
            return (
                f"pairs of up to {self.seq_len:,} tokens in the source and {self.target_len:,} in"
                " the target"
            )
        if self.documents == "labelled":
            return f"labelled texts of up to {self.seq_len:,} tokens"
        return f"rows of {self.seq_len:,} tokens, {self.padding:.2%} of it padding"


def table_name(how: str, seq_len: int, target_len: int | None = None) -> str:
    """What the tables of one way of packing are called; `target_len` is for pairs alone."""
    return f"rows-{how}-{seq_len}" + (f"-{target_len}" if target_len is not None else "")


def pack(
    folder: Path,
    prepared: Prepared,
    seq_len: int,
    how: str,
    engine: Engine,
    progress: Progress,
    target_len: int | None = None,
) -> Packed:
    """Write the row tables of all parts, unless they are there already; tables of other data are
    removed.

    Args:
        target_len: tokens in the target of a pair; for pairs alone.

    Raises:
        WrongInput: a part is damaged.
        Failed: the disk is full, or a worker died.
    """
    _sweep(folder, _data(prepared))
    with contextlib.suppress(WrongInput):
        return read_packed(folder, prepared, seq_len, how, target_len)
    table, documents = table_name(how, seq_len, target_len), prepared.documents
    picked = PickParts(folder, table, documents, seq_len, target_len)
    work = (
        picked if documents in PICKED else PackParts(folder, how, seq_len, MASK in prepared.names)
    )
    tasks = [
        (split, part.number)
        for split, sources in prepared.splits.items()
        for source in sources
        for part in source.parts
    ]
    made = dict(zip(tasks, engine.run(work, tasks, progress), strict=True))
    rows: dict[Split, list[list[int]]] = {
        split: [
            [made[split, part.number].counts.rows for part in source.parts] for source in sources
        ]
        for split, sources in prepared.splits.items()
    }
    counts = {
        split: sum((done.counts for (of, _), done in made.items() if of == split), Counts())
        for split in prepared.splits
    }
    packed = Packed(how, seq_len, rows, counts, documents, target_len)
    payload = {
        "kind": "rows",
        "plan": PLAN,
        "data": _data(prepared),
        "padding": round(packed.padding, 6),
        **asdict(packed),
    }
    write_marker(
        folder, f"{table}.json", payload, [entry for done in made.values() for entry in done.files]
    )
    return packed


def read_packed(
    folder: Path, prepared: Prepared, seq_len: int, how: str, target_len: int | None = None
) -> Packed:
    """The tables that `pack` wrote for these data; only sizes of files are checked.

    Raises:
        WrongInput: there are none, they are of other data, or a file is missing or cut.
    """
    name = f"{table_name(how, seq_len, target_len)}.json"
    marker = read_marker(folder, name)
    if marker is None or (marker.get("data"), marker.get("plan")) != (_data(prepared), PLAN):
        of_targets = "" if target_len is None else f", data.target_len={target_len}"
        raise WrongInput(
            f"{folder} holds no rows of data.seq_len={seq_len}{of_targets}, data.pack={how}; run"
            " `ingot prepare` with this recipe"
        )
    if found := lacking(folder, marker):
        raise WrongInput(f"{found[0]}; run `ingot prepare` again")
    counts = {split: Counts(**counts) for split, counts in marker["counts"].items()}
    return Packed(how, seq_len, marker["rows"], counts, prepared.documents, target_len)


def markers_of(folder: Path, prepared: Prepared | None = None) -> list[str]:
    """The markers of all row tables in `folder`, or of those that are of these data."""
    names = sorted(path.name for path in folder.glob("rows-*-*.json"))
    return [
        name
        for name in names
        if prepared is None or (read_marker(folder, name) or {}).get("data") == _data(prepared)
    ]


def _data(prepared: Prepared) -> str:
    """What row tables are bound to: the records, and whether a mask says which of their tokens are
    trained.
    """
    return fingerprint({"data": prepared.data, "columns": prepared.columns})


def _sweep(folder: Path, data: str) -> None:
    """Remove the tables of other data, and what killed runs left; those of other lengths stay,
    another recipe may ask for them.
    """
    keep: set[str] = set()
    for name in markers_of(folder):
        marker = read_marker(folder, name)
        if marker is None or marker.get("data") != data:
            (folder / name).unlink(missing_ok=True)
        else:
            keep |= {entry["path"] for entry in marker["files"]}
    for path in folder.glob("*.rows-*"):
        if path.name not in keep:
            path.unlink(missing_ok=True)


@dataclass(frozen=True)
class PackParts:
    """The stage: from parts of columns to their row tables."""

    folder: Path
    how: str
    seq_len: int
    masked: bool

    def open(self) -> Callable[[tuple[Split, int], Advance], PartRows]:
        return self._make

    def _make(self, task: tuple[Split, int], advance: Advance) -> PartRows:
        split, number = task
        tokens = Column(column_prefix(self.folder, split, "tokens", number))
        mask = Column(column_prefix(self.folder, split, MASK, number)) if self.masked else None
        prefix = column_prefix(self.folder, split, table_name(self.how, self.seq_len), number)
        counts = Counts()
        with ColumnWriter(prefix, np.dtype("int64")) as writer:
            for first in range(0, len(tokens), WINDOW):
                last = min(first + WINDOW, len(tokens))
                pieces, done = self._pieces(tokens, mask, first, last)
                bins = (
                    best_fit(pieces[:, 2], self.seq_len)
                    if self.how == "best_fit"
                    else np.arange(len(pieces))
                )
                order, sizes = _by_row(bins)
                writer.append(pieces[order].ravel(), sizes * 3)
                counts += done + Counts(rows=len(sizes), tokens=int(pieces[:, 2].sum()))
                advance((tokens.begin(last) - tokens.begin(first)) * tokens.dtype.itemsize)
        return PartRows(
            counts,
            [entry_of(self.folder, path.name) for path in (bin_path(prefix), idx_path(prefix))],
        )

    def _pieces(
        self, tokens: Column, mask: Column | None, first: int, last: int
    ) -> tuple[Ids, Counts]:
        """(record, begin, length) of all pieces of the records `first` to `last`, [P, 3], in their
        order.
        """
        lengths = tokens.lengths(first, last).astype(np.int64)
        long = lengths > self.seq_len
        if mask is None:
            # The last token is no place to learn anything at, so of a record of k * seq_len + 1
            # tokens no piece of one is made.
            number = np.where(lengths > 1, -(-(lengths - 1) // self.seq_len), 0)
            counts = Counts(split=int((number > 1).sum()), untrained=int((number == 0).sum()))
        else:
            kept = np.minimum(lengths, self.seq_len)
            begins = tokens.begin(first) + np.cumsum(lengths) - lengths
            trained, before = (
                any_set(mask, begins + 1, begins + kept),
                any_set(mask, begins + 1, begins + lengths),
            )
            number = trained.astype(np.int64)
            counts = Counts(
                truncated=int((long & trained).sum()),
                lost=int((before & ~trained).sum()),
                untrained=int((~before).sum()),
            )
        record = np.repeat(np.arange(len(lengths)), number)
        piece = np.arange(len(record)) - np.repeat(np.cumsum(number) - number, number)
        begin = piece * self.seq_len
        return (
            np.stack(
                (record + first, begin, np.minimum(lengths[record] - begin, self.seq_len)), axis=1
            ),
            counts,
        )


def best_fit(sizes: Ids, capacity: int) -> Ids:
    """A bin for each size, so that no bin holds more than `capacity`: best fit decreasing.

    The largest goes first, each to where it leaves the least room; of equal ones the first goes
    first. `sizes` are at least 1 and at most `capacity`.
    """
    bins = [0] * len(sizes)
    order = np.argsort(-sizes, kind="stable")
    # Bit r is set where a bin has room for exactly r more; the lowest set bit from `size` on is the
    # best fit.
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
    """Pieces in the order of rows, and how many each row has. Rows come in the order of their first
    pieces.
    """
    if not len(bins):
        return bins, bins
    _, first, row, sizes = np.unique(
        bins, return_index=True, return_inverse=True, return_counts=True
    )
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return np.argsort(rank[row], kind="stable"), sizes[order]
