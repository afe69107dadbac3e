"""Commit markers: small JSON files written last, which alone mark the files beside them as
complete.

A folder without its marker is incomplete, whatever else is in it. The marker lists every file with
its size and SHA-256, so that a truncated or changed file is reported rather than used, and ends
with a checksum of itself.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from ingot.base.environment import usable_cores
from ingot.base.errors import WrongInput
from ingot.base.exact_json import compact_json
from ingot.base.storage import sha256_file, write_atomic

SCHEMA = 1
CHECKSUM = "checksum"
COMMIT = "COMMIT.json"
"""The marker of a checkpoint."""
MAX_READERS = 8
"""Files read concurrently for verification, with a megabyte of each in memory."""


@dataclass(frozen=True)
class FileEntry:
    """One file that a marker covers; `path` is relative to the marker's folder."""

    path: str
    bytes: int
    sha256: str


def entry_of(folder: Path, path: str) -> FileEntry:
    full = folder / path
    return FileEntry(path=path, bytes=full.stat().st_size, sha256=sha256_file(full))


def write_marker(
    folder: Path, name: str, payload: dict[str, Any], files: Iterable[FileEntry]
) -> dict[str, Any]:
    """Write `folder/name` atomically. The files must already be flushed to disk. Returns the marker
    as `read_marker` will return it.
    """
    rest = {key: value for key, value in payload.items() if key != CHECKSUM}
    about = json.loads(
        json.dumps({"schema": SCHEMA, **rest, "files": [asdict(entry) for entry in files]})
    )
    marker = {**about, CHECKSUM: _checksum(about)}
    write_atomic(folder / name, _text(marker))
    return marker


def read_marker(folder: Path, name: str) -> dict[str, Any] | None:
    """The marker; None if it is missing or damaged: truncated, or a single bit of it changed.

    Raises:
        WrongInput: a newer ingot wrote it.
    """
    path = folder / name
    try:
        content = path.read_bytes()
        marker = json.loads(content)
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError, UnicodeDecodeError):
        return None
    if not isinstance(marker, dict) or not _is_unchanged(marker, content):
        return None
    if marker.get("schema", 0) > SCHEMA:
        raise WrongInput(
            f"{path} has schema {marker['schema']}, newer than this ingot's {SCHEMA}; upgrade ingot"
        )
    return marker


def checkpoint_markers(checkpoints: Path) -> list[dict[str, Any]]:
    """The commit markers of a training's checkpoints, the newest first; no other file is read."""
    found = (read_marker(folder, COMMIT) for folder in checkpoints.glob("step-*"))
    return sorted((marker for marker in found if marker), key=itemgetter("step"), reverse=True)


def _is_unchanged(marker: dict[str, Any], content: bytes) -> bool:
    rest = {key: value for key, value in marker.items() if key != CHECKSUM}
    # Compare the bytes too: a changed digit of a float, for example, may parse to the same value.
    return marker.get(CHECKSUM) == _checksum(rest) and content == _text(marker).encode(
        errors="surrogatepass"
    )


def _text(marker: Mapping[str, Any]) -> str:
    return json.dumps(marker, indent=1, ensure_ascii=False) + "\n"


def _checksum(marker: Mapping[str, Any]) -> str:
    return hashlib.sha256(_text(marker).encode(errors="surrogatepass")).hexdigest()


def problems(folder: Path, marker: Mapping[str, Any], *, checksums: bool) -> list[str]:
    """The problems of the files that `marker` lists, one line each; [] if there are none.

    Sizes are always compared; with `checksums` the files are also read, several at a time.
    """
    entries = marker.get("files", [])
    if not checksums or len(entries) < 2:
        found = [_problem(folder, entry, checksums=checksums) for entry in entries]
    else:
        with ThreadPoolExecutor(min(len(entries), usable_cores(), MAX_READERS)) as readers:
            found = list(
                readers.map(lambda entry: _problem(folder, entry, checksums=True), entries)
            )
    return [wrong for wrong in found if wrong is not None]


def _problem(folder: Path, entry: Mapping[str, Any], *, checksums: bool) -> str | None:
    path = folder / entry["path"]
    try:
        size = os.stat(path).st_size
    except OSError:
        return f"{path} is missing"
    if size != entry["bytes"]:
        return f"{path} has {size} bytes, {entry['bytes']} were written"
    try:
        if checksums and sha256_file(path) != entry["sha256"]:
            return f"{path} does not match its checksum"
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    return None


def canonical_json(value: Any) -> str:
    """The same text for equal values: keys sorted, no white space, no NaN."""
    return compact_json(value, sort_keys=True)


def fingerprint(value: Any) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of the canonical JSON of `value`."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:16]
