"""A large file on its way into a bucket, chunk by chunk, by the service's resumable uploads.

A break costs the chunk at hand: the service is asked what it keeps, and the rest is sent. With a
note on disk that holds for another process too. The address of an upload is a key to it, so the
note is for its owner's eyes alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ingot.base.errors import Failed

CHUNK_BYTES = 32 << 20
"""A multiple of 256 KiB, as the service wants it."""


@dataclass(frozen=True)
class Parcel:
    """What is sent where: a file, its size and checksum (base64 of CRC32C), and the generation that
    it shall replace.
    """

    name: str
    path: Path
    bytes: int
    crc32c: str
    generation: int | None


class Upload:
    """`start()` opens an upload and gives its address; `send(address, data, headers)` puts to it;
    `refused(answer)` makes an error of an answer.
    """

    def __init__(
        self,
        parcel: Parcel,
        note: Path | None,
        *,
        start: Callable[[], str],
        send: Callable[[str, bytes, Mapping[str, str]], Any],
        refused: Callable[[Any], Exception],
    ) -> None:
        self._parcel, self._note, self._start, self._send, self._refused = (
            parcel,
            note,
            start,
            send,
            refused,
        )
        self._address = self._noted()
        self._at: int | None = None  # bytes that the service keeps; None where only it knows

    def advance(self) -> Mapping[str, Any] | None:
        """Send the next chunk; call it again after an error. Returns the service's description of
        the object once it is whole.

        Raises:
            ConnectionError: the service has forgotten the upload, or kept nothing of the chunk; the
                next call does what can be done.
            Failed: the file is shorter than it was.
        """
        parcel = self._parcel
        if self._address is None:
            self._address, self._at = self._start(), 0
            self._write_note(self._address)
        if self._at is None and (
            done := self._taken(
                self._send(self._address, b"", {"Content-Range": f"bytes */{parcel.bytes}"})
            )
        ):
            return done
        begin, self._at = self._at or 0, None
        with parcel.path.open("rb") as stream:
            data = os.pread(stream.fileno(), CHUNK_BYTES, begin)
        end = begin + len(data)
        if len(data) < min(CHUNK_BYTES, parcel.bytes - begin):
            raise Failed(f"{parcel.path} changed while it was sent; run the same command again")
        headers = {"Content-Range": f"bytes {begin}-{end - 1}/{parcel.bytes}"}
        if end == parcel.bytes:
            headers["x-goog-hash"] = f"crc32c={parcel.crc32c}"
        done = self._taken(self._send(self._address, data, headers))
        if done is None and (self._at or 0) <= begin:
            raise ConnectionError("the service keeps nothing of what is sent")
        return done

    def forget(self) -> None:
        """Take the note away: there is nothing to go on with."""
        if self._note is not None:
            self._note.unlink(missing_ok=True)

    def _taken(self, answer: Any) -> Mapping[str, Any] | None:
        if answer.status_code in (200, 201):
            self.forget()
            about: Mapping[str, Any] = answer.json()
            return about
        if answer.status_code == 308:
            self._at = (
                int(answer.headers["Range"].rpartition("-")[2]) + 1
                if "Range" in answer.headers
                else 0
            )
            return None
        if answer.status_code in (404, 410):
            self._address = None
            raise ConnectionError("the service has forgotten the upload")
        raise self._refused(answer)

    def _noted(self) -> str | None:
        """The address of an upload of the very same, which another process may have left."""
        try:
            note = json.loads(self._note.read_bytes()) if self._note is not None else None
        except (OSError, ValueError):
            return None
        return (
            str(note["address"])
            if isinstance(note, dict) and note.get("of") == self._of() and "address" in note
            else None
        )

    def _write_note(self, address: str) -> None:
        if self._note is not None:
            descriptor = os.open(self._note, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "w") as stream:
                json.dump({"of": self._of(), "address": address}, stream)

    def _of(self) -> dict[str, Any]:
        return {**asdict(self._parcel), "path": str(self._parcel.path)}
