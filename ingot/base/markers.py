"""Small JSON files written last, which alone say that what stands beside them is complete.

A folder without its marker is unfinished, whatever else lies in it. The marker lists every file
with its size and SHA-256, so that a torn or changed file is named rather than used, and ends with a
checksum over itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ingot.base.errors import WrongInput
from ingot.base.storage import sha256_file, write_atomic

SCHEMA = 1
CHECKSUM = "checksum"
MAX_READERS = 8
"""Files that are read at the same time to verify them, a megabyte of each in memory."""


@dataclass(frozen=True)
class FileEntry:
    """One file that a marker vouches for; `path` is relative to the marker's folder."""

    path: str
    bytes: int
    sha256: str


def entry_of(folder: Path, path: str) -> FileEntry:
    full = folder / path
    return FileEntry(path=path, bytes=full.stat().st_size, sha256=sha256_file(full))


def write_marker(
    folder: Path, name: str, payload: dict[str, Any], files: Iterable[FileEntry]
) -> dict[str, Any]:
    """Write `folder/name` atomically. The files must be flushed to disk already. Returns what was
    written, as `read_marker` will.
    """
    rest = {key: value for key, value in payload.items() if key != CHECKSUM}
    about = json.loads(
        json.dumps({"schema": SCHEMA, **rest, "files": [asdict(entry) for entry in files]})
    )
    marker = {**about, CHECKSUM: _checksum(about)}
    write_atomic(folder / name, _text(marker))
    return marker


def read_marker(folder: Path, name: str) -> dict[str, Any] | None:
    """The marker, or None where there is none, or one that is not whole: torn, or a single bit of
    it changed.

    Raises:
        WrongInput: a newer ingot wrote it.
    """
    path = folder / name
    try:
        content = path.read_bytes()
        marker = json.loads(content)
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError, UnicodeDecodeError):
        return None
    if not isinstance(marker, dict) or not _is_as_written(marker, content):
        return None
    if marker.get("schema", 0) > SCHEMA:
        raise WrongInput(
            f"{path} has schema {marker['schema']}, newer than this ingot's {SCHEMA}; upgrade ingot"
        )
    return marker


def _is_as_written(marker: dict[str, Any], content: bytes) -> bool:
    if CHECKSUM in marker:
        rest = {key: value for key, value in marker.items() if key != CHECKSUM}
        # The bytes too: another last digit of a number, say, can mean the same.
        return content == _text(marker).encode(errors="surrogatepass") and marker[
            CHECKSUM
        ] == _checksum(rest)
    # Older ones have none, and end with their files; what ends like a checksum had one, whatever
    # became of its name.
    last = marker[next(reversed(marker))] if marker else None
    return not (isinstance(last, str) and re.fullmatch("[0-9a-f]{64}", last))


def _text(marker: Mapping[str, Any]) -> str:
    return json.dumps(marker, indent=1, ensure_ascii=False) + "\n"


def _checksum(marker: Mapping[str, Any]) -> str:
    return hashlib.sha256(_text(marker).encode(errors="surrogatepass")).hexdigest()


def problems(folder: Path, marker: Mapping[str, Any], *, checksums: bool) -> list[str]:
    """What is wrong with the files that `marker` lists: one line each, [] when all is well.

    Sizes are always compared; with `checksums` every byte is read as well, several files at a time.
    """
    entries = marker.get("files", [])
    if not checksums or len(entries) < 2:
        found = [_problem(folder, entry, checksums=checksums) for entry in entries]
    else:
        with ThreadPoolExecutor(min(len(entries), os.cpu_count() or 1, MAX_READERS)) as readers:
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
    """One text for one value: keys sorted, no white space, no NaN."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )


def fingerprint(value: Any) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of the canonical JSON of `value`."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:16]
