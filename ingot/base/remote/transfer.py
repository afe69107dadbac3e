"""Transfers from and to a bucket, a few files at a time: files, each with the requested content or
not at all, and folders that are complete once their marker exists.

All copies of files between disks and buckets go through here. What differs between them is who
says which object holds which file: the index of a replica, or a marker beside the files.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TypeVar

from ingot.base.errors import Failed
from ingot.base.progress import Progress
from ingot.base.remote import bucket as storage
from ingot.base.remote.bucket import Blob, Bucket, crc32c
from ingot.base.remote.service import Conflict, Digest, Missing, given_up
from ingot.base.storage import disk_errors

CONCURRENT_FILES = 4
"""Files that are transferred at the same time, at most a chunk of each in memory."""

Item = TypeVar("Item")
Result = TypeVar("Result")


class OtherContent(Missing):
    """An object has other content than requested: it was replaced meanwhile, or is damaged."""


def in_parallel(
    act: Callable[[Item], Result],
    items: Sequence[Item],
    *,
    title: str = "",
    sizes: Sequence[int] = (),
) -> list[Result]:
    """Apply `act` to each item, a few at a time. The first error ends it once what is under way is
    done, a signal whose handler raises at the next chunk of that. With `title` the progress is
    shown, counted in `sizes`, the bytes of each item.
    """
    done, over = 0, threading.Event()
    with (
        ThreadPoolExecutor(CONCURRENT_FILES, initializer=given_up.watch, initargs=(over,)) as pool,
        Progress(title, total=-(-sum(sizes) // 10**6), unit="MB", quiet=not title) as progress,
    ):
        running = {pool.submit(act, item): number for number, item in enumerate(items)}
        try:
            for future in as_completed(running):
                future.result()
                if sizes:
                    done += sizes[running[future]]
                    progress.update(done // 10**6)
        except BaseException as error:
            if not isinstance(error, Exception):
                over.set()
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    return [future.result() for future in running]


def send_file(
    bucket: Bucket,
    path: Path,
    key: str,
    *,
    there: Blob | None,
    note: Path | None = None,
    copy: Path | None = None,
) -> Blob:
    """Store a file at `key`, as it is at some moment, unless the object there has its content.

    Args:
        there: the object that stands at `key`; no other one is replaced. None: there is none.
        note: keeps the address of a large upload, so that another process can continue it.
        copy: a large file that changes while it is sent is copied there, and sent from there; by
            default that is an error.

    Raises:
        Conflict: meanwhile somebody else wrote other content there.
        FileNotFoundError: there is no such file any more.
    """
    before = path.stat()
    if _is_stored(there, path):
        if note is not None:
            note.unlink(missing_ok=True)
        assert there is not None
        return there
    generation = there.generation if there is not None else 0
    if before.st_size <= storage.WHOLE_BYTES:
        return bucket.put(key, path.read_bytes(), generation=generation)
    try:
        return bucket.put(key, path, generation=generation, note=note)
    except Conflict:
        raise
    except Failed:
        after = path.stat()
        unchanged = (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
        if copy is None or unchanged:
            raise
    try:
        with disk_errors(copy):
            shutil.copyfile(path, copy)
        return bucket.put(key, copy, generation=generation)
    finally:
        copy.unlink(missing_ok=True)


def _is_stored(there: Blob | None, path: Path) -> bool:
    return there is not None and there.bytes == path.stat().st_size and there.crc32c == crc32c(path)


class MarkedFolder:
    """A folder of a bucket whose files lie under their own names, for readers that know nothing of
    an index, and which is complete when its marker exists. Object storage has neither renames nor
    folders: the marker is written last, and deleted before a file is replaced or deleted.
    """

    def __init__(self, bucket: Bucket, prefix: str, marker: str) -> None:
        self._bucket, self._prefix, self._marker = bucket, prefix, f"{prefix}{marker}"

    @property
    def is_complete(self) -> bool:
        return self._bucket.stat(self._marker) is not None

    def put(self, root: Path, name: str, *, note: Path | None = None) -> None:
        """Store the file `name` of the folder `root`, unless it is there with this content."""
        key, path = f"{self._prefix}{name}", root / name
        there = self._bucket.stat(key)
        if there is not None and not _is_stored(there, path):
            self._bucket.delete(self._marker)
        send_file(self._bucket, path, key, there=there, note=note)

    def check_sizes(self, sizes: Mapping[str, int]) -> None:
        """Raises Failed unless each of these files is there with its size."""
        there = {blob.name: blob.bytes for blob in self._bucket.list(self._prefix)}
        for name, size in sizes.items():
            if there.get(key := f"{self._prefix}{name}") != size:
                raise Failed(
                    f"{self._bucket.url_of(key)} has {there.get(key, 'no')} bytes, {size} were"
                    " sent; run the same command again"
                )

    def commit(self, marker: bytes, *, may_replace: Callable[[bytes], bool]) -> None:
        """Write the marker; an existing one is replaced only if `may_replace` is true of its
        content.

        Raises:
            Conflict: it does not, or somebody else wrote it meanwhile.
        """
        try:
            self._bucket.put(self._marker, marker, generation=0)
        except Conflict:
            found = self._bucket.stat(self._marker)
            if found is None or not may_replace(self._bucket.get(self._marker)):
                raise
            self._bucket.put(self._marker, marker, generation=found.generation)

    def delete(self) -> None:
        """Delete the marker, then all else."""
        self._bucket.delete(self._marker)
        in_parallel(self._bucket.delete, [blob.name for blob in self._bucket.list(self._prefix)])


def fetch_file(
    bucket: Bucket,
    key: str,
    path: Path,
    *,
    content: tuple[int, str] | None = None,
    sha256: str = "",
    mtime_ns: int | None = None,
    partial: Path | None = None,
) -> None:
    """Fetch an object to `path`, which appears all at once, flushed to disk.

    Args:
        content: bytes and CRC32C that it must have.
        sha256: SHA-256 that it must have, in hexadecimal.
        mtime_ns: the modification time that the file gets.
        partial: where it is written before it is whole; a hidden file beside `path` by default.

    Raises:
        Missing: there is no such object; as OtherContent where it is not what it must be.
        Corrupt: its checksum is not the one that it was written with.
    """
    # The process id stands last: it tells leftovers of dead processes from files being written.
    partial = partial or path.with_name(
        f".{path.name}.partial-{threading.get_ident()}-{os.getpid()}"
    )
    with disk_errors(path):
        partial.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()

    def begin() -> Digest:
        nonlocal digest
        digest = hashlib.sha256()
        return digest

    try:
        blob = bucket.get_to_file(key, partial, digest=begin if sha256 else None)
        if content not in (None, (blob.bytes, blob.crc32c)):
            raise OtherContent(
                f"{bucket.url_of(key)} has {blob.bytes} bytes, CRC32C {blob.crc32c}, which is not"
                " what was sent; see who else works there, run it again"
            )
        if sha256 and digest.hexdigest() != sha256:
            raise OtherContent(f"{bucket.url_of(key)} does not match its checksum")
        with disk_errors(path):
            with partial.open("rb") as stream:
                os.fsync(stream.fileno())
            if mtime_ns is not None:
                os.utime(partial, ns=(mtime_ns, mtime_ns))
            os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
