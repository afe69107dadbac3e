"""Files of a run folder that stay in its replica until they are needed. A note in their folder says
where they are; each is fetched into a hidden folder and may be dropped again. Hidden files are
never pushed to a replica.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from ingot.base.errors import Failed
from ingot.base.remote.bucket import open_bucket
from ingot.base.remote.index import IndexEntry, read_index
from ingot.base.remote.service import Missing
from ingot.base.remote.transfer import OtherContent, fetch_file
from ingot.base.storage import disk_errors, lock_file, write_atomic

HIDDEN, NOTE, PARTIAL = ".later", "from.json", ".partial"
PATIENCE_S = 20.0
"""Seconds for which one attempt to fetch a file repeats its requests; the caller tries again, and
can do something else in between.
"""


class UnusableReplica(Failed):
    """The replica does not have the file that was prepared; trying again would not help."""


def defer_files(root: Path, folder: str, url: str) -> None:
    """From now on fetch files of `folder`, a path below the run folder `root`, from the replica at
    `url` when they are needed; files that were fetched before are deleted.
    """
    forget_deferred(root, folder)
    write_atomic(root / folder / HIDDEN / NOTE, json.dumps({"url": url, "folder": folder}))


def forget_deferred(root: Path, folder: str) -> None:
    """From now on fetch nothing: a file that is not in `folder` is missing."""
    shutil.rmtree(root / folder / HIDDEN, ignore_errors=True)


def deferred_files_of(folder: Path) -> DeferredFiles | None:
    """The deferred files of a folder; None if it has none."""
    try:
        note = json.loads((folder / HIDDEN / NOTE).read_bytes())
    except FileNotFoundError:
        return None
    return DeferredFiles(folder / HIDDEN, str(note["url"]), str(note["folder"]))


class DeferredFiles:
    """Files that are fetched to `folder` when they are needed. Threads and processes may share it:
    each file is fetched by one of them.
    """

    def __init__(self, folder: Path, url: str, within: str) -> None:
        self.folder, self._url, self._within = folder, url, within
        self._entries: Mapping[str, IndexEntry] = {}
        self._lock = threading.Lock()

    def bring(self, name: str, sha256: str, *, wait: bool = True) -> bool:
        """Fetch a file unless it is present. Without `wait`, returns False if another process is
        fetching it.

        Raises:
            UnusableReplica: the replica does not have the file, or not with this checksum.
            Failed: the service cannot be reached, or the disk is full.
        """
        path = self.folder / name
        if path.exists():
            return True
        with self._file_lock(name, wait=wait) as mine:
            if mine and not path.exists():
                self._fetch(name, path, sha256)
            return mine

    def drop(self, name: str) -> None:
        """Delete a fetched file to free its disk space. Processes that have it open can go on
        reading it; it is fetched again when needed.
        """
        (self.folder / name).unlink(missing_ok=True)
        with self._file_lock(name, wait=False) as mine:
            if mine:  # left by a process that was killed
                (self.folder / f"{name}{PARTIAL}").unlink(missing_ok=True)

    @contextlib.contextmanager
    def _file_lock(self, name: str, *, wait: bool) -> Iterator[bool]:
        with disk_errors(self.folder / name):
            descriptor = os.open(self.folder / f"{name}.lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            lock_file(descriptor, self.folder / name, wait=wait)
            yield True
        except BlockingIOError:
            yield False
        finally:
            os.close(descriptor)

    def _fetch(self, name: str, path: Path, sha256: str) -> None:
        bucket = open_bucket(self._url, patience_s=PATIENCE_S)
        partial = path.with_name(f"{name}{PARTIAL}")
        why = "it is not there"
        for anew in (False, True):  # a writer may have put it elsewhere since the index was read
            entry = self._index(anew=anew).get(f"{self._within}/{name}")
            if entry is None:
                continue
            try:
                fetch_file(bucket, entry.key, path, sha256=sha256, partial=partial)
                return
            except OtherContent:
                why = "it is not what was prepared for this training"
            except Missing as error:
                why = str(error)
        raise UnusableReplica(
            f"{bucket.url_of(f'{self._within}/{name}')} cannot be used: {why}; prepare and launch"
            " again"
        )

    def _index(self, *, anew: bool) -> Mapping[str, IndexEntry]:
        with self._lock:
            if anew or not self._entries:
                self._entries = read_index(open_bucket(self._url, patience_s=PATIENCE_S)).entries
            return self._entries
