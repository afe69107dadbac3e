"""Errors of Google's clients as ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ingot.base.errors import Failed, WrongInput
from ingot.cloud import clients
from ingot.cloud.clients import call_api, google_errors
from tests.lazy import lazy, require

require("google.auth", reason="google-auth is not installed")
auth = lazy("google.auth.exceptions")


def refuse(*cause: Any) -> None:
    """As the credentials of a machine do whose metadata server answers so."""
    raise auth.RefreshError("no token") from auth.TransportError(*cause)


def test_credentials_that_do_not_come_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "FIRST_WAIT_S", 0.001)
    whims = [("unavailable",)] * 2

    def act() -> str:
        if whims:
            refuse(*whims.pop())
        return "done"

    def call(*, retry: Callable[..., Any] | None, timeout: float) -> Any:
        return retry(act)() if retry else act()

    assert call_api(call, "make the job") == "done"
    assert not whims
    whims[:] = [("unavailable",)] * 2
    with pytest.raises(Failed, match="could not make the job: no credentials come"):
        call_api(call, "make the job", again=False)
    whims[:] = [("no account here", "the answer")]
    with pytest.raises(WrongInput, match="could not make the job: the credentials are refused"):
        call_api(call, "make the job")


def test_a_refusal_is_the_users_to_mend() -> None:
    with (
        pytest.raises(WrongInput, match="could not look: the credentials are refused"),
        google_errors("look"),
    ):
        raise auth.RefreshError("invalid_grant")
