"""Tensors into a folder by torch's distributed checkpoint, each file flushed to the disk and hashed
while it is written, by the rank that writes it.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ingot.base.markers import FileEntry
from ingot.base.storage import fsync_folder
from ingot.checkpoints.together import in_words, portable
from ingot.parallel.mesh import Mesh


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
