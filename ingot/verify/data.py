"""`ingot verify data`: every file and every count of what was ingested and prepared for a recipe. Reads all of it, changes nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ingot.base.errors import Failed, WrongInput
from ingot.base.markers import problems, read_marker
from ingot.base.progress import Progress
from ingot.config.recipe import Recipe
from ingot.data import manifest, raw, vocabulary
from ingot.data.columns import Column, bin_path, column_prefix
from ingot.data.manifest import Part, Prepared, prepared_for
from ingot.data.packing import MASK, markers_of, read_packed
from ingot.data.raw import open_raw
from ingot.data.sources import Split, recipe_sources
from ingot.tokenizers.load import load_tokenizer, resolve_tokenizer
from ingot.tokenizers.templates import find_template, with_template
from ingot.tokenizers.tokenizer import Tokenizer
from ingot.verify.proof import Check, Proof

NAMED = 3
CHUNK = 1 << 22
"""Elements that are looked at together."""

Ids = npt.NDArray[np.int64]


def verify_data(recipe: Recipe) -> Proof:
    """Check checksums, indexes, counts, ids, masks, ends, row tables, and that tokenizer and sources are still those of the recipe."""
    folder = recipe.folder
    groups = [
        ("raw documents", folder.raw, raw.MANIFEST, "ingot ingest"), ("tokenizer", folder.tokenizer, vocabulary.MARKER, "ingot prepare"),
        ("columns", folder.columns, manifest.MANIFEST, "ingot prepare"),
    ]
    size = sum(int(entry["bytes"]) for _, where, name, _ in groups for entry in _entries(where, name))
    with Progress("verify", total=-(-2 * size // 10**6), unit="MB") as progress:
        seen = _Seen(progress)
        checks = [_files(*group, seen) for group in groups]
        checks.append(_sources(recipe))
        try:
            prepared = prepared_for(recipe)
        except WrongInput as error:
            return Proof("data", [*checks, Check("manifest of the columns", False, str(error))])
        here, of_tokenizer = _tokenizer(recipe, prepared)
        checks += [*of_tokenizer, *_columns(recipe, prepared, here, seen)]
        for name in markers_of(folder.columns, prepared):
            checks += [_files(name.removesuffix(".json"), folder.columns, name, "ingot prepare", seen), _table(folder.columns, prepared, name, seen)]
    return Proof("data", checks)


class _Seen:
    """Bytes that were looked at so far."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._bytes = progress, 0

    def __call__(self, size: int) -> None:
        self._bytes += size
        self._progress.update(self._bytes // 10**6)


def _entries(folder: Path, name: str) -> list[Mapping[str, Any]]:
    entries: list[Mapping[str, Any]] = (read_marker(folder, name) or {}).get("files", [])
    return entries


def _files(what: str, folder: Path, name: str, again: str, seen: Callable[[int], None]) -> Check:
    """Every file that the marker vouches for: there, of its size, with its SHA-256."""
    if read_marker(folder, name) is None:
        return Check(f"files: {what}", False, f"{folder / name} is missing or torn; run `{again}`")
    found, entries = list[str](), _entries(folder, name)
    for entry in entries:
        found += problems(folder, {"files": [entry]}, checksums=True)
        seen(int(entry["bytes"]))
    size = sum(int(entry["bytes"]) for entry in entries)
    return _judged(f"files: {what}", found, f"{len(entries):,} files, {size / 1e6:,.1f} MB, all checksums right", again)


def _judged(what: str, found: Sequence[str], right: str, again: str = "ingot prepare") -> Check:
    """The check of what may have any number of faults; the first of them are named."""
    more = f"; and {len(found) - NAMED:,} more" if len(found) > NAMED else ""
    return Check(what, not found, "; ".join(found[:NAMED]) + f"{more}; run `{again}` again" if found else right)


def _sources(recipe: Recipe) -> Check:
    what = "sources since they were ingested"
    try:
        ingested = open_raw(recipe, unchanged=True)
    except WrongInput as error:
        return Check(what, False, str(error))
    sources = [source for sources in ingested.splits.values() for source in sources]
    return Check(what, True, f"{len(sources)} sources, {sum(source.documents for source in sources):,} documents, those of the recipe, unchanged")


def _tokenizer(recipe: Recipe, prepared: Prepared) -> tuple[Tokenizer | None, list[Check]]:
    """That ids and templates are those of the tokenizer that lies here, and that this is the recipe's. And the tokenizer, if it can be read."""
    try:
        here = load_tokenizer(recipe.folder.tokenizer)
    except WrongInput as error:
        return None, [Check("tokenizer of the columns", False, str(error))]
    same = (here.identity(), here.template_identity, here.vocab_size) == (prepared.tokenizer, prepared.template, prepared.vocab_size)
    detail = f"{here.vocab_size:,} ids, identity {here.identity()}"
    other = f"the columns were made with tokenizer {prepared.tokenizer}, {recipe.folder.tokenizer} is {here.identity()}; run `ingot prepare` again"
    return here, [Check("tokenizer of the columns", same, detail if same else other), _of_recipe(recipe, here)]


def _of_recipe(recipe: Recipe, here: Tokenizer) -> Check:
    what = "tokenizer of the recipe"
    try:
        template = None if recipe.tokenizer.template is None else find_template(recipe.tokenizer.template)
        if recipe.trains_tokenizer:
            same = template is None or with_template(here, template).identity() == here.identity()
            return Check(what, same, "learnt from these documents" if same else "the recipe's tokenizer.template is another one; run `ingot prepare`")
        asked = load_tokenizer(resolve_tokenizer(recipe))
    except Failed as error:
        return Check(what, None, str(error))
    except WrongInput as error:
        return Check(what, False, str(error))
    asked = asked if template is None else with_template(asked, template)
    if asked.identity() == here.identity():
        return Check(what, True, f"template {here.template_identity or 'none'}")
    differs = "template" if asked.template != here.template else "vocabulary or special tokens"
    where = f"{recipe.folder.tokenizer} has {here.identity()}"
    return Check(what, False, f"the recipe's has another {differs}: identity {asked.identity()}, {where}; run `ingot prepare`")


@dataclass
class _Found:
    """What is wrong with the parts, by check."""

    index: list[str]
    counts: list[str]
    ids: list[str]
    masks: list[str]
    ends: list[str]


def _columns(recipe: Recipe, prepared: Prepared, here: Tokenizer | None, seen: Callable[[int], None]) -> list[Check]:
    """Look at every element of every part."""
    found, names = _Found([], [], [], [], []), [column["name"] for column in prepared.columns]
    parts = [(split, source, part) for split, sources in prepared.splits.items() for source, one in enumerate(sources) for part in one.parts]
    end = _end(recipe, here)
    for split, _, part in parts:
        try:
            _part(recipe.folder.columns, split, part, prepared, names, end, found, seen)
        except WrongInput as error:
            found.index.append(str(error))
    documents, tokens = (sum(getattr(part, what) for _, _, part in parts) for what in ("documents", "tokens"))
    totals = [(prepared.total(split, what), sum(getattr(part, what) for of, _, part in parts if of == split)) for split in prepared.splits
              for what in ("documents", "tokens", "bytes")]
    if any(total != counted for total, counted in totals):
        found.counts.append("the totals of manifest.json are not the sums of its parts")
    checks = [
        _judged("columns: indexes", found.index, f"{len(parts):,} parts of {len(names)} columns"),
        _judged("columns: counts", found.counts, f"{documents:,} documents, {tokens:,} tokens"),
        _judged("columns: ids", found.ids, f"all below {prepared.vocab_size:,}"),
    ]
    if MASK in names:
        checks.append(_judged("columns: masks", found.masks, "0 or 1, one for each token"))
    return [*checks, _ends_check(recipe, end, found.ends)]


def _end(recipe: Recipe, here: Tokenizer | None) -> int | None:
    """The token that every record ends with; None where none is promised."""
    sources = [source for sources in recipe_sources(recipe).values() for source in sources]
    if here is None or recipe.objective.kind != "pretrain" or any(source.source.startswith("megatron:") for source in sources):
        return None
    return here.after[-1] if here.after else None


def _ends_check(recipe: Recipe, end: int | None, found: Sequence[str]) -> Check:
    what = "columns: end of each record"
    if end is not None:
        return _judged(what, found, f"token {end}")
    if recipe.objective.kind != "pretrain":
        return Check(what, None, "a chat ends as its template says; look at it with `ingot show mask`")
    return Check(what, None, "not promised: columns that were made elsewhere, or a tokenizer that has no EOS or cannot be read")


def _part(
    folder: Path, split: Split, part: Part, prepared: Prepared, names: Sequence[str], end: int | None, found: _Found, seen: Callable[[int], None]
) -> None:
    """Add what is wrong with one part to `found`. Raises WrongInput where an index is damaged."""
    columns = {name: Column(column_prefix(folder, split, name, part.number)) for name in names}
    first = columns[names[0]]
    for name, column in columns.items():
        column.prove()
        path = bin_path(column.prefix)
        counted = (len(column), column.elements)
        if counted != (part.documents, part.tokens):
            found.counts.append(f"{path} has {counted[0]:,} documents and {counted[1]:,} tokens, manifest.json says {part.documents:,} and {part.tokens:,}")
        if not np.array_equal(column.lengths(0, len(column)), first.lengths(0, len(first))):
            found.masks.append(f"{path} has records of other lengths than {bin_path(first.prefix).name}")
        below = 2 if name == MASK else prepared.vocab_size
        wrong = sum(int(((values < 0) | (values >= below)).sum()) for values in _chunks(column, seen))
        if wrong:
            (found.masks if name == MASK else found.ids).append(f"{path} has {wrong:,} elements that are not below {below:,}")
    if end is not None:
        lengths = first.lengths(0, len(first)).astype(np.int64)
        ends = np.cumsum(lengths)[lengths > 0]
        missing = int((lengths == 0).sum()) + int((first.slice(0, first.elements)[ends - 1] != end).sum())
        if missing:
            found.ends.append(f"{bin_path(first.prefix)} has {missing:,} records that do not end with token {end}")


def _chunks(column: Column, seen: Callable[[int], None]) -> Iterator[npt.NDArray[Any]]:
    for begin in range(0, column.elements, CHUNK):
        values = column.slice(begin, min(begin + CHUNK, column.elements))
        yield values
        seen(values.nbytes)


def _table(folder: Path, prepared: Prepared, name: str, seen: Callable[[int], None]) -> Check:
    """Rows of one way of packing: none too long, every piece within its record, no token twice, as many as were counted."""
    about = read_marker(folder, name) or {}
    how, seq_len = str(about.get("pack")), int(about.get("seq_len", 0))
    what = f"rows: {how}, {seq_len:,} tokens"
    found, rows, tokens = list[str](), 0, 0
    try:
        packed = read_packed(folder, prepared, seq_len, how)
        for split, sources in packed.rows.items():
            parts = [part.number for source in prepared.splits[split] for part in source.parts]
            for number, count in zip(parts, itertools.chain.from_iterable(sources), strict=True):
                table = Column(column_prefix(folder, split, f"rows-{how}-{seq_len}", number))
                table.prove()
                if wrong := _rows_of(table, Column(column_prefix(folder, split, "tokens", number)), seq_len, count):
                    found.append(f"{bin_path(table.prefix)} {wrong}")
                rows, tokens = rows + len(table), tokens + int(table.slice(2, table.elements)[::3].sum())
                seen(2 * table.elements * table.dtype.itemsize)
        if not found and (rows, tokens) != (packed.total.rows, packed.total.tokens):
            total = packed.total
            found.append(f"{folder / name} counts {total.rows:,} rows and {total.tokens:,} tokens, there are {rows:,} and {tokens:,}")
    except WrongInput as error:
        found.append(str(error))
    return Check(what, not found, "; ".join(found[:NAMED]) if found else str(packed))


def _rows_of(table: Column, tokens: Column, seq_len: int, count: int) -> str | None:
    """What is wrong with the rows of a part."""
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
    order = np.lexsort((begin, record))
    record, begin, length = record[order], begin[order], length[order]
    new = np.diff(record, prepend=-1) != 0
    if (begin[new] != 0).any() or (begin[1:] != (begin + length)[:-1])[~new[1:]].any():
        return "plans some tokens twice, or leaves some out"
    return None
