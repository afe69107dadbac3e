"""Google's packages for object storage: the one place that imports them, their errors in words, and
large files on their way into a bucket by the service's resumable uploads.

A break costs the chunk at hand: the service is asked what it keeps, and the rest is sent. With a
note on disk that holds for another process too. The address of an upload is a key to it, so the
note is for its owner's eyes alone.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ingot.base.errors import Failed, IngotError, WrongInput

EMULATOR = "STORAGE_EMULATOR_HOST"


class Missing(Failed):
    """There is no such object."""


class Corrupt(Failed):
    """An object does not have the checksum that it was written with."""


class Conflict(Failed):
    """An object is not of the generation that was asked for; `service_s` is the service's clock
    when it said so, None where it told none.
    """

    def __init__(self, message: str, service_s: float | None = None) -> None:
        super().__init__(message)
        self.service_s = service_s


def connect(url: str) -> tuple[Any, Any]:
    """A client, and a session for what the client has no face for; with the credentials of the
    environment.

    Raises:
        WrongInput: there are none, or the package is missing.
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
            f"no credentials for {url} ({_short(error)}); run `gcloud auth application-default"
            " login`"
        ) from error
    return google.Client(project=project, credentials=credentials), google.Session(credentials)


@functools.cache
def google_packages() -> SimpleNamespace:
    """What is used of them.

    Raises:
        WrongInput: one is not installed.
    """
    try:
        from google.api_core.exceptions import from_http_status
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
        Checksum=Checksum,
    )


def translate_error(error: Any, url: str, verb: str, patience_s: float) -> IngotError:
    """What to say when an attempt to `verb` (read, write, list, delete, look at) `url` ended with
    `error`.
    """
    code, short = getattr(error, "code", None), _short(error)
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
            f"could not {verb} {url} within {patience_s:g} s ({_short(cause)}); see what is wrong"
            " there, then run the same command again"
        )
    return Failed(
        f"could not {verb} {url} ({int(code) if code else type(error).__name__}: {short}); run the"
        " same command again"
    )


def _short(error: Any) -> str:
    """What the service says, or else the client."""
    try:
        text = error.response.json()["error"]["message"]
    except (AttributeError, KeyError, TypeError, ValueError):
        text = getattr(error, "message", None) or str(error) or type(error).__name__
    return " ".join(str(text).split())[:300]


CHUNK_BYTES = 32 << 20
"""A multiple of 256 KiB, as the service wants it."""


@dataclass(frozen=True)
class UploadSource:
    """What is sent where: a file, its size and checksum (base64 of CRC32C), and the generation that
    it shall replace.
    """

    name: str
    path: Path
    bytes: int
    crc32c: str
    generation: int | None


class ResumableUpload:
    """`start()` opens an upload and gives its address; `send(address, data, headers)` puts to it;
    `refused(answer)` makes an error of an answer.
    """

    def __init__(
        self,
        parcel: UploadSource,
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
