"""Credentials that do not come for now, by Google's own ones for a machine of its cloud."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from ingot.base.errors import Failed, WrongInput
from ingot.base.remote import bucket as bucket_module
from ingot.base.remote.bucket import open_bucket
from ingot.base.remote.service import google_packages, is_passing_refusal
from tests.gcs import serving
from tests.lazy import lazy

auth = lazy("google.auth.exceptions")
compute_engine = lazy("google.auth.compute_engine")

Request = Callable[..., Any]


def unreachable(*_: Any, **__: Any) -> Any:
    raise auth.TransportError("no route to the metadata server")


def answering(status: int) -> Request:
    return lambda *_, **__: SimpleNamespace(status=status, headers={}, data=b"said")


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("google.auth._exponential_backoff.time.sleep", lambda _: None)
    monkeypatch.setattr(bucket_module, "FIRST_PAUSE_S", 0.001)


@pytest.mark.parametrize(
    ("request_", "passing"),
    [(unreachable, True), (answering(503), True), (answering(404), False)],
)
def test_a_metadata_server_that_does_not_answer_is_no_refusal(
    request_: Request, passing: bool
) -> None:
    with pytest.raises(auth.RefreshError) as found:
        compute_engine.Credentials().refresh(request_)
    assert is_passing_refusal(found.value) is passing


def test_other_refusals_are_for_good() -> None:
    assert not is_passing_refusal(auth.RefreshError("invalid_grant: Token has been revoked"))
    assert not is_passing_refusal(OSError("disk"))
    assert is_passing_refusal(auth.RefreshError("busy", retryable=True))


def test_credentials_are_waited_for_as_the_bucket_is(monkeypatch: pytest.MonkeyPatch) -> None:
    whims: list[Request] = []

    class Credentials(google_packages().Anonymous):  # type: ignore[misc]
        """Those of a machine, whose token is asked for before each request."""

        def before_request(self, *_: Any) -> None:
            if whims:
                compute_engine.Credentials().refresh(whims.pop())

    monkeypatch.setattr(google_packages(), "Anonymous", Credentials)
    with serving(monkeypatch):
        bucket = open_bucket("gs://bucket/x", patience_s=60)
        whims += [unreachable] * 2
        bucket.put("a", b"kept")
        assert not whims
        assert bucket.get("a") == b"kept"
        whims += [answering(404)]
        with pytest.raises(WrongInput, match="the credentials for gs://bucket/x/a are refused"):
            bucket.put("a", b"late")
        for pause in ("FIRST_PAUSE_S", "LONGEST_PAUSE_S"):
            monkeypatch.setattr(bucket_module, pause, 1e9)
        whims += [unreachable]
        with pytest.raises(Failed, match=r"could not write gs://bucket/x/a within .* unavailable"):
            bucket.put("a", b"late")
