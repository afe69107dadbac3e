"""The prepared columns and row tables, element by element: indexes, counts, ids, masks, labels, how
records end, and that rows hold each token exactly once. Part of `ingot verify data`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ingot.base.errors import WrongInput
from ingot.base.markers import read_marker
from ingot.config.recipe import Recipe
from ingot.config.sections.objective import CHAT_TEMPLATED
from ingot.data.columns.column import Column, bin_path, column_prefix
from ingot.data.columns.manifest import (
    LABEL,
    MANIFEST,
    MASK,
    VERDICTS,
    ColumnPart,
    PreparedData,
    is_mask,
    token_columns,
)
from ingot.data.packing.planning import column_limits, longest_piece, truncation
from ingot.data.packing.tables import WHOLE_RECORDS, read_packed, table_name
from ingot.data.sources.find import recipe_sources
from ingot.data.splits import Split
from ingot.data.tokenizing.encode import frame_of
from ingot.tokenizers.tokenizer import Tokenizer
from ingot.verify.proof import NAMED, Check, check_of_faults

CHUNK = 1 << 22
"""Elements that are read at once."""

Ids = npt.NDArray[np.int64]


@dataclass
class _ColumnFaults:
    """The faults of all parts, by check."""

    index: list[str] = field(default_factory=list)
    counts: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    masks: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)


def check_columns(
    recipe: Recipe, prepared: PreparedData, here: Tokenizer | None, seen: Callable[[int], None]
) -> list[Check]:
    """Check every element of every part."""
    found, names = _ColumnFaults(), prepared.names
    parts = [
        (split, source, part)
        for split, sources in prepared.splits.items()
        for source, one in enumerate(sources)
        for part in one.parts
    ]
    ends = _record_ends(recipe, here)
    for split, _, part in parts:
        try:
            _check_part(recipe.folder.columns, split, part, prepared, ends, found, seen)
        except WrongInput as error:
            found.index.append(str(error))
    documents, tokens = (
        sum(getattr(part, what) for _, _, part in parts) for what in ("documents", "tokens")
    )
    totals = [
        (
            prepared.total(split, what),
            sum(getattr(part, what) for of, _, part in parts if of == split),
        )
        for split in prepared.splits
        for what in ("documents", "tokens", "bytes")
    ]
    if any(total != counted for total, counted in totals):
        found.counts.append("the totals of manifest.json are not the sums of its parts")
    dropped = (read_marker(recipe.folder.columns, MANIFEST) or {}).get("dropped", {})
    if (lost := dropped.get("lost", 0)) > 0:
        found.counts.append(
            f"{lost:,} documents of data/raw are in no column, and nothing says why"
        )
    elif lost < 0:
        found.counts.append(f"{-lost:,} documents are in columns, and not in data/raw")
    checks = [
        check_of_faults(
            "columns: indexes", found.index, f"{len(parts):,} parts of {len(names)} columns"
        ),
        check_of_faults(
            "columns: counts", found.counts, f"{documents:,} documents, {tokens:,} tokens"
        ),
        check_of_faults("columns: ids", found.ids, f"all below {prepared.vocab_size:,}"),
    ]
    if any(map(is_mask, names)):
        checks.append(check_of_faults("columns: masks", found.masks, "0 or 1, one for each token"))
    if LABEL in names:
        checks.append(
            check_of_faults(
                "columns: labels",
                found.labels,
                f"one of {len(prepared.labels) or len(VERDICTS)} for each text",
            )
        )
    return [*checks, _check_record_ends(recipe, ends, found.ends)]


def _record_ends(recipe: Recipe, here: Tokenizer | None) -> list[int]:
    """The tokens with which every record must end; [] if none are required."""
    sources = [source for sources in recipe_sources(recipe).values() for source in sources]
    if (
        here is None
        or recipe.documents in (*CHAT_TEMPLATED, "masked")
        or any(source.source.startswith("megatron:") for source in sources)
    ):
        return []
    return here.after if recipe.documents == "text" else frame_of(recipe.documents, here)[1]


def _check_record_ends(recipe: Recipe, ends: Sequence[int], found: Sequence[str]) -> Check:
    what = "columns: end of each record"
    if ends:
        return check_of_faults(what, found, f"token {', '.join(map(str, ends))}")
    if recipe.documents in CHAT_TEMPLATED:
        return Check(
            what, None, "a chat ends as its template says; look at it with `ingot show mask`"
        )
    if recipe.documents == "masked":
        return Check(what, None, "a masked text has no end of its own: each piece gets its frame")
    return Check(
        what,
        None,
        "not promised: columns that were made elsewhere, or a tokenizer that ends no text or cannot"
        " be read",
    )


def _check_part(
    folder: Path,
    split: Split,
    part: ColumnPart,
    prepared: PreparedData,
    ends: Sequence[int],
    found: _ColumnFaults,
    seen: Callable[[int], None],
) -> None:
    """Add the faults of one part to `found`. Raises WrongInput if an index is damaged."""
    columns = {
        name: Column(column_prefix(folder, split, name, part.number)) for name in prepared.names
    }
    for name, column in columns.items():
        column.prove()
        path = bin_path(column.prefix)
        counted, wanted = (len(column), column.elements), (part.records, part.elements(name))
        if counted != wanted:
            found.counts.append(
                f"{path} has {counted[0]:,} documents and {counted[1]:,} tokens, manifest.json says"
                f" {wanted[0]:,} and {wanted[1]:,}"
            )
        wrongs, below = (
            (found.masks, 2)
            if is_mask(name)
            else (
                (found.labels, len(prepared.labels) or len(VERDICTS))
                if name == LABEL
                else (found.ids, prepared.vocab_size)
            )
        )
        wrong = sum(
            int(((values < 0) | (values >= below)).sum()) for values in _chunks(column, seen)
        )
        if wrong:
            wrongs.append(f"{path} has {wrong:,} elements that are not below {below:,}")
        lengths = column.lengths(0, len(column)).astype(np.int64)
        if name == LABEL and (lengths != 1).any():
            wrongs.append(
                f"{path} has {int((lengths != 1).sum()):,} records that are not one label"
            )
        if is_mask(name) and not np.array_equal(
            lengths, _masked_column(columns, name).lengths(0, len(_masked_column(columns, name)))
        ):
            wrongs.append(
                f"{path} has records of other lengths than"
                f" {bin_path(_masked_column(columns, name).prefix).name}"
            )
        if (
            ends
            and name in token_columns(prepared.names)
            and (missing := _count_unended(column, lengths, ends))
        ):
            found.ends.append(
                f"{path} has {missing:,} records that do not end with token"
                f" {', '.join(map(str, ends))}"
            )


def _masked_column(columns: Mapping[str, Column], mask: str) -> Column:
    """The column of ids that a mask belongs to."""
    return columns[mask.removesuffix(MASK).removesuffix("_") or "tokens"]


def _count_unended(column: Column, lengths: Ids, ends: Sequence[int]) -> int:
    """The number of records that do not end with these tokens."""
    behind = np.cumsum(lengths)
    values = column.slice(0, column.elements)
    wrong = lengths < len(ends)
    for place, token in enumerate(reversed(ends), start=1):
        whole = ~wrong
        wrong[whole] |= values[behind[whole] - place] != token
    return int(wrong.sum())


def _chunks(column: Column, seen: Callable[[int], None]) -> Iterator[npt.NDArray[Any]]:
    for begin in range(0, column.elements, CHUNK):
        values = column.slice(begin, min(begin + CHUNK, column.elements))
        yield values
        seen(values.nbytes)


def check_rows(
    folder: Path, prepared: PreparedData, name: str, seen: Callable[[int], None]
) -> Check:
    """Check the rows of one way of packing: none too long, every piece within its record, no token
    twice, none of a text left out, no record in no row without a count, as many as were counted.
    """
    about = read_marker(folder, name) or {}
    how = str(about.get("pack"))
    seq_len = int(about.get("seq_len", 0))
    target_len = about.get("target_len")
    what = f"rows: {how}, {seq_len:,} tokens" + (
        f", targets of {target_len:,}" if target_len is not None else ""
    )
    found, rows, tokens, first = list[str](), 0, 0, prepared.names[0]
    records = planned = 0
    pieces = prepared.documents == "masked"
    most = longest_piece(seq_len, prepared.framing, how) if pieces else seq_len
    try:
        packed = read_packed(folder, prepared, seq_len, how, target_len)
        for split, sources in packed.rows.items():
            parts = [part.number for source in prepared.splits[split] for part in source.parts]
            for number, count in zip(parts, itertools.chain.from_iterable(sources), strict=True):
                table = Column(
                    column_prefix(folder, split, table_name(how, seq_len, target_len), number)
                )
                table.prove()
                column = Column(column_prefix(folder, split, first, number))
                if wrong := _row_fault(
                    table,
                    column,
                    most,
                    count,
                    picked=prepared.documents in WHOLE_RECORDS,
                    cut_left=truncation(how) == "left",
                ):
                    found.append(f"{bin_path(table.prefix)} {wrong}")
                elif prepared.documents == "text" and (missed := _missed(table, column, seq_len)):
                    found.append(f"{bin_path(table.prefix)} leaves out {missed:,} tokens")
                records += len(column)
                planned += len(np.unique(table.slice(0, table.elements)[::3]))
                rows += len(table)
                tokens += _count_row_tokens(
                    folder, split, number, prepared, table, seq_len, target_len
                )
                seen(2 * table.elements * table.dtype.itemsize)
        total = packed.total
        left_out = records - planned
        if not found and left_out != total.lost + total.too_long + total.untrained:
            found.append(f"{folder / name} does not count all of {left_out:,} records in no row")
        if not found and (rows, tokens) != (total.rows, total.tokens):
            found.append(
                f"{folder / name} counts {total.rows:,} rows and {total.tokens:,} tokens, there are"
                f" {rows:,} and {tokens:,}"
            )
    except WrongInput as error:
        found.append(str(error))
    return Check(what, not found, "; ".join(found[:NAMED]) if found else str(packed))


def _count_row_tokens(
    folder: Path,
    split: Split,
    number: int,
    prepared: PreparedData,
    table: Column,
    seq_len: int,
    target_len: int | None,
) -> int:
    """The number of tokens in the rows of a part."""
    if prepared.documents not in WHOLE_RECORDS:
        return int(table.slice(2, table.elements)[::3].sum())
    pieces, total = table.slice(0, table.elements), 0
    records, begins = pieces[::3], pieces[1::3]
    for name, most in column_limits(prepared.documents, seq_len, target_len).items():
        column = Column(column_prefix(folder, split, name, number))
        inside = (records >= 0) & (records < len(column))
        lengths = column.lengths(0, len(column))[records[inside]] - begins[inside]
        total += int(np.minimum(lengths, most).sum())
    return total


def _missed(table: Column, tokens: Column, seq_len: int) -> int:
    """How many tokens of texts are in no row, of those that have a label or are one: all but the
    last of a text that is a token longer than full rows, and all of one that is a token alone.
    """
    record, begin, length = table.slice(0, table.elements).reshape(-1, 3).T
    reached = np.zeros(len(tokens), np.int64)
    np.maximum.at(reached, record, begin + length)
    lengths = tokens.lengths(0, len(tokens)).astype(np.int64)
    needed = np.where((lengths - 1) % seq_len == 0, lengths - 1, lengths)
    return int(np.maximum(needed - reached, 0).sum())


def _row_fault(
    table: Column, tokens: Column, seq_len: int, count: int, *, picked: bool, cut_left: bool
) -> str | None:
    """The fault of a part's rows; None if there is none. `picked`: each row is one record, and
    records may be left out. `cut_left`: the beginning of a record may be left out.
    """
    pieces = table.slice(0, table.elements)
    if len(table) != count or len(pieces) % 3:
        return f"has {len(table):,} rows, {count:,} were planned"
    record, begin, length = pieces.reshape(-1, 3).T
    if not len(record):
        return None
    if record.min() < 0 or record.max() >= len(tokens) or length.min() < 1:
        return "plans records that are not there"
    sizes = table.lengths(0, len(table)) // 3
    if (sizes < 1).any() or np.add.reduceat(length, np.cumsum(sizes) - sizes).max() > seq_len:
        return f"has rows of no piece, or of more than {seq_len:,} tokens"
    if (begin + length > tokens.lengths(0, len(tokens))[record]).any():
        return "plans more of a record than there is"
    if picked and (len(record) != len(table) or (np.diff(record) <= 0).any()):
        return "plans some records twice, or more than one in a row"
    order = np.lexsort((begin, record))
    record, begin, length = record[order], begin[order], length[order]
    new = np.diff(record, prepend=-1) != 0
    begins_late = not cut_left and (begin[new] != 0).any()
    if begins_late or (begin[1:] != (begin + length)[:-1])[~new[1:]].any():
        return "plans some tokens twice, or leaves some out"
    return None
