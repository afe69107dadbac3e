"""Objects in a bucket of Google Cloud Storage, through Google's own client; $STORAGE_EMULATOR_HOST
is honoured.

Network faults are handled here: requests are repeated with growing pauses for a limited time, an
interrupted large upload is continued, and checksums (CRC32C) of everything written or read are
compared. Conditions are on generations, the number that the service gives to each content of an
object; 0 stands for no object.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any, TypeVar

from ingot.base.errors import Failed, IngotError, WrongInput
from ingot.base.remote.service import (
    Conflict,
    Corrupt,
    Digest,
    Missing,
    ResumableUpload,
    Sink,
    UploadSource,
    connect,
    given_up,
    google_packages,
    is_passing_refusal,
    service_message,
    translate_error,
)
from ingot.base.storage import CHUNK_BYTES, disk_errors

PATIENCE_S = 120.0
"""For how long a failing request is repeated."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 20.0
CONNECT_S, SILENCE_S = 10.0, 60.0
"""Timeouts of connecting, and of reading an answer."""
WHOLE_BYTES = 8 << 20
"""Files up to this size are sent in one request, larger ones in chunks."""

_FIELDS = "items(name,size,crc32c,generation,updated),nextPageToken"

T = TypeVar("T")


@dataclass(frozen=True)
class Blob:
    """An object without its content; `updated` is when it was written, by the service's clock, in
    seconds since the epoch.
    """

    name: str
    bytes: int
    crc32c: str
    generation: int
    updated: float


def open_bucket(url: str, *, patience_s: float | None = None) -> Bucket:
    """The objects under `gs://BUCKET/PREFIX`; the service is not asked yet.

    Args:
        patience_s: for how long failing requests are repeated, by default 120 s.

    Raises:
        WrongInput: the address is not one of a bucket, there are no credentials, or the package is
            not installed.
    """
    return Bucket(url, PATIENCE_S if patience_s is None else patience_s)


def crc32c(path: Path) -> str:
    """A file's checksum as the service writes it."""
    sink = Sink(None, None)
    with path.open("rb") as stream:
        while data := stream.read(CHUNK_BYTES):
            sink.write(data)
    return sink.crc32c


