"""Google's packages for object storage: the one place that imports them, and their errors in
words.
"""

from __future__ import annotations

import functools
import os
from email.utils import parsedate_to_datetime
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
    google = packages()
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
def packages() -> SimpleNamespace:
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


def in_words(error: Any, url: str, verb: str, patience_s: float) -> IngotError:
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
    if isinstance(error, packages().RefreshError):
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
