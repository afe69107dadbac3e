"""The replica of a run folder in a bucket, which machines without a shared disk work from, with one
writer at a time.

The index `REPLICA.json` lists every file with its size, checksum and object. It is written last, on
condition that its generation is the one that was read, so that a reader sees one state or the next
and never a mix. An object that the index names is never overwritten: new content of a file lies
beside it as `PATH~CRC32C-SIZE` until the index no longer names the object at the file's own path.
Objects that no state needs are listed in the index as garbage before they are deleted, so that the
next writer does not rely on them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ingot.base.errors import Failed, IngotError
from ingot.base.progress import say
from ingot.base.remote.bucket import Blob, Bucket, open_bucket
from ingot.base.remote.index import (
    INDEX,
    NEVER_REPLICATED,
    READ_ATTEMPTS,
    Index,
    IndexEntry,
    KeyChooser,
    PathFilter,
    changed_remotely,
    find_garbage,
    is_content,
    path_filter,
    read_index,
    write_index,
    written_too_fast,
)
from ingot.base.remote.memory import (
    HIDDEN,
    AgreedState,
    Content,
    LocalFile,
    exclusive_sync,
    local_files,
)
from ingot.base.remote.service import Conflict, Missing
from ingot.base.remote.transfer import fetch_file, in_parallel, send_file
from ingot.base.storage import disk_errors, fsync_folder


def _no_path(path: str) -> bool:
    return False


def replica_url(bucket: str, name: str) -> str:
    """The address of the replica of run `name` in `bucket` (`gs://BUCKET`, or the name alone)."""
    return f"gs://{bucket.removeprefix('gs://').rstrip('/')}/ingot/runs/{name}"


def push(root: Path, url: str, *, parts: Collection[str] | None = None) -> None:
    """Update the replica with the files of the folder; unchanged files are neither read nor sent.

    Files that were changed, created or deleted elsewhere since folder and replica last agreed, and
    not here, are left as they are in the bucket; `pull` fetches them. Checkpoints, heartbeats
    (unless `parts` names them) and hidden files (locks, transfers) are left out. An interrupted
    push leaves the old state in place, and what was sent is not sent again.

    Args:
        parts: push only these top-level names or prefixes (`data/columns`).

    Raises:
        Failed: somebody else pushed meanwhile, or the service cannot be reached.
        WrongInput: there is no such bucket, or no right to write to it.
    """
    bucket, within = open_bucket(url), path_filter(parts)
    with exclusive_sync(root):
        state, index = AgreedState(root, bucket.url), read_index(bucket)
        local_paths = [path for path in local_files(root, (NEVER_REPLICATED,)) if within(path)]
        here = {local.path: local for local in in_parallel(state.current, local_paths) if local}
        known = {*here, *index.entries, *state.known}
        listed = _list_objects(bucket, [*filter(within, known), *index.garbage])
        theirs = {path for path in known if not within(path)} | changed_remotely(
            index, here, state.known
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
        sent = in_parallel(
            lambda plan: _send(bucket, root, *plan),
            absent,
            title="push",
            sizes=[local.bytes for local, *_ in absent],
        )
        entries |= {entry.path: entry for entry in sent if entry is not None}
        left = find_garbage(index, listed, entries, known, within)
        if not index.generation or (entries, left) != (index.entries, index.garbage):
            write_index(bucket, Index(entries, left, index.generation))
        agreed = {path: entry.content for path, entry in entries.items() if path not in theirs}
        state.known = {
            path: content for path, content in state.known.items() if path in theirs
        } | agreed
        state.write()
        _delete_garbage(bucket, left)


def pull(
    url: str,
    root: Path,
    *,
    parts: Collection[str] | None = None,
    keep: Callable[[str], bool] = _no_path,
    leave: Callable[[str], bool] = _no_path,
    keep_changes: bool = False,
) -> bool:
    """Update the folder with the files of the replica. Returns False when there is no replica.

    Files that an earlier state had and this one does not are deleted; files that no state ever had
    are not touched. Nothing is moved into place before everything has been fetched and checked.

    Args:
        parts: pull only these top-level names or prefixes.
        keep: existing files with these paths are neither replaced nor deleted.
        leave: missing files with these paths are not fetched.
        keep_changes: files that were changed here, and not in the replica, since the two last
            agreed stay so, and the next `push` sends them; what was deleted beside such files, as
            what is made anew may have fewer, stays deleted. What is only missing is fetched again:
            somebody made room.

    Raises:
        Failed: an object is damaged or missing, or the service cannot be reached.
        WrongInput: there is no such bucket, no right to read it, or a newer ingot wrote it.
    """
    bucket = open_bucket(url)
    if bucket.stat(INDEX) is None:
        return False
    with exclusive_sync(root):
        state, seen = AgreedState(root, bucket.url), 0
        for _ in range(READ_ATTEMPTS):
            index = read_index(bucket)
            plan = _pull_plan(
                root, index, state, path_filter(parts), keep, leave, keep_changes=keep_changes
            )
            try:
                in_parallel(
                    lambda entry: _fetch(bucket, root, entry),
                    plan.differing,
                    title="pull",
                    sizes=[entry.bytes for entry in plan.differing],
                )
            except Missing as error:
                if seen == index.generation:
                    raise Failed(
                        f"{error}; {bucket.url_of(INDEX)} lists it, push the run folder again"
                    ) from error
                # A writer may have replaced the state that was read, and deleted its objects.
                seen = index.generation
                continue
            _remove(root, plan.deleted)
            _move_into_place(root, plan.differing, state)
            state.known = plan.agreed
            state.write()
            return True
    raise written_too_fast(bucket)


@dataclass(frozen=True)
class _PullPlan:
    """What one state of the replica means for a folder."""

    differing: list[IndexEntry]
    """Files to fetch."""
    deleted: list[str]
    """Paths that an earlier state had and this one does not."""
    agreed: dict[str, Content]
    """What folder and replica have in common afterwards."""


def _pull_plan(
    root: Path,
    index: Index,
    state: AgreedState,
    within: PathFilter,
    keep: PathFilter,
    leave: PathFilter,
    *,
    keep_changes: bool,
) -> _PullPlan:
    known = {*index.entries, *state.known}
    # Not remembered as agreed on either: a file that is only left in the bucket must never be taken
    # for one that was deleted here.
    left = {path for path in known if not (root / path).exists() and leave(path)}
    kept = {path for path in known if keep(path) and (root / path).exists()}
    listed = [
        entry for entry in index.entries.values() if within(entry.path) and entry.path not in left
    ]
    current = in_parallel(lambda entry: _is_current(state, entry), listed)
    pairs = list(zip(listed, current, strict=True))
    if keep_changes:
        changed = {
            entry.path
            for entry, same in pairs
            if not same and state.known.get(entry.path) == entry.content
        }
        made = {path for path in changed if (root / path).exists()}
        anew = set(map(_area, made))
        kept |= made | {path for path in changed if _area(path) in anew}
    untouched = {
        path: content for path, content in state.known.items() if not within(path) or path in kept
    }
    return _PullPlan(
        [entry for entry, same in pairs if not same and entry.path not in kept],
        [
            path
            for path in state.known
            if within(path) and path not in index.entries and path not in kept
        ],
        untouched
        | {entry.path: entry.content for entry, same in pairs if same or entry.path not in kept},
    )


def _area(path: str) -> str:
    """The part of a run folder that is made at once, such as `data/columns` or `model`."""
    return "/".join(path.split("/")[:-1][:2])


def would_delete(url: str, root: Path, path: str) -> bool:
    """Whether the next `push` takes a file out of the replica, since it was deleted here."""
    return path in AgreedState(root, open_bucket(url).url).known and not (root / path).exists()


def _list_objects(bucket: Bucket, paths: Iterable[str]) -> dict[str, Blob]:
    """All objects at the places where objects of `paths` may lie, by name."""
    places = sorted({path.partition("/")[0] + "/" if "/" in path else path for path in paths})
    return {blob.name: blob for blobs in in_parallel(bucket.list, places) for blob in blobs}


def _send(
    bucket: Bucket, root: Path, local: LocalFile, key: str, is_absent: bool
) -> IndexEntry | None:
    """The entry of a file as it was sent, since a log may grow meanwhile. None if the file no
    longer exists.
    """
    path = root / local.path
    hidden = root / HIDDEN / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.copy"
    if not is_absent:
        return IndexEntry(local.path, key, local.bytes, local.crc32c, local.mtime_ns)
    try:
        blob = send_file(
            bucket, path, key, there=None, note=hidden.with_suffix(".upload"), copy=hidden
        )
    except (FileNotFoundError, NotADirectoryError):
        return None
    except Conflict as error:
        raise Failed(
            f"{bucket.url_of(key)} was written by somebody else meanwhile; stop one of the two and"
            " run the same command again"
        ) from error
    return IndexEntry(local.path, key, blob.bytes, blob.crc32c, local.mtime_ns)


def _delete_garbage(bucket: Bucket, left: dict[str, int]) -> None:
    """Delete garbage. What remains is listed in the index and deleted by the next push."""
    try:
        in_parallel(lambda item: _delete(bucket, *item), list(left.items()))
    except IngotError as error:
        say(
            f"warning: {len(left)} objects in {bucket.url} are of no use and could not all be"
            f" deleted: {error}"
        )


def _delete(bucket: Bucket, key: str, generation: int) -> None:
    with contextlib.suppress(Conflict):
        bucket.delete(key, generation=generation)


def _is_current(state: AgreedState, entry: IndexEntry) -> bool:
    here = state.current(entry.path, bytes=entry.bytes)
    return here is not None and entry.holds(here.bytes, here.crc32c)


def _staged_path(root: Path, entry: IndexEntry) -> Path:
    return (
        root
        / HIDDEN
        / "arriving"
        / hashlib.sha256(f"{entry.crc32c} {entry.bytes} {entry.path}".encode()).hexdigest()
    )


def _fetch(bucket: Bucket, root: Path, entry: IndexEntry) -> None:
    """Fetch a file to its hidden, staged path, unless an interrupted pull did so: that path exists
    only once the file is complete.
    """
    arrival = _staged_path(root, entry)
    if not arrival.exists():
        fetch_file(
            bucket,
            entry.key,
            arrival,
            content=entry.content,
            mtime_ns=entry.mtime_ns,
            partial=arrival.with_suffix(".partial"),
        )


def _move_into_place(root: Path, entries: Sequence[IndexEntry], state: AgreedState) -> None:
    """Move staged files to their paths; markers last, since they vouch for other files."""
    for entry in sorted(entries, key=lambda entry: (entry.path.endswith(".json"), entry.path)):
        path = root / entry.path
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            os.replace(_staged_path(root, entry), path)
        state.remember_checksum(entry.path, entry.crc32c)
    for folder in {(root / entry.path).parent for entry in entries}:
        fsync_folder(folder)
    shutil.rmtree(root / HIDDEN / "arriving", ignore_errors=True)


def _remove(root: Path, paths: Iterable[str]) -> None:
    """Delete files, and the folders that are empty afterwards."""
    for path in paths:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
            (root / path).unlink()
        for folder in Path(path).parents[:-1]:
            with contextlib.suppress(OSError):
                (root / folder).rmdir()
