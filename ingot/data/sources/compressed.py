"""The content of compressed files, a piece at a time: a few bytes can stand for gigabytes, of which
only what is read takes memory.
"""

from __future__ import annotations

import bz2
import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any, cast

import zstandard

from ingot.data.sources.source_file import compression

READ_BYTES = 1 << 17
LARGEST_PIECE = 1 << 20
"""Bytes that bzip2 gives at once."""
ZSTD_INPUT_BYTES = 1 << 12
"""Bytes that Zstandard is given at once, as its library has no limit on what it gives: four of them
stand for at most 128 KiB.
"""
LONGEST_WINDOW = 1 << 31
"""Bytes that a frame of Zstandard may look back; the library by itself refuses above 128 MiB."""
BROKEN = (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError)
"""Exceptions raised when a damaged file is read."""


def is_broken(error: Exception) -> bool:
    """Whether an error while reading means a damaged file; bzip2 has no exception of its own for
    that.
    """
    return isinstance(error, BROKEN) or str(error) == "Invalid data stream"


def decompressed(stream: IO[bytes], path: str) -> IO[bytes]:
    """The content of a `.gz`, `.zst` or `.bz2` file, with several frames concatenated; other files
    unchanged.
    """
    ending = compression(path)
    if ending == ".gz":
        # No buffer on top: it would read ahead, and lose the data before an error.
        return cast("IO[bytes]", gzip.GzipFile(fileobj=stream))
    if ending == ".zst":
        return io.BufferedReader(_Frames(stream, _ZstdFrame), READ_BYTES)
    if ending == ".bz2":
        frames = _Frames(stream, bz2.BZ2Decompressor, least=1, padding=b"\0 \t\r\n")
        return io.BufferedReader(frames, READ_BYTES)
    return stream


def pieces(frame: Any, data: bytes) -> Iterator[bytes]:
    """What a decompressor of one frame makes of `data`, up to the frame's end."""
    yield frame.decompress(data, LARGEST_PIECE)
    while not (frame.needs_input or frame.eof):
        yield frame.decompress(b"", LARGEST_PIECE)


class _ZstdFrame:
    """A decompressor of one frame, also of one that looks back as far as `zstd --long=31` does. It
    is asked as one of bzip2 is, but gives what a little of its input stands for.
    """

    def __init__(self) -> None:
        decompressor = zstandard.ZstdDecompressor(max_window_size=LONGEST_WINDOW)
        self._frame, self._left = decompressor.decompressobj(), memoryview(b"")
        self.unused_data = b""

    @property
    def eof(self) -> bool:
        return self._frame.eof

    @property
    def needs_input(self) -> bool:
        return not self._left

    def decompress(self, data: bytes, max_length: int) -> bytes:
        left = self._left or memoryview(data)
        piece, self._left = left[:ZSTD_INPUT_BYTES], left[ZSTD_INPUT_BYTES:]
        content = self._frame.decompress(piece)
        if self._frame.eof:
            self.unused_data = self._frame.unused_data + self._left
        return content


class _Frames(io.RawIOBase):
    """Frames of Zstandard, or streams of bzip2, as one stream; `begin` gives a decompressor of one.
    The libraries' own readers take a file for complete that is cut short (Zstandard), or whose next
    stream is damaged where it begins (bzip2); this one refuses it.

    Args:
        least: how many frames a whole file has.
        padding: bytes that may stand behind a frame.
    """

    def __init__(
        self, source: IO[bytes], begin: Callable[[], Any], *, least: int = 0, padding: bytes = b""
    ) -> None:
        self._source, self._open, self._padding = source, least > 0, padding
        self._begin, self._frame, self._ended = begin, begin(), False
        self._ready, self._input = memoryview(b""), b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            data = b""
            if self._frame.needs_input:
                data = self._input or self._source.read(READ_BYTES)
                if not data and self._open:
                    raise EOFError("the file ends within a frame")
                if not data:
                    return 0
                self._input = b""
                if self._ended and not (data := data.lstrip(self._padding)):
                    continue
                self._ended = False
            self._ready = memoryview(self._frame.decompress(data, LARGEST_PIECE))
            self._open = not self._frame.eof
            if self._frame.eof:
                self._input = self._frame.unused_data
                self._frame, self._ended = self._begin(), bool(self._padding)
        size = min(len(buffer), len(self._ready))
        buffer[:size], self._ready = self._ready[:size], self._ready[size:]
        return size
