"""Small JSON files written last, which alone say that what stands beside them is complete.

A folder without its marker is unfinished, whatever else lies in it. The marker lists every file with its size and
SHA-256, so that a torn or changed file is named rather than used.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ingot.base.errors import WrongInput
from ingot.base.storage import sha256_file, write_atomic

SCHEMA = 1


@dataclass(frozen=True)
class FileEntry:
    """One file that a marker vouches for; `path` is relative to the marker's folder."""

    path: str
    bytes: int
    sha256: str


def entry_of(folder: Path, path: str) -> FileEntry:
    full = folder / path
    return FileEntry(path=path, bytes=full.stat().st_size, sha256=sha256_file(full))


def write_marker(folder: Path, name: str, payload: dict[str, Any], files: Iterable[FileEntry]) -> dict[str, Any]:
    """Write `folder/name` atomically. The files must be flushed to disk already. Returns what was written."""
    marker = {"schema": SCHEMA, **payload, "files": [asdict(entry) for entry in files]}
    write_atomic(folder / name, json.dumps(marker, indent=1, ensure_ascii=False) + "\n")
    return marker


def read_marker(folder: Path, name: str) -> dict[str, Any] | None:
    """The marker, or None where there is none or it is not whole JSON.

    Raises:
        WrongInput: a newer ingot wrote it.
    """
    path = folder / name
    try:
        marker = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError, UnicodeDecodeError):
        return None
    if not isinstance(marker, dict):
        return None
    if marker.get("schema", 0) > SCHEMA:
        raise WrongInput(f"{path} has schema {marker['schema']}, newer than this ingot's {SCHEMA}; upgrade ingot")
    return marker


def problems(folder: Path, marker: Mapping[str, Any], *, checksums: bool) -> list[str]:
    """What is wrong with the files that `marker` lists: one line each, [] when all is well.

    Sizes are always compared; with `checksums` every byte is read as well.
    """
    found = []
    for entry in marker.get("files", []):
        path = folder / entry["path"]
        try:
            size = os.stat(path).st_size
        except OSError:
            found.append(f"{path} is missing")
            continue
        if size != entry["bytes"]:
            found.append(f"{path} has {size} bytes, {entry['bytes']} were written")
        elif checksums and sha256_file(path) != entry["sha256"]:
            found.append(f"{path} does not match its checksum")
    return found