class Bucket:
    """Objects by their names below the prefix; thread-safe. Made by `open_bucket`.

    Each method raises WrongInput where the bucket does not exist or may not be used, and Failed
    where the service cannot be reached for `patience_s` or returns something else than was asked
    for.
    """

    def __init__(self, url: str, patience_s: float) -> None:
        scheme, _, place = url.partition("://")
        bucket, _, prefix = place.rstrip("/").partition("/")
        if scheme != "gs" or not bucket:
            raise WrongInput(f"{url} names no bucket; write gs://BUCKET/FOLDER")
        self.url, self._patience_s = f"gs://{place.rstrip('/')}", patience_s
        self._prefix = f"{prefix}/" if prefix else ""
        self._client, self._session = connect(self.url)
        self._bucket = self._client.bucket(bucket)
        self._timeout = (min(CONNECT_S, patience_s), min(SILENCE_S, patience_s))
        self._request_options: dict[str, Any] = {"retry": None, "timeout": self._timeout}

    def patient(self, seconds: float) -> Bucket:
        """The same objects through connections of their own, repeating failing requests for
        `seconds`.
        """
        return Bucket(self.url, seconds)

    def url_of(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url

    def put(
        self,
        name: str,
        content: bytes | Path,
        *,
        generation: int | None = None,
        note: Path | None = None,
    ) -> Blob:
        """Write an object: bytes, or a file, of which never more than a chunk is in memory.

        Args:
            generation: replace only an object of this generation; 0: only where there is none. An
                object with the same content counts as success, since a repeated request may find
                what it wrote itself.
            note: a file that keeps the address of a large upload, so that another process can
                continue it.

        Raises:
            Conflict: there is an object with other content.
        """
        sink = Sink(None, None)
        if isinstance(content, bytes):
            sink.write(content)
        size, checksum = (
            (content.stat().st_size, crc32c(content))
            if isinstance(content, Path)
            else (len(content), sink.crc32c)
        )
        try:
            if isinstance(content, Path) and size > WHOLE_BYTES:
                blob = self._put_large(
                    UploadSource(self._prefix + name, content, size, checksum, generation),
                    name,
                    note,
                )
            else:
                data = content.read_bytes() if isinstance(content, Path) else content
                blob = self._retried(lambda: self._put_whole(name, data, generation), name, "write")
        except Conflict:
            found = self.stat(name)
            if found is None or (found.bytes, found.crc32c) != (size, checksum):
                raise
            return found
        if (blob.bytes, blob.crc32c) != (size, checksum):
            raise Failed(
                f"{self.url_of(name)} arrived as {blob.bytes} bytes, CRC32C {blob.crc32c}; {size},"
                f" {checksum} were sent; run the same command again"
            )
        return blob

    def get(self, name: str) -> bytes:
        """Read an object into memory.

        Raises:
            Missing: there is no such object.
            Corrupt: its checksum is not the one that it was written with.
        """
        stream = io.BytesIO()
        self._fetch(name, stream, None)
        return stream.getvalue()

    def get_to_file(
        self, name: str, path: Path, *, digest: Callable[[], Digest] | None = None
    ) -> Blob:
        """Read an object into a file and compare its checksum. The digest that `digest` made last
        is updated with its bytes. The file is not flushed to disk.

        Raises:
            Missing: there is no such object.
            Corrupt: its checksum is not the one that it was written with.
        """
        with disk_errors(path), path.open("wb") as stream:
            return self._fetch(name, stream, digest)

    def stat(self, name: str) -> Blob | None:
        """The object without its content; None where there is no such object."""
        found = self._retried(
            lambda: self._bucket.get_blob(self._prefix + name, **self._request_options),
            name,
            "look at",
        )
        return self._blob(found._properties) if found else None

    def list(self, prefix: str = "") -> Sequence[Blob]:
        """All objects whose names begin with `prefix`, sorted by name."""
        ask = functools.partial(
            self._client.list_blobs,
            self._bucket,
            prefix=self._prefix + prefix,
            fields=_FIELDS,
            **self._request_options,
        )
        return self._retried(
            lambda: [self._blob(found._properties) for found in ask()], prefix, "list"
        )

    def folders(self) -> Sequence[str]:
        """Names of the folders right below the prefix, sorted."""
        ask = functools.partial(
            self._client.list_blobs,
            self._bucket,
            prefix=self._prefix,
            delimiter="/",
            fields="prefixes,nextPageToken",
            **self._request_options,
        )
        found = self._retried(
            lambda: {name for page in ask().pages for name in page.prefixes}, "", "list"
        )
        return sorted(name.removeprefix(self._prefix).removesuffix("/") for name in found)

    def delete(self, name: str, *, generation: int | None = None) -> None:
        """Delete an object, if it exists.

        Raises:
            Conflict: it is of another generation.
        """
        try:
            self._retried(
                lambda: self._bucket.blob(self._prefix + name).delete(
                    if_generation_match=generation, **self._request_options
                ),
                name,
                "delete",
            )
        except Missing:
            return
        except Conflict:
            if self.stat(name) is not None:
                raise

    def _put_whole(self, name: str, data: bytes, generation: int | None) -> Blob:
        blob = self._bucket.blob(self._prefix + name)
        blob.upload_from_string(
            data,
            "application/octet-stream",
            if_generation_match=generation,
            checksum="crc32c",
            **self._request_options,
        )
        return self._blob(blob._properties)

    def _put_large(self, parcel: UploadSource, name: str, note: Path | None) -> Blob:
        def start() -> str:
            blob = self._bucket.blob(parcel.name)
            blob.crc32c = parcel.crc32c
            kind = "application/octet-stream"
            address: str = blob.create_resumable_upload_session(
                kind,
                parcel.bytes,
                checksum=None,
                if_generation_match=parcel.generation,
                **self._request_options,
            )
            return address

        def send(address: str, data: bytes, headers: Mapping[str, str]) -> Any:
            return self._session.request(
                "PUT",
                address,
                data=data,
                headers=dict(headers),
                timeout=self._timeout,
                allow_redirects=False,
            )

        upload = ResumableUpload(
            parcel,
            note,
            start=start,
            send=send,
            refused=lambda answer: google_packages().refused(
                answer.status_code, answer.text, response=answer
            ),
        )
        try:
            while not (about := self._retried(upload.advance, name, "write")):
                pass
        except Conflict:
            upload.forget()
            raise
        return self._blob(about)

    def _fetch(self, name: str, stream: IO[bytes], digest: Callable[[], Digest] | None) -> Blob:
        """Read an object into `stream`. Only what comes damaged twice is: it may have been one
        answer, or something on the way that answered for the service.
        """
        try:
            return self._fetch_once(name, Sink(stream, digest and digest()))
        except Corrupt:
            stream.seek(0)
            stream.truncate()
            return self._fetch_once(name, Sink(stream, digest and digest()))

    def _fetch_once(self, name: str, sink: Sink) -> Blob:
        """After an interruption the rest of the same generation is read, for as long as some of it
        comes.
        """
        about = self.stat(name)
        if about is None:
            raise Missing(f"{self.url_of(name)} is not there; see what lies in {self.url}")
        blob = self._bucket.blob(self._prefix + name, generation=about.generation)

        def advance() -> None:
            blob.download_to_file(
                sink,
                start=sink.bytes or None,
                raw_download=True,
                checksum=None,
                **self._request_options,
            )
            if sink.bytes < about.bytes:
                raise ConnectionError(f"{sink.bytes} of {about.bytes} bytes came")

        while (before := sink.bytes) < about.bytes:
            try:
                self._retried(advance, name, "read")
            except Failed as error:
                out_of_time = isinstance(error.__cause__, google_packages().RetryError)
                if not out_of_time or sink.bytes == before:
                    raise
        if sink.crc32c != about.crc32c:
            raise Corrupt(
                f"{self.url_of(name)} is damaged: it has CRC32C {sink.crc32c}, {about.crc32c} was"
                " written; take another copy"
            )
        return about

    def _blob(self, about: Mapping[str, Any]) -> Blob:
        updated = datetime.fromisoformat(about["updated"]).timestamp()
        return Blob(
            about["name"].removeprefix(self._prefix),
            int(about["size"]),
            about["crc32c"],
            int(about["generation"]),
            updated,
        )

    def _retried(self, act: Callable[[], T], name: str, verb: str) -> T:
        """Repeat `act` until it succeeds, raises an error that repeating cannot help, or time is
        up.
        """
        retry = (
            google_packages()
            .retry.with_delay(FIRST_PAUSE_S, LONGEST_PAUSE_S, 2.0)
            .with_timeout(self._patience_s)
        )

        def attempt() -> T:
            given_up.check()
            try:
                return act()
            except Exception as error:
                if is_passing_refusal(error):
                    raise ConnectionError(service_message(error)) from error  # which is repeated
                raise

        try:
            done: T = retry(attempt)()
        except IngotError:
            raise
        except Exception as error:
            raise translate_error(error, self.url_of(name), verb, self._patience_s) from error
        return done
