"""A run folder in a bucket: what several machines without a shared disk work from, one writer at a
time.

`REPLICA.json` there lists every file with its size, checksum and object. It is written last, under
the generation of the one that was read, so that a reader sees one state or the next and never a
mix; an object that it names is never written over. A file lies under its own path, where people
find it; as long as the index names that object, the file's next content lies beside it as
`PATH~CRC32C-SIZE`, and the one after that
under the path again. What no state needs any more is listed in the index as garbage before it is
deleted: the next writer reads there what it must not rely on.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TypeVar

from ingot.base.errors import Failed, IngotError
from ingot.base.progress import Progress, say
from ingot.base.remote import bucket as storage
from ingot.base.remote.bucket import Blob, Bucket, open_bucket
from ingot.base.remote.index import (
    INDEX,
    NEVER_REPLICATED,
    READ_ATTEMPTS,
    Index,
    IndexEntry,
    KeyChooser,
    changed_remotely,
    find_garbage,
    is_content,
    path_filter,
    read_index,
    write_index,
    written_too_fast,
)
from ingot.base.remote.memory import HIDDEN, AgreedState, LocalFile, exclusive_sync, local_files
from ingot.base.remote.service import Conflict, Missing
from ingot.base.storage import disk_errors, fsync_folder

AT_ONCE = 4
"""Files that are on their way at the same time, at most a chunk of each in memory."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def _none(path: str) -> bool:
    return False


def replica_url(bucket: str, name: str) -> str:
    """Where the run `name` lies in `bucket` (`gs://BUCKET`, or the name alone)."""
    return f"gs://{bucket.removeprefix('gs://').rstrip('/')}/ingot/runs/{name}"


def push(root: Path, url: str, *, parts: Collection[str] | None = None) -> None:
    """Make the bucket hold what the folder holds; what did not change is neither read nor sent.

    What was changed, made or deleted elsewhere since the two last agreed, and not here, stays as it
    is there; `pull` brings it. Left out are checkpoints, heartbeats (unless `parts` names them) and
    hidden files: locks, and what is on its way. `parts`: only these top-level names or prefixes
    (`data/columns`). When it ends early the old state stands, and what was sent already is not sent
    again.

    Raises:
        Failed: somebody else pushed meanwhile, or the service cannot be reached.
        WrongInput: the bucket is missing, or rights are.
    """
    bucket, within = open_bucket(url), path_filter(parts)
    with exclusive_sync(root):
        memory, index = AgreedState(root, bucket.url), read_index(bucket)
        looked = _at_once(
            memory.look, [path for path in local_files(root, (NEVER_REPLICATED,)) if within(path)]
        )
        here = {found.path: found for found in looked if found is not None}
        known = {*here, *index.entries, *memory.known}
        listed = _listed(bucket, [*filter(within, known), *index.garbage])
        theirs = {path for path in known if not within(path)} | changed_remotely(
            index, here, memory.known
        )
        entries = {path: entry for path, entry in index.entries.items() if path in theirs}
        keys, absent = KeyChooser(index, listed), []
        for local in (here[path] for path in here if path not in theirs):
            entry = index.entries.get(local.path)
            if (
                entry is not None
                and entry.holds(local.bytes, local.crc32c)
                and is_content(listed.get(entry.key), local)
            ):
                entries[local.path] = entry
            else:
                absent.append((local, *keys.choose(local)))
        sent = _with_progress(
            "push",
            lambda plan: _send(bucket, root, *plan),
            absent,
            [local.bytes for local, *_ in absent],
        )
        entries |= {entry.path: entry for entry in sent if entry is not None}
        left = find_garbage(index, listed, entries, known, within)
        if not index.generation or (entries, left) != (index.entries, index.garbage):
            write_index(bucket, Index(entries, left, index.generation))
        agreed = {path: entry.content for path, entry in entries.items() if path not in theirs}
        memory.known = {
            path: content for path, content in memory.known.items() if path in theirs
        } | agreed
        memory.write()
        _sweep(bucket, left)


