"""Row tables: which records lie in which training row, written once for each way of packing.

A row table is a column of its own, `SPLIT.rows-PACK-SEQ_LEN-NNNNN`, int64: each of its records is a
row of triples (record, begin, length), the consecutive pieces of the part's records in that row.
"""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass
from pathlib import Path

from ingot.base.errors import WrongInput
from ingot.base.markers import fingerprint, problems, read_marker, write_marker
from ingot.base.progress import Progress
from ingot.base.storage import link_file
from ingot.config.sections.objective import Documents
from ingot.config.spans import LEAST_TOKENS, SpanLengths
from ingot.data.columns.manifest import MASK, PreparedData, missing_files
from ingot.data.engines.engine import Engine
from ingot.data.engines.local import LocalEngine
from ingot.data.packing.planning import (
    PackingCounts,
    PackStage,
    SingleRecordStage,
    TableStage,
    piece_stage,
    truncation,
)
from ingot.data.splits import Split

WHOLE_RECORDS: tuple[Documents, ...] = ("preference", "rated", "pair", "labelled")
"""Kinds of documents with one record per row."""
ONE_PER_ROW: tuple[Documents, ...] = (*WHOLE_RECORDS, "masked")
"""These, and masked texts, of which each row is a piece of a record."""
FEW_RECORDS = 20_000
"""So few are planned in less time than worker processes take to start."""
PLAN = "pack-1"
"""Version in the marker; raise it when the same columns would give other rows."""


@dataclass(frozen=True)
class RowTables:
    """The row tables of one way of packing. `rows` has the rows of each part of each source of each
    split.
    """

    pack: str
    seq_len: int
    rows: dict[Split, list[list[int]]]
    counts: dict[Split, PackingCounts]
    documents: Documents = "text"
    target_len: int | None = None

    @property
    def total(self) -> PackingCounts:
        return sum(self.counts.values(), PackingCounts())

    @property
    def padding(self) -> float:
        """The share of positions that are padding; 0 for one record per row, whose batches are only
        as long as their longest sample.
        """
        return (
            0.0
            if self.documents in ONE_PER_ROW
            else 1.0 - self.total.tokens / max(1, self.total.rows * self.seq_len)
        )

    def __str__(self) -> str:
        total = self.total
        told = f"{total.rows:,} {self._rows}"
        for count, words in (
            (total.split, "records were split over several rows"),
            (total.truncated, f"records were longer and cut{self._how_cut}"),
            (total.too_long, "records were left out: they are longer, and data.truncate is drop"),
            (
                total.lost,
                "records were left out: what remained of them has nothing that is trained",
            ),
            (total.untrained, f"records were left out: {self._why_untrained}"),
        ):
            told += f"; {count:,} {words}" if count else ""
        return told

    @property
    def _how_cut(self) -> str:
        left = truncation(self.pack) == "left"
        if self.documents in ONE_PER_ROW:
            return " at the beginning of their prompt" if left else ""
        return f" to their {'last' if left else 'first'} {self.seq_len:,} tokens"

    @property
    def _why_untrained(self) -> str:
        if SpanLengths.of_plan(self.pack) is not None:
            return f"they have fewer than {LEAST_TOKENS} tokens, of which one is hidden"
        return "nothing in them is trained"

    @property
    def _rows(self) -> str:
        if self.documents == "preference":
            return f"preferences of up to {self.seq_len:,} tokens a side"
        if self.documents == "rated":
            return f"rated answers of up to {self.seq_len:,} tokens with their prompt"
        if self.documents == "pair":
            return (
                f"pairs of up to {self.seq_len:,} tokens in the source and {self.target_len:,} in"
                " the target"
            )
        if self.documents == "labelled":
            return f"labelled texts of up to {self.seq_len:,} tokens"
        if (spans := SpanLengths.of_plan(self.pack)) is not None:
            return (
                f"pieces of texts, of each {spans.noise_density:.0%} to be written and up to"
                f" {self.seq_len:,} tokens to be read"
            )
        if self.documents == "masked" and self.pack == "best_fit":
            return f"rows of up to {self.seq_len:,} tokens, of pieces with what frames them"
        if self.documents == "masked":
            return f"pieces of texts of up to {self.seq_len:,} tokens with what frames them"
        return f"rows of {self.seq_len:,} tokens, {self.padding:.2%} of it padding"


def table_name(how: str, seq_len: int, target_len: int | None = None) -> str:
    """The name of the tables of one way of packing; `target_len` applies to pairs only."""
    return f"rows-{how}-{seq_len}" + (f"-{target_len}" if target_len is not None else "")


