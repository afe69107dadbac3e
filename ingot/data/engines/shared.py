"""Work for machines that share only a bucket with this one: a stage's workers fetch the files that
they open and upload those that they write.

Wraps an engine. Before a stage, every file of `data/` that is in the bucket neither as part of the
run's replica nor from an earlier stage is uploaded, and then a list of all files. A worker has a
folder of its own, whose paths fetch their files on first use; what its tasks wrote is downloaded to
the run folder here before the stage returns. So this machine's disk must hold the run folder, a
worker's only what its tasks touch.
"""

from __future__ import annotations

import atexit
import copy
import dataclasses
import os
import pickle
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PosixPath
from typing import Any

from ingot.base.errors import Failed
from ingot.base.progress import Progress
from ingot.base.remote.bucket import Bucket, crc32c, open_bucket
from ingot.base.remote.index import Index, IndexEntry, content_name, read_index, write_index
from ingot.base.remote.memory import ChecksumCache, LocalFile, local_files
from ingot.base.remote.transfer import fetch_file, in_parallel, send_file
from ingot.base.storage import fsync_folder
from ingot.data.engines.engine import Advance, Engine, Result, Stage, Task

AREA = "engine"
"""Prefix in the bucket of file lists and files that stages exchange; removed at the end."""
KEPT_BYTES = 4 << 30
"""Fetched bytes that a worker process keeps before it empties its folder."""


class SharedEngine:
    """Runs `engine` with workers that share nothing with this machine but the bucket at `url`, the
    address of the run's replica. `root` is the run folder here.
    """

    def __init__(self, engine: Engine, root: Path, url: str) -> None:
        self._engine, self._root, self._bucket = engine, root.absolute(), open_bucket(url)
        self._made: dict[str, IndexEntry] | None = None  # the files in `AREA`, by path

    def run(
        self, work: Stage[Task, Result], tasks: Sequence[Task], progress: Progress
    ) -> list[Result]:
        """See `Engine.run`."""
        if not tasks:
            return []
        listed = self._publish()
        there = RemoteStage(
            pickle.dumps(_absolute(work)), str(self._root), self._bucket.url, listed
        )
        done = self._engine.run(there, [pickle.dumps(_absolute(task)) for task in tasks], progress)
        self._take({entry.path: entry for _, entries in done for entry in entries})
        return [result for result, _ in done]

    def close(self) -> None:
        """End the workers, and remove what the stages left in the bucket."""
        self._engine.close()
        if self._made is not None:
            self._empty()
            self._made = None

    def _publish(self) -> str:
        """Upload files that workers may need and cannot get yet; returns the name of the list of
        all files.
        """
        if self._made is None:
            self._empty()
            self._made = {}
        replica = read_index(self._bucket).entries
        memory = ChecksumCache(self._root, "engine.json")

        def known(path: str) -> IndexEntry | None:
            local = memory.current(path)
            if local is None or self._made is None:
                return None
            for entry in (self._made.get(path), replica.get(path)):
                if entry is not None and entry.holds(local.bytes, local.crc32c):
                    return entry
            return _send(self._bucket, self._root, local)

        paths = [f"data/{path}" for path in local_files(self._root / "data")]
        entries = [entry for entry in in_parallel(known, paths) if entry is not None]
        memory.write()
        self._made = {entry.path: entry for entry in entries}
        name = (  # unique, since a worker process may have seen other lists of this run
            f"{AREA}/stage-{uuid.uuid4().hex}.json"
        )
        write_index(self._bucket, Index(self._made), name)
        return name

    def _take(self, written: Mapping[str, IndexEntry]) -> None:
        """Download what the workers wrote."""
        assert self._made is not None
        in_parallel(
            lambda entry: fetch_file(
                self._bucket, entry.key, self._root / entry.path, content=entry.content
            ),
            list(written.values()),
        )
        for folder in {(self._root / path).parent for path in written}:
            fsync_folder(folder)
        self._made |= written

    def _empty(self) -> None:
        in_parallel(self._bucket.delete, [blob.name for blob in self._bucket.list(f"{AREA}/")])


@dataclass(frozen=True)
class RemoteStage:
    """The stage as sent to a worker: the pickled work with this machine's paths, and the name of
    the object that lists the files.
    """

    work: bytes
    root: str
    url: str
    listed: str

    def open(self) -> Callable[[bytes, Advance], tuple[Any, list[IndexEntry]]]:
        folder = _folder(self.url)
        folder.list_anew(self.listed)
        do = moved(pickle.loads(self.work), Path(self.root), folder.root).open()
        folder.fetched_by_tasks = 0

        def there(task: bytes, advance: Advance) -> tuple[Any, list[IndexEntry]]:
            result = do(moved(pickle.loads(task), Path(self.root), folder.root), advance)
            return result, folder.send_new()

        return there


