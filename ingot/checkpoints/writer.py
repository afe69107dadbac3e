"""Writes a checkpoint with torch's distributed checkpoint: each rank writes, hashes and fsyncs its
own files, then rank 0 writes the commit marker.

`torch.distributed.checkpoint` takes more than a second to import, so this module is imported only
when the first checkpoint is written.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import math
import os
import time
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

import ingot
from ingot.base.errors import Failed
from ingot.base.markers import COMMIT, FileEntry, problems, read_marker, write_marker
from ingot.base.storage import disk_errors, fsync_folder
from ingot.checkpoints.collective import describe_error, picklable, run_on_all
from ingot.checkpoints.store import BEFORE, remove_folder, step_folder
from ingot.parallel.mesh import Mesh


@dataclass(frozen=True)
class Written:
    """A checkpoint that was just committed."""

    folder: Path
    own_files: list[str]
    """Names of the files that this rank wrote, without the marker."""
    bytes: int
    """Total size of the files of all ranks, without the marker."""


def write_checkpoint(
    checkpoints: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    payload: Mapping[str, Any],
    mesh: Mesh,
    *,
    scattered: bool = False,
) -> Written:
    """Write tensors and commit marker of checkpoint `step`, durably. Collective. On failure the
    partial folder is removed; one that is committed stays, though ranks may not have heard of it.

    `scattered`: nodes may each have their own disk, and the files meet in a bucket. Otherwise
    rank 0 must see the files of all ranks.

    Raises:
        Failed: the disk is full on any rank, or rank 0 does not see the files of other ranks.
        WrongInput: the folder is not writable, or something else has its name.
    """
    folder = step_folder(checkpoints, step)
    with disk_errors(folder):
        run_on_all(mesh, lambda: _begin(folder, mesh), lambda _: None)
        try:
            own_files = write_tensors(folder, tensors, mesh)
            about = {
                "step": step,
                "world": mesh.world,
                "layout": mesh.degrees.text(),
                "torch": torch.__version__,
                "ingot": ingot.__version__,
                "time": time.time(),
            }
            size = run_on_all(
                mesh,
                lambda: own_files,
                lambda everyone: _commit(
                    folder, {**about, **payload}, list(chain(*everyone)), scattered=scattered
                ),
            )
        except Exception:
            with contextlib.suppress(
                Exception
            ):  # no rank writes any more; if the group itself is broken, the next save cleans up
                run_on_all(mesh, lambda: _discard(folder, mesh), lambda _: None)
            raise
    return Written(folder, [entry.path for entry in own_files], size)


def _begin(folder: Path, mesh: Mesh) -> None:
    """Create an empty folder on every node. A committed checkpoint of the same step is moved aside,
    where it stays valid until it is replaced.
    """
    if mesh.ranks.local_rank != 0:
        return
    if read_marker(folder, COMMIT) is not None:
        before = folder.with_name(folder.name + BEFORE)
        remove_folder(before)
        folder.rename(before)
    remove_folder(folder)  # left by a killed save
    folder.mkdir(parents=True, exist_ok=True)
    fsync_folder(folder.parent)
    fsync_folder(folder.parent.parent)


def _discard(folder: Path, mesh: Mesh) -> None:
    """Remove the partial folder from every node. With a marker it is whole: a rank that died while
    the others were told of it takes nothing from them.
    """
    if mesh.ranks.local_rank == 0 and read_marker(folder, COMMIT) is None:
        remove_folder(folder)


def _commit(
    folder: Path, about: Mapping[str, Any], files: Sequence[FileEntry], *, scattered: bool
) -> int:
    """Write the marker; called on rank 0 once all files are durable. Returns their total bytes."""
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


def write_tensors(folder: Path, tensors: Mapping[str, Tensor], mesh: Mesh) -> list[FileEntry]:
    """Write this rank's part of `tensors` into the existing `folder`; returns the files that this
    rank wrote. Collective.

    Raises:
        OSError: a file could not be written on some rank; raised on all ranks.
        RuntimeError: any other failure; raised on all ranks.
    """
    writer = HashingWriter(folder)
    try:
        # Not the public `save`: it changes the warning filters of the whole process, which a
        # background thread must not do.
        _save_state_dict(
            dict(tensors), writer, mesh.group, no_dist=mesh.world == 1, planner=CheckedPlanner()
        )
    except CheckpointException as error:
        causes = {rank: cause for rank, (cause, _) in error.failures.items()}
        refused = next((cause for cause in causes.values() if isinstance(cause, OSError)), None)
        rank, first = next(iter(causes.items()))
        raise refused or RuntimeError(f"rank {rank}: {describe_error(first)}") from error
    return writer.files.written


class CheckedPlanner(DefaultSavePlanner):
    """torch's planner, with a check of the plan that does not compare each shard with each other.
    torch's own looks along the longest dimension, and matrices that are wider than tall are not
    cut there: with thousands of ranks, rank 0 would check for minutes at each save.
    """

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Raises ValueError if the shards of a tensor overlap or are not all of it."""
        plans, metadata = create_default_global_save_plan(dedup_save_plans(all_plans))
        names = dict(ChainMap(*(plan.planner_data for plan in plans)))
        self.global_plan, self.metadata = plans, replace(metadata, planner_data=names)
        for name, about in metadata.state_dict_metadata.items():
            if isinstance(about, TensorStorageMetadata) and not _is_covered(about):
                raise ValueError(f"the shards of {name} overlap, or are not all of it")
        return self.global_plan, self.metadata


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Where a shard begins and ends in each dimension."""


def _is_covered(about: TensorStorageMetadata) -> bool:
    """Whether the shards of a tensor lie within it, do not overlap, and are all of it."""
    boxes: list[Box] = [
        (tuple(shard.offsets), tuple(map(sum, zip(shard.offsets, shard.sizes, strict=True))))
        for shard in about.chunks
    ]
    is_within = all(
        0 <= begin <= end <= size
        for begins, ends in boxes
        for begin, end, size in zip(begins, ends, about.size, strict=True)
    )
    volumes = [math.prod(shard.sizes) for shard in about.chunks]
    if not is_within or sum(volumes) != math.prod(about.size):
        return False
    if not about.size:
        return True
    boxes = [box for box, volume in zip(boxes, volumes, strict=True) if volume]
    cuts = [len({begins[dim] for begins, _ in boxes}) for dim in range(len(about.size))]
    along = cuts.index(max(cuts))
    open_boxes: list[Box] = []
    for box in sorted(boxes, key=lambda box: box[0][along]):
        open_boxes = [other for other in open_boxes if other[1][along] > box[0][along]]
        if any(_overlap(box, other) for other in open_boxes):
            return False
        open_boxes.append(box)
    return True


def _overlap(one: Box, other: Box) -> bool:
    return all(
        begin < other_end and other_begin < end
        for begin, end, other_begin, other_end in zip(*one, *other, strict=True)
    )


class HashedStream(io.RawIOBase):
    """Writes to a file and hashes what is written. Append-only: seeking would make the checksum
    wrong.
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
            self.refused = error  # torch's writer would replace it by a later, derived error
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
    """A local disk as torch's writer sees it; `written` lists the files that were written."""

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
    """torch's writer, but the folder is fsynced as well before a rank reports that it is done."""

    def __init__(self, folder: Path) -> None:
        # torch's own fsync misses what Python still buffers, and its copy-ahead would issue device
        # work from another thread.
        super().__init__(folder, sync_files=False, per_thread_copy_ahead=0)
        self.folder = folder
        self.fs = self.files = HashingFiles()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with _picklable_errors():
            written: Future[list[WriteResult]] = super().write_data(plan, planner)
            fsync_folder(self.folder)
            return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> Any:
        with _picklable_errors():
            super().finish(metadata, results)
            fsync_folder(self.folder)


@contextlib.contextmanager
def _picklable_errors() -> Iterator[None]:
    """Make errors picklable: torch sends them to the other ranks, which would otherwise wait
    forever.
    """
    try:
        yield
    except Exception as error:
        raise picklable(error) from error.__cause__
