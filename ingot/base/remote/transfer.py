"""Transfers from and to a bucket: a few files at a time, each complete with the requested content
or not at all.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TypeVar

from ingot.base.progress import Progress
from ingot.base.remote.bucket import Bucket
from ingot.base.remote.service import Missing
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
    """Apply `act` to each item, a few at a time; the first error ends it. With `title` the progress
    is shown, counted in `sizes`, the bytes of each item.
    """
    done = 0
    with (
        ThreadPoolExecutor(CONCURRENT_FILES) as pool,
        Progress(title, total=-(-sum(sizes) // 10**6), unit="MB", quiet=not title) as progress,
    ):
        running = {pool.submit(act, item): number for number, item in enumerate(items)}
        try:
            for future in as_completed(running):
                future.result()
                if sizes:
                    done += sizes[running[future]]
                    progress.update(done // 10**6)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    return [future.result() for future in running]


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
    try:
        blob = bucket.get_to_file(key, partial, digest=digest if sha256 else None)
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
