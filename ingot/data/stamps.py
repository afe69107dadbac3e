"""Stamps of the files that were ingested, and what tells them from the files that are there now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ingot.base.errors import IngotError
from ingot.base.markers import fingerprint
from ingot.config.sections.data import SourceSettings
from ingot.data.sourcefile import SourceFile
from ingot.data.sources import find_source, is_local

# Of a source with more files only the fingerprint of all is kept: the manifest stays small.
NAMED_FILES = 1000

Stamp = dict[str, Any]


def stamps_of(files: Sequence[SourceFile]) -> tuple[str, list[Stamp]]:
    """The fingerprint of all stamps, and the stamps themselves where they are few."""
    stamps = [file.stamp for file in files]
    return fingerprint(stamps), stamps if len(stamps) <= NAMED_FILES else []


def change(source: SourceSettings, stamps: str, seen: Sequence[Stamp]) -> str | None:
    """What is different now about the files of a source on this machine, in words; None where
    nothing is.

    A source that is gone altogether, or lies elsewhere, counts as unchanged: what was ingested is a
    copy.
    """
    if not is_local(source):
        return None
    try:
        files = find_source(source)
    except IngotError:
        return None
    if stamps_of(files)[0] == stamps:
        return None
    before, after = (
        {stamp["path"]: stamp for stamp in seen},
        {file.stamp["path"]: file.stamp for file in files},
    )
    if not before:
        return f"one of {len(files):,} files is another one"
    for path, stamp in after.items():
        if path not in before:
            return f"{path} is new"
        if stamp != before[path]:
            return f"{path} {_difference(before[path], stamp)}"
    return f"{next(path for path in before if path not in after)} is gone"


def _difference(before: Stamp, after: Stamp) -> str:
    if before["bytes"] != after["bytes"]:
        return f"has {after['bytes']:,} bytes, it had {before['bytes']:,}"
    return "was written again"
