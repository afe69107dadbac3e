"""Divides the raw documents into ranges, the unit of work of every stage of `prepare`.

A range is a run of row groups of one raw part and depends on the data only. So any number of
processes writes the same files, and finished work stays valid when the rest is resumed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa

from ingot.data.raw.store import Kind, RawData, read_table
from ingot.data.splits import Split

SMALLEST_BYTES = 16_000_000
LARGEST_BYTES = 512_000_000
RANGES = 64


@dataclass(frozen=True)
class RawRange:
    """Row groups `first` to `last` of one raw part, which become part `number` of the columns.

    `begin` is the number of its first document, counted over all ranges of its split in order;
    `within` is how many documents of its raw part precede it. A piece of a range has the same
    number; `offset` documents of the range precede the piece.
    """

    split: Split
    source: int
    number: int
    kind: Kind
    path: str
    sha256: str
    first: int
    last: int
    begin: int
    within: int
    documents: int
    bytes: int
    offset: int = 0

    @property
    def name(self) -> str:
        return f"{self.split}-{self.number:05d}"


def ranges(raw: RawData) -> list[RawRange]:
    """The ranges, in order. Their size grows with the data of their split, so that there are
    neither too few nor millions, and those of one split do not change with another.
    """
    found: list[RawRange] = []
    for split, sources in raw.splits.items():
        size_of_split = sum(source.bytes for source in sources)
        target = min(max(size_of_split // RANGES, SMALLEST_BYTES), LARGEST_BYTES)
        number = begin = 0
        for source, read in enumerate(sources):
            for part in read.parts:
                within = 0
                for first, last, size in _runs([size for _, size in part.groups], target):
                    documents = sum(count for count, _ in part.groups[first:last])
                    found.append(
                        RawRange(
                            split,
                            source,
                            number,
                            read.kind,
                            part.path,
                            part.sha256,
                            first,
                            last,
                            begin,
                            within,
                            documents,
                            size,
                        )
                    )
                    number, begin, within = number + 1, begin + documents, within + documents
    return found


def pieces(raw: RawData, split: Split) -> Iterator[RawRange]:
    """Every row group of a split as a piece of its range."""
    groups = {part.path: part.groups for source in raw.splits[split] for part in source.parts}
    for task in (task for task in ranges(raw) if task.split == split):
        offset = 0
        for index in range(task.first, task.last):
            documents, size = groups[task.path][index]
            yield replace(
                task,
                first=index,
                last=index + 1,
                begin=task.begin + offset,
                within=task.within + offset,
                documents=documents,
                bytes=size,
                offset=offset,
            )
            offset += documents


def _runs(sizes: Sequence[int], target: int) -> Iterator[tuple[int, int, int]]:
    """Consecutive runs of at least `target` bytes, the last one possibly smaller: (first, last + 1,
    bytes).
    """
    first, total = 0, 0
    for index, size in enumerate(sizes):
        total += size
        if total >= target or index == len(sizes) - 1:
            yield first, index + 1, total
            first, total = index + 1, 0


def read_range(raw: Path, task: RawRange) -> Iterator[pa.Table]:
    """The documents of a range, one table per row group: columns `doc_id` and `text`, both
    strings.
    """
    return (read_table(raw / task.path, group) for group in range(task.first, task.last))
