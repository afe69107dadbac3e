"""How workers exchange rows: files of columns sorted by a key, so that a bucket of keys is a slice
of each file.

A file is Arrow IPC, memory-mapped: a reader touches only the slice that it needs. Files appear
atomically, and a task that runs twice writes the same file twice. A task's figures are written
last, as a small JSON file that marks it as done: a resumed run skips tasks that have one. Nothing
is fsynced, which would take longer than the work: the files survive a killed process but not a
power failure, and lie in a folder named after this boot of the machine, so that no other boot
reuses them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import psutil
import pyarrow as pa
from numpy.typing import NDArray

from ingot.base.processes import BOOT
from ingot.base.progress import Progress
from ingot.base.storage import atomic_file
from ingot.data.cleaning.arrays import Columns, Hashes, Indices
from ingot.data.engines.engine import Advance, Engine, Stage

TaskFigures = dict[str, Any]
"""The figures that a task reports, as JSON."""


def boot_id() -> str:
    """An identifier of this boot of the machine."""
    return BOOT.read_text().strip()[:8] if BOOT.exists() else str(int(psutil.boot_time()))


def write_rows(path: Path, runs: Iterable[Mapping[str, NDArray[Any]]]) -> None:
    """Write columns of equal length; each run becomes a record batch of its own."""
    with atomic_file(path, durable=False) as stream:
        writer = None
        for columns in runs:
            batch = pa.record_batch(
                {name: pa.array(np.ascontiguousarray(column)) for name, column in columns.items()}
            )
            writer = writer or pa.ipc.new_file(stream, batch.schema)
            writer.write_batch(batch)
        if writer is not None:
            writer.close()


def read_rows(path: Path) -> list[Columns]:
    """The runs of a file, memory-mapped."""
    if not path.stat().st_size:
        return []
    reader = pa.ipc.open_file(pa.memory_map(str(path)))
    return [_columns(reader.get_batch(number)) for number in range(reader.num_record_batches)]


def write_sets(path: Path, runs: Iterable[tuple[Columns, Hashes, Indices]]) -> None:
    """Write columns whose every row has a set of hashes: (columns, hashes, offsets [rows + 1])."""
    with atomic_file(path, durable=False) as stream:
        writer = None
        for columns, values, offsets in runs:
            sets = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values))
            batch = pa.record_batch(
                {**{name: pa.array(column) for name, column in columns.items()}, "set": sets}
            )
            writer = writer or pa.ipc.new_file(stream, batch.schema)
            writer.write_batch(batch)
        if writer is not None:
            writer.close()


def read_sets(path: Path) -> list[tuple[Columns, Hashes, Indices]]:
    """Read what `write_sets` wrote, memory-mapped."""
    if not path.stat().st_size:
        return []
    reader = pa.ipc.open_file(pa.memory_map(str(path)))
    found = []
    for batch in (reader.get_batch(number) for number in range(reader.num_record_batches)):
        sets = batch.column("set")
        found.append(
            (_columns(batch.drop_columns(["set"])), sets.values.to_numpy(), sets.offsets.to_numpy())
        )
    return found


def _columns(batch: pa.RecordBatch) -> Columns:
    return {
        name: batch.column(name).to_numpy(zero_copy_only=batch.num_rows > 0)
        for name in batch.schema.names
    }


class NamedTask(Protocol):
    """A task with a name, which its files are named after."""

    @property
    def name(self) -> str: ...


@dataclass(frozen=True)
class HashBucket:
    """The task of reducing one of `buckets` buckets."""

    number: int
    of: int

    @property
    def name(self) -> str:
        return f"bucket-{self.number:05d}"


@dataclass(frozen=True)
class ResumableStage:
    """A stage each of whose tasks leaves a marker file when it is done."""

    work: Stage[Any, TaskFigures]
    folder: Path

    def open(self) -> Callable[[Any, Advance], TaskFigures]:
        do = self.work.open()

        def once(task: Any, advance: Advance) -> TaskFigures:
            told = do(task, advance)
            with atomic_file(_done(self.folder, task), durable=False) as stream:
                stream.write(json.dumps(told).encode())
            return told

        return once


def run(
    engine: Engine,
    work: Stage[Any, TaskFigures],
    folder: Path,
    tasks: Sequence[NamedTask],
    progress: Progress,
) -> list[TaskFigures]:
    """Run the tasks without a marker in `folder`; returns the figures of all tasks, in order."""
    missing = [task for task in tasks if not _done(folder, task).exists()]
    if missing:
        engine.run(ResumableStage(work, folder), missing, progress)
    return [json.loads(_done(folder, task).read_bytes()) for task in tasks]


def files(folder: Path, pattern: str) -> Iterator[Path]:
    """Files of a stage, sorted by name."""
    return iter(sorted(folder.glob(pattern)))


def _done(folder: Path, task: NamedTask) -> Path:
    return folder / f"{task.name}.json"
