"""A file of any remote storage through fsspec: a stream that yields all of it or raises, and what
tells that it became another one. Knows no storage by name but the web, whose servers keep to less.
"""

from __future__ import annotations

import functools
import io
from typing import Any, cast

from ingot.base.errors import Failed, IngotError, WrongInput, one_line
from ingot.base.remote.web import is_web, patiently

TAGS = ("etag", "ETag", "generation", "Last-Modified", "LastModified", "mtime")
"""What storages call the version of a file, the surest first."""
CHUNK_BYTES = 1 << 20


def version_of(filesystem: Any, name: str) -> dict[str, Any]:
    """The size of a file, 0 where nobody tells it, and its version, empty where it has none."""
    about = patiently(filesystem, name, lambda: filesystem.info(name))
    tag = next((about[key] for key in TAGS if about.get(key)), "")
    return {"bytes": about["size"] or 0, "tag": str(tag)}


def broke_off(path: str, why: object) -> Failed:
    return Failed(f"{path} broke off ({one_line(why)}); run the same command again")


class WholeFile(io.RawIOBase):
    """The bytes of a remote file, with all of the stream interface: fsspec's objects lack parts, as
    readline with a size limit.

    Reading raises Failed where it breaks off, as it does where the file ends before its size or a
    server sends less than it was asked for: fsspec takes that for the end. An OSError would be
    taken by those who parse it for a damaged file, of which the rest may be left out.
    """

    def __init__(self, filesystem: Any, name: str) -> None:
        self._filesystem, self._name, self._at = filesystem, name, 0
        self._path = filesystem.unstrip_protocol(name)
        self._source = self._open()
        size = getattr(self._source, "size", None)
        # Of what a web server sends in one answer the object does not know the size.
        self._streamed, self._exact = size is None and is_web(filesystem), size is not None
        self._bytes: int = size or version_of(filesystem, name)["bytes"]

    def _open(self, **options: Any) -> Any:
        if is_web(self._filesystem):
            # Its usual cache would fill up what a server sends too little of, at the wrong place.
            options["cache_type"] = "readahead"
        opened = functools.partial(self._filesystem.open, self._name, "rb", **options)
        return patiently(self._filesystem, self._name, opened)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if self._streamed:
            raise WrongInput(
                f"{self._path} is read from several places, and its server sends it only as a"
                " whole; download it, and give its path"
            )
        self._at = self._source.seek(offset, whence) or self._source.tell()
        return self._at

    def tell(self) -> int:
        return self._at

    def close(self) -> None:
        if not self.closed:
            self._source.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._read(len(buffer))
        except IngotError:
            raise
        except Exception as error:  # the client passes on whatever its transport raises
            raise broke_off(self._path, error) from error
        self._at += len(data)
        due = min(len(buffer), self._bytes - self._at + len(data)) if self._exact else 1
        if len(data) < due and self._at < self._bytes:
            raise broke_off(self._path, f"it ended after {self._at:,} of {self._bytes:,} bytes")
        buffer[: len(data)] = data
        return len(data)

    def _read(self, size: int) -> bytes:
        if not is_web(self._filesystem) or self._streamed:
            return cast("bytes", self._source.read(size))
        try:
            asked = patiently(self._filesystem, self._name, lambda: self._source.read(size))
            return cast("bytes", asked)
        except ValueError:
            self._stream()
            return self._read(size)

    def _stream(self) -> None:
        """Go on in one answer from the beginning on: the server sends no ranges."""
        self._source.close()
        self._source = self._open(block_size=0)
        self._streamed, self._exact = True, False
        left = self._at
        while left and (passed := self._source.read(min(left, CHUNK_BYTES))):
            left -= len(passed)
