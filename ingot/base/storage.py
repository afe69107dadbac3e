"""Files on a local disk or in object storage, through fsspec. A local write is durable before it
becomes visible.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import glob
import hashlib
import io
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any

from ingot.base.errors import NO_ROOM, Failed, WrongInput
from ingot.base.processes import is_alive, process_scope
from ingot.base.remote import web
from ingot.base.remote.streams import WholeFile, version_of

CHUNK_BYTES = 1 << 20
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP)
_WRITER = re.compile(r"-(?:([0-9a-f]{8})-)?(\d+)$")
_AT_FDCWD, _EXCHANGE = -100, 2  # Linux: AT_FDCWD, RENAME_EXCHANGE


def is_remote(path: str | os.PathLike[str]) -> bool:
    """True for `gs://...` and similar; `file://` counts as local."""
    text = os.fspath(path)
    return "://" in text and not text.startswith("file://")


def stays_inside(path: str | PurePosixPath) -> bool:
    """Whether a path below some folder, as a bucket or another machine names it, stays in there."""
    parts = PurePosixPath(path).parts
    return parts[:1] != ("/",) and ".." not in parts


def remote_storage() -> Any:
    """fsspec, with gcsfs told that buckets are of the usual kind: it would otherwise probe each
    bucket through an API that not every endpoint supports, and warn; to ask the proxy of the
    network, as all other clients do; and with our client for web servers. Imported here: a command
    that reads no bucket starts without it.
    """
    import fsspec

    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    session = {"request_class": web.bucket_request}
    fsspec.config.conf.setdefault("gs", {}).setdefault("session_kwargs", session)
    fsspec.config.conf.setdefault("http", {}).setdefault("get_client", web.web_client)
    return fsspec


def open_read(path: str | os.PathLike[str]) -> IO[bytes]:
    """A binary stream of a local or remote file; bytes as stored, not decompressed. Of a remote one
    all of them come, or an error.
    """
    if not is_remote(path):
        return Path(path).open("rb")
    filesystem, name = remote_storage().core.url_to_fs(os.fspath(path))
    return io.BufferedReader(WholeFile(filesystem, name), CHUNK_BYTES)


def is_file(path: str | os.PathLike[str]) -> bool:
    """Whether there is such a local or remote file; of a folder False."""
    if not is_remote(path):
        return Path(path).is_file()
    filesystem, root = remote_storage().core.url_to_fs(os.fspath(path))
    if web.is_web(filesystem):
        return web.exists(filesystem, root)
    return bool(filesystem.isfile(root))


def stamp(path: str, *, fresh: bool = False) -> dict[str, Any]:
    """A cheap signature by which a change of a file is noticed: size and modification time, or the
    object's version tag. `fresh`: as the storage tells it now, not as it was listed.
    """
    if is_remote(path):
        filesystem, root = remote_storage().core.url_to_fs(path)
        if fresh and filesystem.async_impl:
            # The client of a bucket. Its listing stays, for the other files of the folder.
            filesystem, root = remote_storage().core.url_to_fs(path, use_listings_cache=False)
        elif fresh:
            filesystem.invalidate_cache(root)
        return {"path": path, **version_of(filesystem, root)}
    status = os.stat(path)
    return {"path": path, "bytes": status.st_size, "mtime_ns": status.st_mtime_ns}


def sha256_file(path: str | os.PathLike[str]) -> str:
    digest = hashlib.sha256()
    with open_read(path) as stream:
        while chunk := stream.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def sampled_sha256(path: Path) -> str:
    """Hash of a local file's size and of 64 blocks spread evenly over it, so that files of any size
    cost the same: weights that were trained again differ everywhere.
    """
    size, blocks, block_bytes = path.stat().st_size, 64, 1 << 16
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as stream:
        for block in range(blocks):
            stream.seek(max(0, size - block_bytes) * block // (blocks - 1))
            digest.update(stream.read(block_bytes))
    return digest.hexdigest()


def fsync_folder(folder: str | os.PathLike[str]) -> None:
    """Make renames and new names in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(folder: str | os.PathLike[str]) -> None:
    """Flush every file and folder below `folder`, for trees that a library wrote without fsync."""
    for here, _, files in os.walk(folder):
        for name in files:
            with Path(here, name).open("rb") as stream:
                os.fsync(stream.fileno())
        fsync_folder(here)


def make_folder(folder: Path) -> None:
    """Create a folder and those above it that are missing; their names outlast a crash, as what is
    committed in them must.
    """
    made = [one for one in (folder, *folder.parents) if not one.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for one in reversed(made):
        with contextlib.suppress(PermissionError):  # where one may write and not look
            fsync_folder(one.parent)


def lock_file(descriptor: int, path: str | os.PathLike[str], *, wait: bool) -> None:
    """Lock an open file for this process alone, until the descriptor is closed.

    Raises:
        BlockingIOError: another process holds it, and we are not to wait.
        WrongInput: its disk has no locks, without which two runs would write over each other.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        raise WrongInput(
            f"{os.fspath(path)} cannot be locked ({error.strerror}): its disk is mounted without"
            " locks; mount it with them (Lustre: the option `flock`; NFS: not `nolock`, and a lock"
            " daemon), or choose another `output`"
        ) from error


def hold(descriptor: int) -> None:
    """Lock what this process writes, until the descriptor is closed, for `is_held`. On a disk
    without locks nothing tells others that it is being written.
    """
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_held(path: Path) -> bool:
    """Whether a process holds a file or folder by `hold`, also one of another container; of another
    machine where the disk passes locks on: NFS does of files, and not of folders. What this user
    may not open counts as held.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike[str], *, durable: bool = True) -> Iterator[IO[bytes]]:
    """A stream whose bytes appear under `path` atomically if the block ends without error, and,
    unless not `durable`, outlast the machine's crash.
    """
    target = Path(path)
    partial = partial_of(target)
    with disk_errors(target):
        make_folder(target.parent)
        try:
            with partial.open("wb") as stream:
                hold(stream.fileno())
                yield stream
                if durable:
                    stream.flush()
                    os.fsync(stream.fileno())
            os.replace(partial, target)
            if durable:
                fsync_folder(target.parent)
        finally:
            partial.unlink(missing_ok=True)


