"""Google's packages for object storage, imported only here; their errors translated to ours; and
resumable uploads of large files.

An interruption costs the current chunk: the service is asked what it has, and the rest is sent.
With a note on disk another process can continue the upload. Whoever knows the address of an upload
can write to it, so only the owner may read the note.
"""

from __future__ import annotations

import base64
import functools
import json
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, Protocol

from ingot.base.errors import Failed, IngotError, WrongInput, one_line
from ingot.base.storage import disk_errors

EMULATOR = "STORAGE_EMULATOR_HOST"


class Missing(Failed):
    """There is no such object."""


class Corrupt(Failed):
    """An object does not have the checksum that it was written with."""


class Conflict(Failed):
    """An object is not of the generation that was asked for; `service_s` is the time of the answer
    by the service's clock, None where the answer has none.
    """

    def __init__(self, message: str, service_s: float | None = None) -> None:
        super().__init__(message)
        self.service_s = service_s


class _GivenUp(threading.local):
    """Whether nobody waits any more for what this thread transfers."""

    _by: threading.Event | None = None

    def watch(self, by: threading.Event) -> None:
        """From now on in this thread: `by` is set when it is given up."""
        self._by = by

    def check(self) -> None:
        """Raises Failed if it is; asked before each request and within downloads."""
        if self._by is not None and self._by.is_set():
            raise Failed("the transfer was given up")


given_up = _GivenUp()


def connect(url: str) -> tuple[Any, Any]:
    """A client, and a session for requests that the client does not offer, with the credentials of
    the environment.

    Raises:
        WrongInput: there are no credentials, or the package is not installed.
    """
    google = google_packages()
    try:
        credentials, project = (
            (google.Anonymous(), None)
            if os.environ.get(EMULATOR)
            else google.default(scopes=google.Client.SCOPE)
        )
    except google.DefaultCredentialsError as error:
        raise WrongInput(
            f"no credentials for {url} ({service_message(error)}); run `gcloud auth"
            " application-default login`"
        ) from error
    return google.Client(project=project, credentials=credentials), google.Session(credentials)


@functools.cache
def google_packages() -> SimpleNamespace:
    """The names used from Google's packages.

    Raises:
        WrongInput: one of them is not installed.
    """
    try:
        from google.api_core.exceptions import RetryError, from_http_status
        from google.auth import default
        from google.auth.credentials import AnonymousCredentials
        from google.auth.exceptions import DefaultCredentialsError, RefreshError
        from google.auth.transport.requests import AuthorizedSession
        from google.cloud.storage import Client
        from google.cloud.storage.retry import DEFAULT_RETRY
        from google_crc32c import Checksum
    except ImportError as error:
        raise WrongInput(
            "a gs:// address needs a package that is not installed; pip install 'ingot[gcp]'"
        ) from error
    return SimpleNamespace(
        Client=Client,
        Session=AuthorizedSession,
        Anonymous=AnonymousCredentials,
        default=default,
        retry=DEFAULT_RETRY,
        refused=from_http_status,
        DefaultCredentialsError=DefaultCredentialsError,
        RefreshError=RefreshError,
        RetryError=RetryError,
        Checksum=Checksum,
    )


def is_passing_refusal(error: BaseException) -> bool:
    """Whether credentials are not given for now only: whoever hands them out, such as the metadata
    server of a machine, is not reached or busy. An answer of it that says no is none of these.
    """
    from google.auth.exceptions import RefreshError, TransportError

    cause = error.__cause__
    unanswered = isinstance(cause, TransportError) and len(cause.args) == 1  # else with the answer
    return isinstance(error, RefreshError) and (error.retryable or unanswered)


def translate_error(error: Any, url: str, verb: str, patience_s: float) -> IngotError:
    """Our error for the failed attempt to `verb` (read, write, list, delete, look at) `url`."""
    code, short = getattr(error, "code", None), service_message(error)
    bucket = url.split("/")[2]
    if code == 404 and verb in ("read", "delete") and "bucket does not exist" not in short:
        return Missing(f"{url} is not there any more; see who else works there")
    if code == 404:
        return WrongInput(
            f"there is no bucket {bucket} to {verb} {url} in ({short}); create it, or mend the"
            " address"
        )
    if code == 412:
        date = error.response.headers.get("Date") if error.response is not None else None
        return Conflict(
            f"{url} was written by somebody else meanwhile; see who else works there",
            parsedate_to_datetime(date).timestamp() if date else None,
        )
    if code in (401, 403):
        return WrongInput(
            f"no right to {verb} {url} ({int(code)}: {short}); give this account the role Storage"
            f" Object User on the bucket {bucket}"
        )
    if isinstance(error, google_packages().RefreshError):
        return WrongInput(
            f"the credentials for {url} are refused ({short}); run `gcloud auth application-default"
            " login`"
        )
    cause = getattr(error, "cause", None)
    if cause is not None:
        return Failed(
            f"could not {verb} {url} within {patience_s:g} s ({service_message(cause)}); see what"
            " is wrong there, then run the same command again"
        )
    return Failed(
        f"could not {verb} {url} ({int(code) if code else type(error).__name__}: {short}); run the"
        " same command again"
    )


