"""Cuts the files of a source into tasks for `ingest`. What a task holds follows from the files
alone, not from who does it.

Plain JSON Lines are cut at newlines, multistream dumps between streams; other files stay whole, and
small ones are put together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ingot.base.storage import is_remote, open_read
from ingot.data.compression import ENDINGS
from ingot.data.sourcefile import SourceFile

CHUNK_BYTES = 1 << 20
BLOCKS = 64
SMALLEST_BYTES = 16_000_000
LARGEST_BYTES = 256_000_000
MULTISTREAM = "-multistream.xml.bz2"
# How a bzip2 stream begins: its own head at the strongest level, then that of its first block.
STREAM = b"BZh91AY&SY"


@dataclass(frozen=True)
class Piece:
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
    """How much a task should hold, of so many bytes: enough tasks for any number of workers, and
    not millions of them.
    """
    return min(max(total // BLOCKS, SMALLEST_BYTES), LARGEST_BYTES)


def cut(files: Iterable[SourceFile], block: int) -> Iterator[tuple[Piece, ...]]:
    """The tasks of one source, in order: each is blocks or whole files of about `block` bytes."""
    group, size = list[Piece](), 0
    for file in files:
        for piece in _pieces(file, block):
            group.append(piece)
            size += piece.bytes
            # A source that is no file tells no size, and is a task of its own.
            if size >= block or "bytes" not in file.stamp:
                yield tuple(group)
                group, size = [], 0
    if group:
        yield tuple(group)


def _pieces(file: SourceFile, block: int) -> list[Piece]:
    if file.bytes <= block or is_remote(file.path):
        return [Piece(file)]
    try:
        if file.format == "jsonl" and not file.path.lower().endswith(ENDINGS):
            return list(_blocks(file, block))
        if file.format == "wikipedia" and file.path.endswith(MULTISTREAM):
            return list(_streams(file, block))
        return [Piece(file)]
    except OSError:
        # Whoever reads the file finds the same fault and counts it.
        return [Piece(file)]


def _blocks(file: SourceFile, block: int) -> Iterator[Piece]:
    """Cuts after the first newline at or behind every `block` bytes, counting newlines so that rows
    keep their numbers.
    """
    begin = row = lines = at = 0
    with open_read(file.path) as stream:
        while chunk := stream.read(CHUNK_BYTES):
            done = 0
            while (wanted := max(begin + block - at - 1, done)) < len(chunk) and (
                newline := chunk.find(b"\n", wanted)
            ) >= 0:
                lines += chunk.count(b"\n", done, newline + 1)
                yield Piece(file, begin, at + newline + 1, row)
                begin, row, lines, done = at + newline + 1, row + lines, 0, newline + 1
            lines += chunk.count(b"\n", done)
            at += len(chunk)
    if at > begin:
        yield Piece(file, begin, at, row)


def _streams(file: SourceFile, block: int) -> Iterator[Piece]:
    """Cuts a multistream dump where one of its streams begins, at or behind every `block` bytes.
    Reads little of the file.
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
            yield Piece(file, begin, end)
            begin = end
