"""What `ingest` does in a worker: one task's files into raw parts of its own, with a tally of what
could not be read.
"""

from __future__ import annotations

import contextlib
import io
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, cast

from ingot.base.errors import Failed, IngotError, WrongInput
from ingot.base.markers import FileEntry
from ingot.base.storage import is_remote, open_read
from ingot.data.blocks import Piece
from ingot.data.documents import chosen
from ingot.data.engines.engine import Advance
from ingot.data.hubrows import hub_items
from ingot.data.items import Bad, Item
from ingot.data.queries import query_items
from ingot.data.raw import RawPart, Text, write_parts
from ingot.data.readers import read_items
from ingot.data.sourcefile import writable
from ingot.data.sources import Split
from ingot.data.wanted import Wanted

EXAMPLES = 20
# So many records without the column, and none with it, are a wrong column name rather than bad
# records.
UNDECIDED = 100
SHOW_EVERY = 1000
BUFFER_BYTES = 1 << 20


@dataclass
class Tally:
    """What a source, or a task's share of it, held: good records, bad ones by reason, some of these
    by place.
    """

    good: int = 0
    bad: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    keys: tuple[str, ...] = ()
    """The keys of the last record in which the wanted one was missing."""

    def add(self, other: Tally) -> None:
        """Take in the tally of the files that follow."""
        self.good += other.good
        self.bad += other.bad
        self.examples = (self.examples + other.examples)[:EXAMPLES]
        self.keys = other.keys or self.keys

    def __str__(self) -> str:
        return ", ".join(f"{count:,} {reason}" for reason, count in self.bad.most_common())


@dataclass(frozen=True)
class Task:
    """Some pieces of one source. `first`: with them the source begins."""

    number: int
    split: Split
    source: int
    first: bool
    pieces: tuple[Piece, ...]
    wanted: Wanted
    fraction: float


@dataclass(frozen=True)
class Done:
    """What a task made: parts, with paths relative to the folder of all tasks."""

    parts: list[tuple[RawPart, FileEntry]]
    tally: Tally


@dataclass(frozen=True)
class Read:
    """The stage: every task writes its parts into a folder of its own below `folder`."""

    folder: Path
    stop: bool

    def open(self) -> Callable[[Task, Advance], Done]:
        return self._do

    def _do(self, task: Task, advance: Advance) -> Done:
        reading = _Reading(task, advance, stop=self.stop)
        own = f"{task.number:05d}"
        parts = [
            (replace(part, path=f"{own}/{part.path}"), replace(entry, path=f"{own}/{entry.path}"))
            for part, entry in write_parts(
                self.folder / own, task.split, task.source, reading.texts()
            )
        ]
        return Done(parts, reading.tally)


class _Reading:
    """Goes through the pieces of one task, counting what is bad and telling how far it is."""

    def __init__(self, task: Task, advance: Advance, *, stop: bool) -> None:
        self.tally = Tally()
        self._task, self._advance, self._stop = task, advance, stop

    def texts(self) -> Iterator[Text]:
        """(doc_id, text) of every good record that the source's `fraction` keeps."""
        fraction = self._task.fraction
        for piece in self._task.pieces:
            for item in self._items(piece):
                if isinstance(item, Bad):
                    self._count(item, piece)
                    continue
                self.tally.good += 1
                doc_id = f"{piece.file.name}:{item.row}"
                if fraction >= 1.0 or chosen(doc_id, "source", fraction):
                    yield doc_id, item.text

    def _items(self, piece: Piece) -> Iterator[Item | Bad]:
        at = piece.begin
        with contextlib.ExitStack() as stack:
            try:
                stream = (
                    None
                    if piece.file.format in ("hub", "bigquery")
                    else stack.enter_context(_opened(piece.file.path))
                )
                for number, item in enumerate(self._read(piece, stream), start=1):
                    yield item
                    if number % SHOW_EVERY == 0:
                        now = stream.tell() if stream and not stream.closed else at
                        self._advance(max(now - at, 0))
                        at = max(at, now)
            except IngotError:
                raise
            except Exception as error:
                # A bucket's client has errors of its own, and trying again may help; a local file
                # stays as unreadable as it is.
                if is_remote(piece.file.path):
                    raise Failed(
                        f"{piece.file.path} broke off ({' '.join(str(error).split())[:200]}); run"
                        " the same command again"
                    ) from error
                if not isinstance(error, OSError):
                    raise
                yield Bad(1, "unreadable file", str(error))
        self._advance(max(piece.begin + piece.bytes - at, 0))

    def _read(self, piece: Piece, stream: IO[bytes] | None) -> Iterator[Item | Bad]:
        file, wanted = piece.file, self._task.wanted
        if stream is None:
            return (hub_items if file.format == "hub" else query_items)(file, wanted)
        if piece.end is None:
            return read_items(stream, file.path, file.format, wanted)
        stream.seek(piece.begin)
        return read_items(
            stream, file.path, file.format, wanted, piece.row, piece.end - piece.begin
        )

    def _count(self, bad: Bad, piece: Piece) -> None:
        tally, place = self.tally, f"{writable(piece.file.path)}:{bad.row}"
        tally.keys = bad.keys or tally.keys
        tally.bad[bad.reason] += 1
        # Only the first task of a source knows that no good record came before.
        wrong_name = (
            self._task.first and not tally.good and tally.bad[bad.reason] == tally.bad.total()
        )
        if bad.keys and wrong_name and (self._stop or tally.bad.total() >= UNDECIDED):
            raise self._task.wanted.missing(place, bad.keys)
        told = writable(f"{place}: {bad}")
        if self._stop:
            raise WrongInput(f"{told}; mend it, or set data.on_bad=skip")
        if len(tally.examples) < EXAMPLES:
            tally.examples.append(told)


def _opened(path: str) -> IO[bytes]:
    """A stream with a buffer that holds many lines."""
    if is_remote(path):
        # Streams of fsspec are no whole streams: they read no line of a limited length.
        return io.BufferedReader(cast("io.RawIOBase", open_read(path)), BUFFER_BYTES)
    return Path(path).open("rb", buffering=BUFFER_BYTES)