def write_atomic(path: str | os.PathLike[str], data: bytes | str) -> None:
    """Write a file as `atomic_file` does; also removes leftovers of killed writers in its
    folder.
    """
    _remove_partial_files(Path(path).parent)
    with atomic_file(path) as stream:
        stream.write(data.encode() if isinstance(data, str) else data)


@contextlib.contextmanager
def atomic_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A folder to fill that appears under `path` atomically; an existing one is replaced only then.

    One writer per `path` and process at a time: leftovers of dead writers are removed.
    """
    target = Path(path)
    partial = partial_of(target)
    with disk_errors(target):
        make_folder(target.parent)
        remove_partials_of(target)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        descriptor = os.open(partial, os.O_RDONLY)
        try:
            hold(descriptor)
            yield partial
            replace_folder(partial, target)
        finally:
            os.close(descriptor)
            shutil.rmtree(partial, ignore_errors=True)


def partial_of(target: Path, kind: str = "partial") -> Path:
    """What `target` is called until it is whole. Processes of two containers or machines have the
    same id as often as not; these have names of their own.
    """
    return target.with_name(f".{target.name}.{kind}-{process_scope()}-{os.getpid()}")


def replace_folder(finished: Path, target: Path) -> None:
    """Put a finished folder in the place of `target` (beside it) atomically; the old one is
    deleted.
    """
    fsync_tree(finished)
    if not target.exists():
        os.replace(finished, target)
    elif not _exchange(finished, target):
        replaced = partial_of(target, "replaced")
        os.replace(target, replaced)
        os.replace(finished, target)
        fsync_folder(target.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    # Before deleting the old one: a crash could otherwise restore its name for what is left of it.
    fsync_folder(target.parent)
    shutil.rmtree(finished, ignore_errors=True)


def link_file(path: Path, target: Path) -> None:
    """Hard-link a file to a second name, replacing what is there; a copy if the disk has no hard
    links. Only for files that are replaced, never modified.
    """
    with disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        try:
            os.link(path, target)
        except OSError:
            shutil.copy2(path, target)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names atomically, so that neither is ever missing; False if the system or the file
    system does not support it.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _EXCHANGE) == 0:
        return True
    error = ctypes.get_errno()
    if error in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(error, os.strerror(error), str(one), None, str(other))


def remove_partials_of(target: Path) -> None:
    """Remove what killed processes left while writing `target`; it may be gigabytes."""
    for kind in ("partial", "replaced"):
        _remove_leftovers(target.parent.glob(f".{glob.escape(target.name)}.{kind}-*"))


@functools.lru_cache(maxsize=256)
def _remove_partial_files(folder: Path) -> None:
    """Remove leftovers of all files in a folder; once per process, since it may hold thousands."""
    _remove_leftovers(left for left in folder.glob(".*.partial-*") if not left.is_dir())


def _remove_leftovers(leftovers: Iterable[Path]) -> None:
    for left in leftovers:
        if _is_left(left):
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)


def _is_left(partial: Path) -> bool:
    """Whether the process that wrote it is dead; of another container or machine its lock tells."""
    found = _WRITER.search(partial.name)
    if found is None:
        return False
    scope, process = found.groups()
    is_foreign = scope not in (None, process_scope())
    return not (is_held(partial) if is_foreign else is_alive(int(process)))


@contextlib.contextmanager
def disk_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn operating system errors while writing `path` into one line with the next action."""
    try:
        yield
    except OSError as error:
        if said := NO_ROOM.get(error.errno or 0):
            said = said.format(f" while writing {os.fspath(path)}")
            raise Failed(f"{said} and run the same command again") from error
        if error.errno in (errno.EEXIST, errno.ENOTDIR, errno.EISDIR):
            tried = Path(error.filename2 or error.filename or path)
            obstacle = next(
                (one for one in (tried, *tried.parents) if one.exists() and not one.is_dir()), tried
            )
            raise WrongInput(
                f"{os.fspath(path)} cannot be written, {obstacle} is in the way ({error.strerror});"
                " move that away"
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            refused = error.filename if isinstance(error.filename, str) else os.fspath(path)
            raise WrongInput(
                f"{_whole(Path(refused))} cannot be written ({error.strerror}); make it writable"
                " for this user, or choose another place, for a run by `output`"
            ) from error
        # To make a folder on a file system of the kernel (/proc, /sys), or with a name that it
        # cannot have.
        unmade = isinstance(error.filename, str) and not os.path.lexists(error.filename)
        if error.errno == errno.ENAMETOOLONG or (
            error.errno in (errno.ENOENT, errno.EINVAL)
            and unmade
            and _whole(Path(error.filename)) in (Path(path), *Path(path).parents)
        ):
            raise WrongInput(
                f"{os.fspath(path)} cannot be made there ({error.strerror}); choose another place,"
                " for a run by `output`"
            ) from error
        raise


def _whole(partial: Path) -> Path:
    """What a partial file or folder is to become; the path itself of others."""
    name, dot, _ = partial.name.removeprefix(".").rpartition(".partial-")
    return partial.with_name(name) if dot and partial.name.startswith(".") else partial