def pull(
    url: str,
    root: Path,
    *,
    parts: Collection[str] | None = None,
    keep: Callable[[str], bool] = _none,
    leave: Callable[[str], bool] = _none,
) -> bool:
    """Make the folder hold what the bucket holds; what differs is fetched. False when there is no
    replica.

    Files that an earlier state had and this one has not are deleted; files that no state ever had
    are left alone, and so are those that are here and of whose paths `keep` is true. What is not
    here and of whose paths `leave` is true is not fetched. Nothing is placed before all of it has
    arrived as the index says. `parts` as with `push`.

    Raises:
        Failed: an object is damaged or missing, or the service cannot be reached.
        WrongInput: the bucket is missing, rights are, or a newer ingot wrote there.
    """
    bucket, within = open_bucket(url), path_filter(parts)
    if bucket.stat(INDEX) is None:
        return False
    with exclusive_sync(root):
        memory, seen = AgreedState(root, bucket.url), 0
        for _ in range(READ_ATTEMPTS):
            index = read_index(bucket)
            # These are not remembered either: what is only left there must never be taken for
            # deleted here.
            left_there = {
                path
                for path in {*index.entries, *memory.known}
                if not (root / path).exists() and leave(path)
            }
            wanted = [
                entry
                for entry in index.entries.values()
                if within(entry.path) and entry.path not in left_there
            ]
            same = _at_once(lambda entry: _has(memory, entry), wanted)
            kept = {
                path
                for path in {*index.entries, *memory.known}
                if keep(path) and (root / path).exists()
            }
            differing = [
                entry
                for entry, is_same in zip(wanted, same, strict=True)
                if not is_same and entry.path not in kept
            ]
            try:
                _with_progress(
                    "pull",
                    lambda entry: _fetch(bucket, root, entry),
                    differing,
                    [entry.bytes for entry in differing],
                )
            except Missing as error:
                if seen == index.generation:
                    raise Failed(
                        f"{error}; {bucket.url_of(INDEX)} lists it, push the run folder again"
                    ) from error
                seen = (
                    index.generation
                )  # a writer may have put a new state in place, and taken this one away
                continue
            _remove(
                root,
                [
                    path
                    for path in memory.known
                    if within(path) and path not in index.entries and path not in kept
                ],
            )
            _place(root, differing, memory)
            left = {
                path: content
                for path, content in memory.known.items()
                if not within(path) or path in kept
            }
            memory.known = left | {
                entry.path: entry.content
                for entry, is_same in zip(wanted, same, strict=True)
                if is_same or entry.path not in kept
            }
            memory.write()
            return True
    raise written_too_fast(bucket)


def _listed(bucket: Bucket, paths: Iterable[str]) -> dict[str, Blob]:
    """All objects that lie where the objects of `paths` may, by name."""
    places = sorted({path.partition("/")[0] + "/" if "/" in path else path for path in paths})
    return {blob.name: blob for blobs in _at_once(bucket.list, places) for blob in blobs}


def _send(
    bucket: Bucket, root: Path, local: LocalFile, key: str, is_absent: bool
) -> IndexEntry | None:
    """The file in the bucket, as it arrived: a log may grow meanwhile. None where it is gone."""
    path = root / local.path
    if not is_absent:
        return IndexEntry(local.path, key, local.bytes, local.crc32c, local.mtime_ns)
    try:
        if local.bytes > storage.WHOLE_BYTES:
            blob = _send_large(bucket, root, local, key)
        else:
            blob = bucket.put(key, path.read_bytes(), generation=0)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except Conflict as error:
        raise Failed(
            f"{bucket.url_of(key)} was written by somebody else meanwhile; stop one of the two and"
            " run the same command again"
        ) from error
    return IndexEntry(local.path, key, blob.bytes, blob.crc32c, local.mtime_ns)


