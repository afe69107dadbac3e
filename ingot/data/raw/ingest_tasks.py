"""The tasks of `ingest`: dividing the files of a source into blocks, and what a worker does with a
task.

Tasks depend on the files only, not on the number of workers. Plain JSON Lines are divided at
newlines, multistream dumps between streams; other files stay whole, and small ones share a task.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from ingot.base.errors import WrongInput
from ingot.base.markers import FileEntry
from ingot.base.storage import is_remote, open_read
from ingot.config.sections.data import OnBad
from ingot.data.documents.kinds import DocumentExtractor
from ingot.data.documents.records import BadRecord, ParsedDocument
from ingot.data.engines.engine import Advance
from ingot.data.raw.store import RawPart, Text, write_parts
from ingot.data.sources.find import records_of
from ingot.data.sources.readers import parse_file
from ingot.data.sources.source_file import (
    SourceFile,
    compression,
    of_one_version,
    remote_errors,
    utf8_safe,
)
from ingot.data.splits import Split, chosen

CHUNK_BYTES = 1 << 20
BLOCKS = 64
SMALLEST_BYTES = 16_000_000
LARGEST_BYTES = 256_000_000
MULTISTREAM = "-multistream.xml.bz2"
# How a bzip2 stream begins: its header at the highest compression level, then that of its first
# block.
STREAM = b"BZh91AY&SY"


@dataclass(frozen=True)
class FileBlock:
    """A file, or the lines of it that begin within bytes `begin` to `end`, with `row` lines before
    them.
    """

    file: SourceFile
    begin: int = 0
    end: int | None = None
    row: int = 0

    @property
    def bytes(self) -> int:
        return self.file.bytes if self.end is None else self.end - self.begin


def block_bytes(total: int) -> int:
    """Bytes per task for an input of `total` bytes: enough tasks for any number of workers, but not
    millions.
    """
    return min(max(total // BLOCKS, SMALLEST_BYTES), LARGEST_BYTES)


def cut_into_tasks(files: Iterable[SourceFile], block: int) -> Iterator[tuple[FileBlock, ...]]:
    """The tasks of one source, in order: each is blocks or whole files of about `block` bytes."""
    group, size = list[FileBlock](), 0
    for file in files:
        for piece in _pieces(file, block):
            group.append(piece)
            size += piece.bytes
            # A source that is not a file may have no size; it is a task of its own.
            if size >= block or "bytes" not in file.stamp:
                yield tuple(group)
                group, size = [], 0
    if group:
        yield tuple(group)


def _pieces(file: SourceFile, block: int) -> list[FileBlock]:
    if file.bytes <= block or is_remote(file.path):
        return [FileBlock(file)]
    try:
        if file.format == "jsonl" and not compression(file.path):
            return list(_blocks(file, block))
        if file.format == "wikipedia" and file.path.endswith(MULTISTREAM):
            return list(_streams(file, block))
        return [FileBlock(file)]
    except OSError:
        # Reading the file will raise the same error, which is counted there.
        return [FileBlock(file)]


def _blocks(file: SourceFile, block: int) -> Iterator[FileBlock]:
    """Divide a file after the first newline at or behind every `block` bytes, counting newlines so
    that row numbers stay correct.
    """
    begin = row = lines = at = 0
    with open_read(file.path) as stream:
        while chunk := stream.read(CHUNK_BYTES):
            done = 0
            while (target := max(begin + block - at - 1, done)) < len(chunk) and (
                newline := chunk.find(b"\n", target)
            ) >= 0:
                lines += chunk.count(b"\n", done, newline + 1)
                yield FileBlock(file, begin, at + newline + 1, row)
                begin, row, lines, done = at + newline + 1, row + lines, 0, newline + 1
            lines += chunk.count(b"\n", done)
            at += len(chunk)
    if at > begin:
        yield FileBlock(file, begin, at, row)


def _streams(file: SourceFile, block: int) -> Iterator[FileBlock]:
    """Divide a multistream dump at the first stream at or behind every `block` bytes. Reads little
    of the file.
    """
    begin = at = 0
    with open_read(file.path) as stream:
        while begin < file.bytes:
            at, seen = begin + block, b""
            stream.seek(at)
            while (found := seen.find(STREAM)) < 0 and (chunk := stream.read(CHUNK_BYTES)):
                at += max(len(seen) - len(STREAM) + 1, 0)
                seen = seen[-len(STREAM) + 1 :] + chunk
            end = at + found if found >= 0 else file.bytes
            yield FileBlock(file, begin, end)
            begin = end


EXAMPLES = 20
# This many records without the column, and none with it, mean a wrong column name rather than bad
# records.
UNDECIDED = 100
SHOW_EVERY = 1000
BUFFER_BYTES = 1 << 20


@dataclass
class RecordTally:
    """The records of a source or a task: good ones, bad ones by reason, and examples of these with
    their place.
    """

    good: int = 0
    bad: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    keys: tuple[str, ...] = ()
    """The keys of the last record in which the text column was missing."""

    def add(self, other: RecordTally) -> None:
        """Add the tally of the files that follow."""
        self.good += other.good
        self.bad += other.bad
        self.examples = (self.examples + other.examples)[:EXAMPLES]
        self.keys = other.keys or self.keys

    def __str__(self) -> str:
        return ", ".join(f"{count:,} {reason}" for reason, count in self.bad.most_common())


@dataclass(frozen=True)
class IngestTask:
    """Blocks of one source. `first`: they include the beginning of the source."""

    number: int
    split: Split
    source: int
    first: bool
    pieces: tuple[FileBlock, ...]
    extractor: DocumentExtractor
    fraction: float


@dataclass(frozen=True)
class IngestedTask:
    """The result of a task: parts, with paths relative to the folder of all tasks."""

    parts: list[tuple[RawPart, FileEntry]]
    tally: RecordTally


@dataclass(frozen=True)
class IngestStage:
    """The stage: every task writes its parts into its own folder below `folder`."""

    folder: Path
    on_bad: OnBad

    def open(self) -> Callable[[IngestTask, Advance], IngestedTask]:
        return self._do

    def _do(self, task: IngestTask, advance: Advance) -> IngestedTask:
        reading = _TaskReader(task, advance, self.on_bad)
        own = f"{task.number:05d}"
        parts = [
            (replace(part, path=f"{own}/{part.path}"), replace(entry, path=f"{own}/{entry.path}"))
            for part, entry in write_parts(
                self.folder / own, task.split, task.source, reading.texts()
            )
        ]
        return IngestedTask(parts, reading.tally)


class _TaskReader:
    """Reads the blocks of one task, counts bad records and reports progress."""

    def __init__(self, task: IngestTask, advance: Advance, on_bad: OnBad) -> None:
        self.tally = RecordTally()
        self._task, self._advance, self._on_bad = task, advance, on_bad
        self._lacking = ""
        """The place of the first record without the text column."""

    def texts(self) -> Iterator[Text]:
        """(doc_id, text) of every good record kept by the source's `fraction`."""
        fraction = self._task.fraction
        for piece in self._task.pieces:
            for item in self._items(piece):
                if isinstance(item, BadRecord):
                    self._count(item, piece)
                    continue
                self.tally.good += 1
                doc_id = f"{piece.file.name}:{item.row}"
                if fraction >= 1.0 or chosen(doc_id, "source", fraction):
                    yield doc_id, item.text

    def _items(self, piece: FileBlock) -> Iterator[ParsedDocument | BadRecord]:
        at, kind = piece.begin, records_of(piece.file)
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(remote_errors(piece.file))
                stream: IO[bytes] | None = None
                if kind is None:
                    stream = stack.enter_context(_open_buffered(piece.file.path))
                    items = of_one_version(piece.file, self._parse(piece, stream))
                else:
                    items = kind.read(piece.file, self._task.extractor)
                for number, item in enumerate(items, start=1):
                    yield item
                    if number % SHOW_EVERY == 0:
                        now = stream.tell() if stream and not stream.closed else at
                        self._advance(max(now - at, 0))
                        at = max(at, now)
        except OSError as error:  # of a local file, which stays unreadable
            yield BadRecord(1, "unreadable file", str(error), ends_file=True)
        self._advance(max(piece.begin + piece.bytes - at, 0))

    def _parse(self, piece: FileBlock, stream: IO[bytes]) -> Iterator[ParsedDocument | BadRecord]:
        file, extractor = piece.file, self._task.extractor
        if piece.end is None:
            return parse_file(stream, file.path, file.format, extractor)
        stream.seek(piece.begin)
        return parse_file(
            stream, file.path, file.format, extractor, piece.row, piece.end - piece.begin
        )

    def _count(self, bad: BadRecord, piece: FileBlock) -> None:
        tally, place = self.tally, f"{utf8_safe(piece.file.path)}:{bad.row}"
        if bad.keys:
            tally.keys, self._lacking = bad.keys, self._lacking or place
        tally.bad[bad.reason] += 1
        # Only the first task of a source knows that no good record came before.
        wrong_name = (
            self._task.first and not tally.good and tally.bad[bad.reason] == tally.bad.total()
        )
        stops = self._on_bad == "stop"
        if bad.keys and wrong_name and (stops or tally.bad.total() >= UNDECIDED):
            raise self._task.extractor.missing_error(self._lacking, bad.keys)
        told = utf8_safe(f"{place}: {bad}")
        if bad.stops:
            raise WrongInput(told)
        if bad.ends_file and self._on_bad != "skip_files":
            raise WrongInput(
                f"{told}; get the file whole, or set data.on_bad=skip_files to leave out what"
                " cannot be read of it"
            )
        if stops:
            raise WrongInput(f"{told}; mend it, or set data.on_bad=skip")
        if len(tally.examples) < EXAMPLES:
            tally.examples.append(told)


def _open_buffered(path: str) -> IO[bytes]:
    """A stream with a buffer large enough for many lines."""
    if is_remote(path):
        return open_read(path)
    return Path(path).open("rb", buffering=BUFFER_BYTES)
