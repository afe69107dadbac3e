"""`ingot verify data`: checks every file and every count of a recipe's ingested and prepared data.
Reads all of it, changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ingot.base.errors import Failed, WrongInput
from ingot.base.markers import problems, read_marker
from ingot.base.progress import Progress
from ingot.config.recipe import Recipe
from ingot.data.columns import manifest
from ingot.data.columns.manifest import PreparedData, prepared_for
from ingot.data.packing.tables import markers_of
from ingot.data.raw import store as raw
from ingot.data.raw.store import open_raw
from ingot.tokenizers.chats.templates import with_recipe_template
from ingot.tokenizers.load import PREPARED, load_tokenizer, resolve_tokenizer
from ingot.tokenizers.tokenizer import Tokenizer
from ingot.verify.data_columns import check_columns, check_rows
from ingot.verify.proof import Check, Proof, check_of_faults


def verify_data(recipe: Recipe) -> Proof:
    """Check checksums, indexes, counts, ids, masks, ends, row tables, and that tokenizer and
    sources are still those of the recipe.
    """
    folder = recipe.folder
    groups = [
        ("raw documents", folder.raw, raw.MANIFEST, "ingot ingest"),
        ("tokenizer", folder.tokenizer, PREPARED, "ingot prepare"),
        ("columns", folder.columns, manifest.MANIFEST, "ingot prepare"),
    ]
    size = sum(
        int(entry["bytes"]) for _, where, name, _ in groups for entry in _entries(where, name)
    )
    with Progress("verify", total=-(-2 * size // 10**6), unit="MB") as progress:
        seen = _BytesDone(progress)
        checks = [_check_files(*group, seen) for group in groups]
        checks.append(_check_sources(recipe))
        try:
            prepared = prepared_for(recipe)
        except WrongInput as error:
            return Proof("data", [*checks, Check("manifest of the columns", False, str(error))])
        here, of_tokenizer = _check_tokenizer(recipe, prepared)
        checks += [*of_tokenizer, *check_columns(recipe, prepared, here, seen)]
        for name in markers_of(folder.columns, prepared):
            checks += [
                _check_files(
                    name.removesuffix(".json"), folder.columns, name, "ingot prepare", seen
                ),
                check_rows(folder.columns, prepared, name, seen),
            ]
    return Proof("data", checks)


class _BytesDone:
    """Counts the bytes that were checked, for the progress display."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._bytes = progress, 0

    def __call__(self, size: int) -> None:
        self._bytes += size
        self._progress.update(self._bytes // 10**6)


def _entries(folder: Path, name: str) -> list[Mapping[str, Any]]:
    entries: list[Mapping[str, Any]] = (read_marker(folder, name) or {}).get("files", [])
    return entries


def _check_files(
    what: str, folder: Path, name: str, again: str, seen: Callable[[int], None]
) -> Check:
    """Whether every file that the marker lists exists with its size and SHA-256."""
    if read_marker(folder, name) is None:
        return Check(
            f"files: {what}", False, f"{folder / name} is missing or torn; run `{again} --again`"
        )
    found, entries = list[str](), _entries(folder, name)
    for entry in entries:
        found += problems(folder, {"files": [entry]}, checksums=True)
        seen(int(entry["bytes"]))
    size = sum(int(entry["bytes"]) for entry in entries)
    return check_of_faults(
        f"files: {what}",
        found,
        f"{len(entries):,} files, {size / 1e6:,.1f} MB, all checksums right",
        again,
    )


def _check_sources(recipe: Recipe) -> Check:
    what = "sources since they were ingested"
    try:
        ingested = open_raw(recipe, unchanged=True)
    except WrongInput as error:
        return Check(what, False, str(error))
    sources = [source for sources in ingested.splits.values() for source in sources]
    return Check(
        what,
        True,
        f"{len(sources)} sources, {sum(source.documents for source in sources):,} documents, those"
        " of the recipe, unchanged",
    )


def _check_tokenizer(
    recipe: Recipe, prepared: PreparedData
) -> tuple[Tokenizer | None, list[Check]]:
    """Whether the columns were made with the run folder's tokenizer, and whether that is the
    recipe's; and the tokenizer itself, if it can be read.
    """
    try:
        here = load_tokenizer(recipe.folder.tokenizer)
    except WrongInput as error:
        return None, [Check("tokenizer of the columns", False, str(error))]
    same = (here.identity(), here.template_identity, here.vocab_size) == (
        prepared.tokenizer,
        prepared.template,
        prepared.vocab_size,
    )
    detail = f"{here.vocab_size:,} ids, identity {here.identity()}"
    other = (
        f"the columns were made with tokenizer {prepared.tokenizer}, {recipe.folder.tokenizer} is"
        f" {here.identity()}; run `ingot prepare --again`"
    )
    return here, [
        Check("tokenizer of the columns", same, detail if same else other),
        _check_recipe_tokenizer(recipe, here),
    ]


def _check_recipe_tokenizer(recipe: Recipe, here: Tokenizer) -> Check:
    what = "tokenizer of the recipe"
    try:
        if recipe.trains_tokenizer:
            same = with_recipe_template(recipe, here).identity() == here.identity()
            return Check(
                what,
                same,
                (
                    "learnt from these documents"
                    if same
                    else "the recipe's tokenizer.template is another one; run `ingot prepare`"
                ),
            )
        asked = with_recipe_template(recipe, load_tokenizer(resolve_tokenizer(recipe)))
    except Failed as error:
        return Check(what, None, str(error))
    except WrongInput as error:
        return Check(what, False, str(error))
    if asked.identity() == here.identity():
        return Check(what, True, f"template {here.template_identity or 'none'}")
    differs = "template" if asked.template != here.template else "vocabulary or special tokens"
    where = f"{recipe.folder.tokenizer} has {here.identity()}"
    return Check(
        what,
        False,
        f"the recipe's has another {differs}: identity {asked.identity()}, {where}; run `ingot"
        " prepare`",
    )
