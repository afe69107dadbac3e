"""Compressed files as plain streams. A file that ends too early or holds something else is refused,
never taken for whole.
"""

from __future__ import annotations

import bz2
import gzip
import io
import zlib
from typing import IO, Any, cast

import zstandard

READ_BYTES = 1 << 17
ENDINGS = (".gz", ".zst", ".bz2")
BROKEN = (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError)
"""What reading a damaged file raises."""


def is_broken(error: Exception) -> bool:
    """Whether an error while reading is the damaged file's; bzip2 alone has no error of its own for
    it.
    """
    return isinstance(error, BROKEN) or str(error) == "Invalid data stream"


def decompressed(stream: IO[bytes], path: str) -> IO[bytes]:
    """The content of a `.gz`, `.zst` or `.bz2` file, several frames as one; of any other file, its
    bytes as they are.
    """
    if path.lower().endswith(".gz"):
        # No buffer on top: it would read ahead, and lose what stands before a fault.
        return cast("IO[bytes]", gzip.GzipFile(fileobj=stream))
    if path.lower().endswith(".zst"):
        return io.BufferedReader(_ZstdStream(stream), READ_BYTES)
    if path.lower().endswith(".bz2"):
        return cast("IO[bytes]", bz2.BZ2File(stream))
    return stream


class _ZstdStream(io.RawIOBase):
    """Zstandard frames as one stream. The library's own reader takes a truncated file for a whole
    one; this refuses it.
    """

    def __init__(self, source: IO[bytes]) -> None:
        self._source, self._open = source, False
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._ready, self._input = memoryview(b""), b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            chunk = self._input or self._source.read(READ_BYTES)
            if not chunk:
                if self._open:
                    raise EOFError("the file ends within a frame")
                return 0
            self._ready = memoryview(self._frame.decompress(chunk))
            self._open = not self._frame.eof
            self._input = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
        size = min(len(buffer), len(self._ready))
        buffer[:size], self._ready = self._ready[:size], self._ready[size:]
        return size
