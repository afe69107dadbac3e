"""Writes a checkpoint: tensors by torch's distributed checkpoint, each file flushed to the disk and
hashed while it is written, by the rank that writes it; then the marker.

`torch.distributed.checkpoint` takes more than a second to import, so whoever writes imports this
file when it comes to that.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

import ingot
from ingot.base.errors import Failed
from ingot.base.markers import FileEntry, problems, read_marker, write_marker
from ingot.base.storage import disk_errors, fsync_folder
from ingot.checkpoints.store import BEFORE, COMMIT, remove_folder, step_folder
from ingot.checkpoints.together import in_words, portable, together
from ingot.parallel.mesh import Mesh


@dataclass(frozen=True)
class Written:
    """A checkpoint that was committed just now."""

    folder: Path
    mine: list[str]
    """Names of the files that this rank wrote, but for the marker."""
    bytes: int
    """Of all files of all ranks, but for the marker."""


def write_checkpoint(
    checkpoints: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    payload: Mapping[str, Any],
    line: Mesh,
    *,
    scattered: bool = False,
) -> Written:
    """Write tensors and marker as checkpoint `step`, durably; all ranks of `line` call it. What was
    begun is removed if it cannot be ended.

    `scattered`: the nodes may have a disk each, and meet elsewhere; without, rank 0 must see all
    files.

    Raises:
        Failed: the disk is full, on any rank; or rank 0 does not see what others wrote.
        WrongInput: the folder may not be written, or something else stands in its place.
    """
    folder = step_folder(checkpoints, step)
    with disk_errors(folder):
        together(line, lambda: _begin(folder, line), lambda _: None)
        try:
            mine = write_tensors(folder, tensors, line)
            about = {
                "step": step,
                "world": line.world,
                "layout": line.degrees.told(),
                "torch": torch.__version__,
                "ingot": ingot.__version__,
                "time": time.time(),
            }
            size = together(
                line,
                lambda: mine,
                lambda everyone: _commit(
                    folder, {**about, **payload}, list(chain(*everyone)), scattered=scattered
                ),
            )
        except Exception:
            with contextlib.suppress(
                Exception
            ):  # nobody writes any more; if the line itself is dead, the next save makes way
                together(
                    line,
                    lambda: remove_folder(folder) if line.ranks.local_rank == 0 else None,
                    lambda _: None,
                )
            raise
    return Written(folder, [entry.path for entry in mine], size)


def _begin(folder: Path, line: Mesh) -> None:
    """An empty folder on every node. A checkpoint of the same step that stands there is moved
    aside, where it still counts.
    """
    if line.ranks.local_rank != 0:
        return
    if read_marker(folder, COMMIT) is not None:
        before = folder.with_name(folder.name + BEFORE)
        remove_folder(before)
        folder.rename(before)
    remove_folder(folder)  # what a killed save left
    folder.mkdir(parents=True, exist_ok=True)
    fsync_folder(folder.parent)
    fsync_folder(folder.parent.parent)


def _commit(
    folder: Path, about: Mapping[str, Any], files: Sequence[FileEntry], *, scattered: bool
) -> int:
    """On rank 0, when all files are durable; their bytes."""
    files = sorted(files, key=lambda entry: entry.path)
    unseen = problems(folder, {"files": [asdict(entry) for entry in files]}, checksums=False)
    if unseen and not scattered:
        raise Failed(
            f"{unseen[0]} as rank 0 sees it, though another rank wrote it; put `output` on a disk"
            " that all nodes share, or set checkpoint.upload"
        )
    write_marker(folder, COMMIT, {**about, **({"scattered": True} if unseen else {})}, files)
    fsync_folder(folder.parent)
    remove_folder(folder.with_name(folder.name + BEFORE))
    return sum(entry.bytes for entry in files)


def write_tensors(folder: Path, tensors: Mapping[str, Tensor], line: Mesh) -> list[FileEntry]:
    """Write this rank's part of `tensors` into `folder`, which exists; the files that this rank
    wrote. All ranks of `line` call it.

    Raises:
        OSError: a file could not be written, on this rank or another; the same on all.
        RuntimeError: anything else, likewise.
    """
    writer = HashingWriter(folder)
    try:
        # Not the public `save`: it changes the warnings of the whole process, which is no business
        # of a thread.
        _save_state_dict(dict(tensors), writer, line.group, no_dist=line.world == 1)
    except CheckpointException as error:
        causes = {rank: cause for rank, (cause, _) in error.failures.items()}
        refused = next((cause for cause in causes.values() if isinstance(cause, OSError)), None)
        rank, first = next(iter(causes.items()))
        raise refused or RuntimeError(f"rank {rank}: {in_words(first)}") from error
    return writer.files.written


class HashedStream(io.RawIOBase):
    """Passes what is written to a file on to it and into a checksum, in this order and no other:
    there is no way back in it.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self._bytes = 0
        self.refused: OSError | None = None

    def write(self, data: Any, /) -> int:
        view = memoryview(data)
        try:
            self._file.write(view)
        except OSError as error:
            self.refused = error  # torch's own writer would hide it behind what follows from it
            raise
        self._digest.update(view)
        self._bytes += view.nbytes
        return view.nbytes

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._bytes

    def entry(self, name: str) -> FileEntry:
        return FileEntry(name, self._bytes, self._digest.hexdigest())


class HashingFiles(FileSystem):
    """A local disk as torch's writer sees it; `written` are the files that came about."""

    def __init__(self) -> None:
        self._entries: dict[str, FileEntry] = {}

    @property
    def written(self) -> list[FileEntry]:
        return list(self._entries.values())

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        assert mode == "wb", mode
        with Path(path).open(mode) as file:
            stream = HashedStream(file)
            try:
                yield stream
            except Exception as error:
                if stream.refused is None or stream.refused is error:
                    raise
                raise stream.refused from error
            file.flush()
            os.fsync(file.fileno())
        self._entries[Path(path).name] = stream.entry(Path(path).name)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self._entries[Path(new_path).name] = replace(
            self._entries.pop(Path(path).name), path=Path(new_path).name
        )


class HashingWriter(FileSystemWriter):
    """torch's own, but that names are durable, too, once a rank says that it is done."""

    def __init__(self, folder: Path) -> None:
        # torch's own fsync leaves out what Python still buffers, and reading ahead of a device asks
        # the device of another thread.
        super().__init__(folder, sync_files=False, per_thread_copy_ahead=0)
        self.folder = folder
        self.fs = self.files = HashingFiles()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with _portable_errors():
            written: Future[list[WriteResult]] = super().write_data(plan, planner)
            fsync_folder(self.folder)
            return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> Any:
        with _portable_errors():
            super().finish(metadata, results)
            fsync_folder(self.folder)


@contextlib.contextmanager
def _portable_errors() -> Iterator[None]:
    """torch sends what is raised to the other ranks; what cannot be sent would leave them
    waiting.
    """
    try:
        yield
    except Exception as error:
        raise portable(error) from error.__cause__