def service_message(error: Any) -> str:
    """The service's own message in one line, or else the client's."""
    try:
        text = error.response.json()["error"]["message"]
    except (AttributeError, KeyError, TypeError, ValueError):
        text = getattr(error, "message", None) or str(error) or type(error).__name__
    return one_line(text)


class Digest(Protocol):
    """The method of hashlib's objects that is used here."""

    def update(self, data: bytes, /) -> None: ...


class Sink:
    """Counts bytes and computes their checksum while they are written to a stream, if there is
    one.
    """

    def __init__(self, stream: IO[bytes] | None, digest: Digest | None) -> None:
        self._stream = stream
        self._digest = digest
        self._crc = google_packages().Checksum()
        self.bytes = 0

    def write(self, data: bytes) -> int:
        given_up.check()
        if self._stream is not None:
            with disk_errors(str(getattr(self._stream, "name", "memory"))):
                self._stream.write(data)
        if self._digest is not None:
            self._digest.update(data)
        self._crc.update(data)
        self.bytes += len(data)
        return len(data)

    @property
    def crc32c(self) -> str:
        return base64.b64encode(self._crc.digest()).decode()


CHUNK_BYTES = 32 << 20
"""A multiple of 256 KiB, which the service requires."""


@dataclass(frozen=True)
class UploadSource:
    """The file that is uploaded, its size and checksum (base64 of CRC32C), the object's name, and
    the generation that it replaces.
    """

    name: str
    path: Path
    bytes: int
    crc32c: str
    generation: int | None


class ResumableUpload:
    """An upload in chunks.

    Args:
        start: opens an upload and returns its address.
        send: called as `send(address, data, headers)`, puts data to the address.
        refused: makes an error of an answer.
    """

    def __init__(
        self,
        source: UploadSource,
        note: Path | None,
        *,
        start: Callable[[], str],
        send: Callable[[str, bytes, Mapping[str, str]], Any],
        refused: Callable[[Any], Exception],
    ) -> None:
        self._source = source
        self._note = note
        self._start = start
        self._send = send
        self._refused = refused
        self._address = self._saved_address()
        self._at: int | None = None  # bytes that the service has; None until it is asked

    def advance(self) -> Mapping[str, Any] | None:
        """Send the next chunk; to be called again after an error. Returns the service's description
        of the object once it is complete.

        Raises:
            ConnectionError: the service has forgotten the upload, or stored nothing of the chunk;
                the next call starts again or sends the chunk again.
            Failed: the file is shorter than it was.
        """
        source = self._source
        if self._address is None:
            self._address, self._at = self._start(), 0
            self._write_note(self._address)
        if self._at is None and (
            done := self._handle_answer(
                self._send(self._address, b"", {"Content-Range": f"bytes */{source.bytes}"})
            )
        ):
            return done
        begin, self._at = self._at or 0, None
        with source.path.open("rb") as stream:
            data = os.pread(stream.fileno(), CHUNK_BYTES, begin)
        end = begin + len(data)
        if len(data) < min(CHUNK_BYTES, source.bytes - begin):
            raise Failed(f"{source.path} changed while it was sent; run the same command again")
        headers = {"Content-Range": f"bytes {begin}-{end - 1}/{source.bytes}"}
        if end == source.bytes:
            headers["x-goog-hash"] = f"crc32c={source.crc32c}"
        done = self._handle_answer(self._send(self._address, data, headers))
        if done is None and (self._at or 0) <= begin:
            raise ConnectionError("the service keeps nothing of what is sent")
        return done

    def forget(self) -> None:
        """Delete the note: there is nothing to continue."""
        if self._note is not None:
            self._note.unlink(missing_ok=True)

    def _handle_answer(self, answer: Any) -> Mapping[str, Any] | None:
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

    def _saved_address(self) -> str | None:
        """The address of an interrupted upload of the same content."""
        try:
            note = json.loads(self._note.read_bytes()) if self._note is not None else None
        except (OSError, ValueError):
            return None
        return (
            str(note["address"])
            if isinstance(note, dict) and note.get("of") == self._identity() and "address" in note
            else None
        )

    def _write_note(self, address: str) -> None:
        if self._note is not None:
            descriptor = os.open(self._note, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "w") as stream:
                json.dump({"of": self._identity(), "address": address}, stream)

    def _identity(self) -> dict[str, Any]:
        return {**asdict(self._source), "path": str(self._source.path)}
