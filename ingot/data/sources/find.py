"""Which files a source of the recipe stands for, and stamps that tell cheaply whether they changed
since `ingest`. Reads no content.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ingot.base.errors import IngotError, WrongInput
from ingot.base.markers import fingerprint
from ingot.base.storage import is_remote
from ingot.config.doors import SOURCES
from ingot.config.recipe import NO_SOURCE, Recipe
from ingot.config.sections.data import SourceSettings, ValidationShare
from ingot.data.sources.kind import SourceKind
from ingot.data.sources.local_files import STDLIB, LocalFiles, find_files_of
from ingot.data.sources.selection import Tell, as_asked, not_excluded, of_split
from ingot.data.sources.source_file import SourceFile
from ingot.data.splits import Split


def recipe_sources(recipe: Recipe) -> dict[Split, list[SourceSettings]]:
    """The sources of each split that has sources of its own."""
    splits: dict[Split, list[SourceSettings]] = {"train": list(recipe.data.train)}
    if recipe.data.holds_out and not isinstance(recipe.data.validation, ValidationShare):
        splits["validation"] = list(recipe.data.validation)
    return splits


def source_files(recipe: Recipe, tell: Tell = None) -> dict[Split, list[list[SourceFile]]]:
    """The files of every source, by split; names are made distinct if two sources have files of the
    same name. `tell`: as of `find_source`.

    Raises:
        WrongInput: a source (named by its place in the recipe) matches no file; or there is no
            source.
    """
    if not recipe.data.train:
        raise WrongInput(NO_SOURCE)
    taken: set[str] = set()
    found: dict[Split, list[list[SourceFile]]] = {}
    for split, sources in recipe_sources(recipe).items():
        found[split] = []
        for number, source in enumerate(sources):
            files = find_source(source, f"data.{split}[{number}].source", tell=tell)
            files = [
                replace(file, project=recipe.cloud.project) if file.format == "bigquery" else file
                for file in _distinct(files)
            ]
            files = _apart(files, source.source, taken)
            taken.update(file.name for file in files)
            found[split].append(files)
    return found


def _distinct(files: list[SourceFile]) -> list[SourceFile]:
    """Make names distinct by a suffix; within one source they are equal only where characters that
    UTF-8 cannot hold were replaced.
    """
    counts, made = Counter(file.name for file in files), list[SourceFile]()
    if len(counts) == len(files):
        return files
    for number, file in enumerate(files):
        made.append(file if counts[file.name] == 1 else replace(file, name=f"{file.name}~{number}"))
    return made


def _apart(files: list[SourceFile], source: str, taken: Collection[str]) -> list[SourceFile]:
    """Give those files a suffix whose names an earlier source has. It is made of the source, not
    of its place in the recipe, and stands behind the name, where `validation.group` does not look
    and `splits.chosen` passes it over: a source more, before or behind, changes nothing in what is
    held out of this one.
    """
    own = {file.name for file in files}
    equal = own.intersection(taken)
    if not equal:
        return files
    suffix = next(
        suffix
        for suffix in _suffixes(source)
        if not any(f"{name}{suffix}" in taken or f"{name}{suffix}" in own for name in equal)
    )
    return [
        replace(file, name=f"{file.name}{suffix}") if file.name in equal else file for file in files
    ]


def _suffixes(source: str) -> Iterator[str]:
    """Suffixes for a source's files: of the end of its path, which is the same when the data is
    moved; of more of it where that is another source's, too; and of a source that is given twice.
    """
    parts = source.rstrip("/").split("/")
    for count in range(2, max(2, len(parts)) + 1):
        yield f"~{fingerprint(parts[-count:])[:8]}"
    for number in itertools.count(1):
        yield f"~{fingerprint([*parts, number])[:8]}"


def source_stamps(recipe: Recipe) -> dict[Split, list[dict[str, Any]]]:
    """Size and modification time of every source file, by split: a cheap check of whether the input
    of `ingest` changed.
    """
    return {
        split: [file.stamp for files in sources for file in files]
        for split, sources in source_files(recipe).items()
    }


def find_source(
    source: SourceSettings,
    knob: str = "source",
    *,
    whole: bool = False,
    tell: Tell = None,
) -> list[SourceFile]:
    """The files of one source in reading order, without hidden ones, those that it excludes, and
    those of other splits than it asks for.

    Args:
        whole: files of all splits.
        tell: takes a line for the user about files that are, or are not, taken for those of the
            split. Given where files are going to be read.

    Raises:
        WrongInput: nothing is there, or nothing is left; with `tell`, a pattern of a path's
            `exclude` leaves out none.
        Failed: the storage cannot be reached.
    """
    source = as_asked(source, knob)
    found, is_split = _all_files(source, knob)
    if not found:
        raise WrongInput(f"{knob} {source.source} has no file; name another")
    files = not_excluded(source, found, knob, tell)
    return files if is_split or whole else of_split(source, files, knob, tell)


def _all_files(source: SourceSettings, knob: str) -> LocalFiles:
    scheme = source.scheme
    if not scheme:
        return find_files_of(source, knob)
    kind = SOURCES.find(scheme)
    if kind is None:
        known = ", ".join(f"{name}:" for name in SOURCES.kinds() if name != "builtin")
        raise WrongInput(
            f"{knob} {source.source} is no source that this version reads; give a path, a folder, a"
            f" glob, {known} or {STDLIB}"
        )
    files = [replace(file, kind=scheme) for file in kind().find(source, knob)]
    return LocalFiles(files, is_split=True)


def is_local(source: SourceSettings) -> bool:
    """Whether a source is local (files on this machine or the folder of a data set), so that it is
    cheap to check at any time.
    """
    scheme = source.scheme
    if scheme:
        kind = SOURCES.find(scheme)
        return kind is not None and bool(kind.checks_changes)
    return not is_remote(source.source)


def records_of(file: SourceFile) -> SourceKind | None:
    """The kind of source that yields the records of `file`; None if it is a file to parse."""
    kind: SourceKind | None = SOURCES.load(file.kind, "source")() if file.kind else None
    return kind if kind is not None and kind.yields_records else None


def fetch_files(files: Iterable[SourceFile]) -> None:
    """Prepare files for reading: download a dump, warn of what stamps cannot detect."""
    for file in files:
        if file.kind:
            SOURCES.load(file.kind, "source")().fetch(file)


# For a source of more files, only the fingerprint of all stamps is kept, so that the manifest stays
# small.
NAMED_FILES = 1000

Stamp = dict[str, Any]


def stamps_of(files: Sequence[SourceFile]) -> tuple[str, list[Stamp]]:
    """The fingerprint of all stamps, and the stamps themselves if they are few."""
    stamps = [file.stamp for file in files]
    return fingerprint(stamps), stamps if len(stamps) <= NAMED_FILES else []


def describe_change(
    source: SourceSettings, stamps: str, seen: Sequence[Stamp], knob: str
) -> str | None:
    """A description of what changed in the files of a local source, the one that `knob` names; None
    if nothing did.

    A source that no longer exists, or was moved, counts as unchanged: what was ingested is a copy.
    """
    if not is_local(source):
        return None
    try:
        files = find_source(source, knob)
    except IngotError:
        return None
    if stamps_of(files)[0] == stamps:
        return None
    before = {stamp["path"]: stamp for stamp in seen}
    after = {file.stamp["path"]: file.stamp for file in files}
    if not before:
        return f"one of {len(files):,} files is another one"
    for path, stamp in after.items():
        if path not in before:
            return f"{path} is new"
        if stamp != before[path]:
            return f"{path} {_difference(before[path], stamp)}"
    gone = next((path for path in before if path not in after), None)
    return f"{gone} is gone" if gone else "its files are in another order"


def _difference(before: Stamp, after: Stamp) -> str:
    if before["bytes"] != after["bytes"]:
        return f"has {after['bytes']:,} bytes, it had {before['bytes']:,}"
    return "was written again"
