"""Markers of our own making, as a writer would have written them."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from ingot.base.markers import FileEntry, read_marker, write_marker


def changed(folder: Path, name: str, without: Collection[str] = (), **values: object) -> None:
    """Write a marker anew with other values and `without` some; it vouches for itself as any
    does.
    """
    marker = read_marker(folder, name)
    assert marker is not None
    files = [FileEntry(**entry) for entry in marker.pop("files")]
    kept = {key: value for key, value in marker.items() if key not in without}
    write_marker(folder, name, {**kept, **values}, files)
