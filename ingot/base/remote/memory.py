"""What a machine remembers about a run folder with a replica: checksums of unchanged files, and the
content on which folder and replica last agreed.

It is stored in a hidden folder of the run folder. If it is lost, files are read again, and files
deleted on one side remain on the other.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.base.listing import unlisted
from ingot.base.progress import say
from ingot.base.remote.bucket import crc32c
from ingot.base.storage import disk_errors, write_atomic

HIDDEN = ".replica"
SETTLED_S = 1.0
"""Seconds after which the modification time of a file identifies its content: two writes within one
tick of the disk's clock have the same time.
"""

Content = tuple[int, str]
"""Bytes and CRC32C."""


@dataclass(frozen=True)
class LocalFile:
    """A file of the run folder; `path` is relative to it."""

    path: str
    bytes: int
    crc32c: str
    mtime_ns: int

    @property
    def content(self) -> Content:
        return self.bytes, self.crc32c


class ChecksumCache:
    """Checksums of the files of a folder, each of which is read again only if it changed.
    Thread-safe.
    """

    def __init__(self, root: Path, name: str) -> None:
        self._root, self._file = root, root / HIDDEN / name
        self._stored = self._read()
        self._checksums: dict[str, list[int | str]] = {
            path: about
            for path, about in self._stored.get("checksums", {}).items()
            if isinstance(about, list) and about
        }

    def current(self, path: str, *, bytes: int | None = None) -> LocalFile | None:
        """The file at `path` as it is now, read only if it changed since its checksum was taken.
        None if there is no such file, or if its size is not `bytes`.
        """
        full = self._root / path
        try:
            about = full.stat()
            if not stat.S_ISREG(about.st_mode) or bytes not in (None, about.st_size):
                return None
            *signature, checksum = self._checksums.get(path, [""])
            if signature != _signature(about):
                checksum = crc32c(full)
                if (
                    _signature(full.stat()) == _signature(about)
                    and time.time() - about.st_mtime > SETTLED_S
                ):
                    self.remember_checksum(path, str(checksum))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return LocalFile(path, about.st_size, str(checksum), about.st_mtime_ns)

    def remember_checksum(self, path: str, checksum: str) -> None:
        self._checksums[path] = [*_signature((self._root / path).stat()), checksum]

    def write(self, **more: Any) -> None:
        """Store the checksums of files that still exist, with the values in `more` beside them."""
        checksums = {
            path: about
            for path, about in sorted(self._checksums.items())
            if (self._root / path).exists()
        }
        write_atomic(self._file, json.dumps({**more, "checksums": checksums}))

    def _read(self) -> dict[str, Any]:
        try:
            stored = json.loads(self._file.read_bytes())
            return stored if isinstance(stored["checksums"], dict) else {}
        except (OSError, ValueError, TypeError, KeyError):
            return {}


class AgreedState(ChecksumCache):
    """`known`: by path, the content that folder and replica last had in common."""

    def __init__(self, root: Path, url: str) -> None:
        super().__init__(root, "memory.json")
        self._url = url
        self.known = self._agreed() if self._stored.get("url") == url else {}

    def _agreed(self) -> dict[str, Content]:
        try:
            known = self._stored["known"].items()
            return {path: (bytes, checksum) for path, (bytes, checksum) in known}
        except (AttributeError, KeyError, TypeError, ValueError):
            return {}

    def write(self, **more: Any) -> None:
        super().write(url=self._url, known=dict(sorted(self.known.items())), **more)


@contextlib.contextmanager
def exclusive_sync(root: Path) -> Iterator[None]:
    """Hold the lock that lets one process and thread on a machine synchronise a run folder at a
    time; others wait for it.
    """
    path = root / HIDDEN / "lock"
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that reads or writes {root} and its replica")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def local_files(root: Path, leave_out: Iterable[str] = ()) -> Iterator[str]:
    """Paths of all files below `root` that are not hidden; links to folders are followed, each
    folder once. `leave_out`: top-level folders.

    Raises:
        WrongInput: a folder cannot be listed.
    """
    seen = set()
    for folder, folders, files in os.walk(root, onerror=unlisted, followlinks=True):
        about = os.stat(folder)
        if (about.st_dev, about.st_ino) in seen:
            folders.clear()
            continue
        seen.add((about.st_dev, about.st_ino))
        inside = Path(folder).relative_to(root)
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".") and (inside / name).as_posix() not in leave_out
        ]
        yield from ((inside / name).as_posix() for name in files if not name.startswith("."))


def _signature(about: os.stat_result) -> list[int | str]:
    return [about.st_size, about.st_mtime_ns, about.st_ino]