class SharedPath(PosixPath):
    """A path in a worker's folder, whose file is fetched as soon as it is used."""

    def __str__(self) -> str:
        text = super().__str__()
        for folder in _folders.values():
            if text.startswith(folder.prefix):
                folder.provide(text.removeprefix(folder.prefix))
        return text

    def __fspath__(self) -> str:
        return str(self)

    def glob(self, pattern: str, **how: Any) -> Iterator[SharedPath]:  # type: ignore[override]
        """Includes files that can be fetched."""
        return (path for path in self.iterdir() if path.match(pattern))

    def iterdir(self) -> Iterator[SharedPath]:  # type: ignore[override]
        text = f"{PosixPath.__str__(self)}/"
        here = os.listdir(text) if os.path.isdir(text) else []
        listed = [
            (folder.prefix + path).removeprefix(text).partition("/")[0]
            for folder in _folders.values()
            for path in folder.entries
            if (folder.prefix + path).startswith(text)
        ]
        return (self / name for name in sorted({*here, *listed}))


class _WorkerFolder:
    """A worker process's own copy of parts of the run folder."""

    def __init__(self, url: str) -> None:
        place = tempfile.mkdtemp(prefix="ingot-worker-")
        atexit.register(shutil.rmtree, place, ignore_errors=True)
        self.prefix, self.root, self._bucket = f"{place}/", SharedPath(place), open_bucket(url)
        self.entries: dict[str, IndexEntry] = {}
        self.fetched_by_tasks = 0
        self._seen: dict[str, tuple[int, int]] = {}  # size and mtime of files fetched or sent

    def list_anew(self, name: str) -> None:
        """Read the file list of this stage; local files that have not changed are kept."""
        self._bucket = open_bucket(self._bucket.url)
        index = read_index(self._bucket, name)
        if not index.generation:
            raise Failed(f"{self._bucket.url_of(name)} is missing; run the same command again")
        entries = dict(index.entries)
        for path in [path for path in self._seen if entries.get(path) != self.entries.get(path)]:
            self._drop(path)
        self.entries = entries

    def provide(self, path: str) -> None:
        """Fetch the file of that name, if there is one; create it if it is a folder."""
        entry, full = self.entries.get(path), self.prefix + path
        if entry is None:
            if any(name.startswith(f"{path}/") for name in self.entries):
                os.makedirs(full, exist_ok=True)
        elif path not in self._seen and not os.path.exists(full):
            fetch_file(self._bucket, entry.key, Path(full), content=entry.content)
            self._saw(path)
            self.fetched_by_tasks += entry.bytes

    def send_new(self) -> list[IndexEntry]:
        """Upload what was written since the last call; empty the folder if it holds too much."""
        new = [
            path
            for path in local_files(Path(self.prefix))
            if self._seen.get(path) != _signature(self.prefix + path)
        ]
        sent = []
        for path in new:
            about = os.stat(self.prefix + path)
            local = LocalFile(
                path, about.st_size, crc32c(Path(self.prefix + path)), about.st_mtime_ns
            )
            sent.append(_send(self._bucket, Path(self.prefix), local))
            self._saw(path)
        self.entries |= {entry.path: entry for entry in sent}
        if self.fetched_by_tasks > KEPT_BYTES:
            for path in list(self._seen):
                self._drop(path)
            self.fetched_by_tasks = 0
        return sent

    def _saw(self, path: str) -> None:
        self._seen[path] = _signature(self.prefix + path)

    def _drop(self, path: str) -> None:
        Path(self.prefix + path).unlink(missing_ok=True)  # who has it open keeps it
        del self._seen[path]


_folders: dict[tuple[str, int], _WorkerFolder] = {}


def _folder(url: str) -> _WorkerFolder:
    """This process's folder, not that of the process it was forked from."""
    key = (url, os.getpid())
    for other in [other for other in _folders if other != key]:
        del _folders[other]
    if key not in _folders:
        _folders[key] = _WorkerFolder(url)
    return _folders[key]


def moved(value: Any, root: Path, to: Path) -> Any:
    """The value with every path below `root` moved below `to`."""
    return _each(
        value, lambda path: to / path.relative_to(root) if path.is_relative_to(root) else path
    )


def _absolute(value: Any) -> Any:
    """The value with absolute paths, for processes with another working directory."""
    return _each(value, lambda path: Path(os.path.abspath(path)))


def _each(value: Any, change: Callable[[Path], Path]) -> Any:
    """Apply `change` to all paths in a value, also inside dataclasses, tuples, lists and
    dictionaries.
    """
    if isinstance(value, Path):
        return change(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        other = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(other, field.name, _each(getattr(value, field.name), change))
        return other
    if isinstance(value, dict):
        return {key: _each(item, change) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_each(item, change) for item in value)
    return value


def _send(bucket: Bucket, root: Path, local: LocalFile) -> IndexEntry:
    """Upload a file to the area, named by path and content, so that a repeated task writes the same
    object.
    """
    name = f"{AREA}/files/{content_name(local)}"
    blob = send_file(bucket, root / local.path, name, there=bucket.stat(name))
    return IndexEntry(local.path, name, blob.bytes, blob.crc32c, local.mtime_ns)


def _signature(path: str) -> tuple[int, int]:
    about = os.stat(path)
    return about.st_size, about.st_mtime_ns