def _send_large(bucket: Bucket, root: Path, local: LocalFile, key: str) -> Blob:
    """Goes on where an attempt that was stopped stood; what changes while it is sent is sent from a
    copy.
    """
    path, name = root / local.path, hashlib.sha256(key.encode()).hexdigest()[:32]
    try:
        return bucket.put(key, path, generation=0, note=root / HIDDEN / f"{name}.upload")
    except Conflict:
        raise
    except Failed:
        about = path.stat()
        if (about.st_size, about.st_mtime_ns) == (local.bytes, local.mtime_ns):
            raise
    copy = root / HIDDEN / f"{name}.copy"
    try:
        with disk_errors(copy):
            shutil.copyfile(path, copy)
        return bucket.put(key, copy, generation=0)
    finally:
        copy.unlink(missing_ok=True)


def _sweep(bucket: Bucket, left: dict[str, int]) -> None:
    """Delete garbage. What stays is listed in the index, and deleted by the next push."""
    try:
        _at_once(lambda item: _delete(bucket, *item), list(left.items()))
    except IngotError as error:
        say(
            f"warning: {len(left)} objects in {bucket.url} are of no use and could not all be"
            f" deleted: {error}"
        )


def _delete(bucket: Bucket, key: str, generation: int) -> None:
    with contextlib.suppress(Conflict):
        bucket.delete(key, generation=generation)


def _has(memory: AgreedState, entry: IndexEntry) -> bool:
    here = memory.look(entry.path, bytes=entry.bytes)
    return here is not None and entry.holds(here.bytes, here.crc32c)


def _arrival(root: Path, entry: IndexEntry) -> Path:
    return (
        root
        / HIDDEN
        / "arriving"
        / hashlib.sha256(f"{entry.crc32c} {entry.bytes} {entry.path}".encode()).hexdigest()
    )


def _fetch(bucket: Bucket, root: Path, entry: IndexEntry) -> None:
    """Into a hidden file, unless an attempt that was stopped has done that: it has its own name as
    long as it is not whole.
    """
    arrival = _arrival(root, entry)
    if arrival.exists():
        return
    partial = arrival.with_suffix(".partial")
    with disk_errors(root / entry.path):
        partial.parent.mkdir(parents=True, exist_ok=True)
    blob = bucket.get_to_file(entry.key, partial)
    if not entry.holds(blob.bytes, blob.crc32c):  # the object of a later state, or somebody else's
        raise Missing(
            f"{bucket.url_of(entry.key)} has {blob.bytes} bytes, CRC32C {blob.crc32c}, and"
            f" {entry.bytes}, {entry.crc32c} were pushed"
        )
    with partial.open("rb") as stream:
        os.fsync(stream.fileno())
    os.utime(partial, ns=(entry.mtime_ns, entry.mtime_ns))
    os.replace(partial, arrival)


def _place(root: Path, entries: Sequence[IndexEntry], memory: AgreedState) -> None:
    """Give what arrived its names; markers, which vouch for other files, after those."""
    for entry in sorted(entries, key=lambda entry: (entry.path.endswith(".json"), entry.path)):
        path = root / entry.path
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            os.replace(_arrival(root, entry), path)
        memory.remember(entry.path, entry.crc32c)
    for folder in {(root / entry.path).parent for entry in entries}:
        fsync_folder(folder)
    shutil.rmtree(root / HIDDEN / "arriving", ignore_errors=True)


def _remove(root: Path, paths: Iterable[str]) -> None:
    """Delete files, and folders that hold nothing else."""
    for path in paths:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
            (root / path).unlink()
        for folder in Path(path).parents[:-1]:
            with contextlib.suppress(OSError):
                (root / folder).rmdir()


def _with_progress(
    title: str, act: Callable[[Item], Result], items: Sequence[Item], sizes: Sequence[int]
) -> list[Result]:
    """`act` on each item, a few at a time; results in the order in which they are done. The first
    error ends it.
    """
    done, results = 0, []
    with (
        ThreadPoolExecutor(AT_ONCE) as pool,
        Progress(title, total=-(-sum(sizes) // 10**6), unit="MB") as progress,
    ):
        running = {pool.submit(act, item): size for item, size in zip(items, sizes, strict=True)}
        try:
            for future in as_completed(running):
                done += running[future]
                progress.update(done // 10**6)
                results.append(future.result())
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    return results


def _at_once(act: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        try:
            return list(pool.map(act, items))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