def pack(
    folder: Path,
    prepared: PreparedData,
    seq_len: int,
    how: str,
    engine: Engine,
    progress: Progress,
    target_len: int | None = None,
) -> RowTables:
    """Write the row tables of all parts, unless they exist; tables of other data are removed.

    Args:
        target_len: tokens in the target of a pair; for pairs only.

    Raises:
        WrongInput: a part is damaged.
        Failed: the disk is full, or a worker died.
    """
    _sweep(folder, _data(prepared))
    with contextlib.suppress(WrongInput):
        return read_packed(folder, prepared, seq_len, how, target_len)
    table, documents = table_name(how, seq_len, target_len), prepared.documents
    work = _stage(folder, prepared, seq_len, how, target_len)
    tasks = [
        (split, part.number)
        for split, sources in prepared.splits.items()
        for source in sources
        for part in source.parts
    ]
    records = sum(prepared.total(split, "records") for split in prepared.splits)
    packer = LocalEngine(1) if records < FEW_RECORDS else engine
    made = dict(zip(tasks, packer.run(work, tasks, progress), strict=True))
    rows: dict[Split, list[list[int]]] = {
        split: [
            [made[split, part.number].counts.rows for part in source.parts] for source in sources
        ]
        for split, sources in prepared.splits.items()
    }
    counts = {
        split: sum((done.counts for (of, _), done in made.items() if of == split), PackingCounts())
        for split in prepared.splits
    }
    packed = RowTables(how, seq_len, rows, counts, documents, target_len)
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


def _stage(
    folder: Path, prepared: PreparedData, seq_len: int, how: str, target_len: int | None
) -> TableStage:
    """What plans the rows of this kind of documents. Raises WrongInput if a text has no room."""
    table, documents = table_name(how, seq_len, target_len), prepared.documents
    if documents == "masked":
        return piece_stage(folder, table, documents, seq_len, prepared.framing, how)
    if documents in ONE_PER_ROW:
        return SingleRecordStage(folder, table, documents, seq_len, target_len, truncation(how))
    return PackStage(folder, table, how, seq_len, MASK in prepared.names)


def read_packed(
    folder: Path, prepared: PreparedData, seq_len: int, how: str, target_len: int | None = None
) -> RowTables:
    """The tables that `pack` wrote for these data; only file sizes are checked.

    Raises:
        WrongInput: there are none, they belong to other data, or a file is missing or truncated.
    """
    name = f"{table_name(how, seq_len, target_len)}.json"
    marker = read_marker(folder, name)
    if marker is None or (marker.get("data"), marker.get("plan")) != (_data(prepared), PLAN):
        of_targets = "" if target_len is None else f", data.target_len={target_len}"
        packed, _, cut = how.partition("-")
        spans = SpanLengths.of_plan(how)
        of_cut = f", data.truncate={cut}" if cut and spans is None else ""
        if spans is not None:
            of_cut = (
                f", objective.noise_density={spans.noise_density},"
                f" objective.mean_noise_span_length={spans.mean_noise_span_length}"
            )
        # One that is there is damaged, which `prepare` by itself does not see.
        again = " --again" if marker is None and (folder / name).exists() else ""
        raise WrongInput(
            f"{folder} holds no rows of data.seq_len={seq_len}{of_targets},"
            f" data.pack={packed}{of_cut}; run `ingot prepare{again}` with this recipe"
        )
    if found := missing_files(folder, marker):
        raise WrongInput(f"{found[0]}; run `ingot prepare --again`")
    counts = {split: PackingCounts(**counts) for split, counts in marker["counts"].items()}
    return RowTables(how, seq_len, marker["rows"], counts, prepared.documents, target_len)


def keep_packed(old: Path, new: Path, prepared: PreparedData, *, checksums: bool) -> None:
    """Link the row tables of these data from one folder of columns to another; with `checksums`,
    none that is damaged.
    """
    for name in markers_of(old, prepared):
        marker = read_marker(old, name) or {"files": []}
        if not problems(old, marker, checksums=checksums):
            for path in (*(entry["path"] for entry in marker["files"]), name):
                link_file(old / path, new / path)


def markers_of(folder: Path, prepared: PreparedData | None = None) -> list[str]:
    """The markers of all row tables in `folder`, or only of those for these data."""
    names = sorted(path.name for path in folder.glob("rows-*-*.json"))
    return [
        name
        for name in names
        if prepared is None or (read_marker(folder, name) or {}).get("data") == _data(prepared)
    ]


def _data(prepared: PreparedData) -> str:
    """The identity that row tables are bound to: the records, whether they have a mask, and how
    many ids stand around each piece of a masked text, which are not part of its record.
    """
    around = {"framing": prepared.framing} if prepared.documents == "masked" else {}
    return fingerprint({"data": prepared.identity, "columns": prepared.columns, **around})


def _sweep(folder: Path, data: str) -> None:
    """Remove the tables of other data and leftovers of killed runs. Tables of other lengths stay,
    as another recipe may use them.
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
