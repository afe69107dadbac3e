"""Long-running operations of Vertex AI's services: to wait for one, to see which still run on a
thing, to give one up.
"""

from __future__ import annotations

import time
from typing import Any

from ingot.base.errors import Failed, WrongInput
from ingot.cloud.clients import Google, ask, in_words, messages, packages

POLL_S = 5.0
"""Seconds between two looks."""
LIMIT_S = 7200.0
"""How long an operation is waited for: the longest that Vertex AI gives a deployment."""


def wait(
    google: Google,
    service: str,
    name: str,
    what: str,
    response: str | None = None,
    *,
    limit_s: float = LIMIT_S,
) -> Any:
    """Look at the operation `name` until it is done; its response as a message of the type
    `response`.

    Raises:
        WrongInput, Failed: it ended with an error, or not within `limit_s`.
    """
    client, deadline = google.client(service), time.monotonic() + limit_s
    while not (operation := ask(client.get_operation, what, request={"name": name})).done:
        if time.monotonic() > deadline:
            raise Failed(
                f"could not {what}: {name} was not done after {limit_s:g} s; look at it in the"
                " console, then run the same command again"
            )
        time.sleep(POLL_S)
    if operation.error.code:
        with in_words(what):
            raise packages()["exceptions"].from_grpc_status(
                operation.error.code, operation.error.message
            )
    if response is None:
        return None
    kind = getattr(messages("google.cloud.aiplatform_v1"), response)
    raw = kind.pb(kind())
    operation.response.Unpack(raw)
    return kind.wrap(raw)


def running(google: Google, service: str, thing: str) -> list[str]:
    """Names of the operations on `thing` (a model, an endpoint) that are not done; none where there
    is no such thing.
    """
    client, found, page = google.client(service), [], ""
    try:
        while True:
            answer = ask(
                client.list_operations,
                f"see what is done to {thing}",
                request={"name": thing, "page_token": page},
            )
            found += [operation.name for operation in answer.operations if not operation.done]
            if not (page := answer.next_page_token):
                return found
    except WrongInput as error:
        if code_of(error) == 404:
            return []
        raise


def cancel(google: Google, service: str, name: str) -> None:
    """Ask for the end of an operation; it may be done all the same."""
    ask(google.client(service).cancel_operation, f"give up {name}", request={"name": name})


def code_of(error: BaseException) -> int | None:
    """The HTTP status with which Google refused, of an error that `ask` or `in_words` made; None
    where it was no refusal.
    """
    code = getattr(error.__cause__, "code", None)
    return int(code) if code is not None else None
