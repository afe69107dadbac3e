"""Batches of Managed Service for Apache Spark (Dataproc Serverless): made, looked at, cancelled.
What is in one is for `launch/dataproc.py` to say.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from ingot.base.errors import Failed, WrongInput
from ingot.cloud.clients import Google, ask, in_words, packages

LOOK_S = 2.0
GONE_S = 600.0
"""How long a cancelled batch may take to end."""
OVER = ("SUCCEEDED", "FAILED", "CANCELLED")


@dataclass(frozen=True)
class Standing:
    """How a batch stands: `state` as the service names it, what it says to that, and where its
    driver's output lies (gs://, a prefix).
    """

    name: str
    state: str
    message: str
    output: str
    operation: str
    labels: dict[str, str]

    @property
    def is_alive(self) -> bool:
        return self.state not in OVER


def parent(google: Google) -> str:
    return f"projects/{google.project}/locations/{google.cloud.region}"


def create(google: Google, batch_id: str, batch: Any, request_id: str) -> None:
    """Ask for a batch under an id of our own. One of this id that is there already is ours, whose
    answer was lost.
    """
    try:
        ask(
            google.client("batches").create_batch,
            f"make the Spark batch {batch_id}",
            denied="ask for the roles Dataproc Editor and Service Account User",
            request={
                "parent": parent(google),
                "batch": batch,
                "batch_id": batch_id,
                "request_id": request_id,
            },
        )
    except WrongInput as error:
        if not isinstance(error.__cause__, packages()["exceptions"].Conflict):
            raise


def get(google: Google, batch_id: str) -> Standing | None:
    """None where there is none."""
    try:
        found = ask(
            google.client("batches").get_batch,
            f"look at the Spark batch {batch_id}",
            request={"name": f"{parent(google)}/batches/{batch_id}"},
        )
    except WrongInput as error:
        if isinstance(error.__cause__, packages()["exceptions"].NotFound):
            return None
        raise
    return _standing(found)


def labelled(google: Google, labels: dict[str, str]) -> list[Standing]:
    """Batches with all of these labels, the newest first."""
    wanted = " AND ".join(f"labels.{name}={value}" for name, value in sorted(labels.items()))
    request, what = (
        {
            "parent": parent(google),
            "filter": wanted,
            "order_by": "create_time desc",
        },
        "list Spark batches",
    )
    with in_words(what):  # each page is asked for when it is come to
        return [
            _standing(found)
            for found in ask(google.client("batches").list_batches, what, request=request)
        ]


def cancel(google: Google, batch_id: str) -> None:
    """End a batch and wait until it is over; nothing where it is. Raises Failed when it does not
    end.
    """
    until = time.monotonic() + GONE_S
    asked = False
    while (standing := get(google, batch_id)) is not None and standing.is_alive:
        if not asked:
            asked = _ask_to_end(google, standing)
        if time.monotonic() > until:
            raise Failed(
                f"the Spark batch {batch_id} was cancelled {GONE_S:g} s ago and still is"
                f" {standing.state}; see it in the console"
            )
        time.sleep(LOOK_S)


def _ask_to_end(google: Google, standing: Standing) -> bool:
    """By its operation, which alone can be cancelled. False where it has none yet, or has just
    ended.
    """
    if not standing.operation:
        return False
    try:
        ask(
            google.client("batches").cancel_operation,
            f"cancel {standing.name}",
            request={"name": standing.operation},
        )
    except WrongInput:
        now = get(google, standing.name.rpartition("/")[2])
        if now is not None and now.is_alive:
            raise
    return True


def _standing(batch: Any) -> Standing:
    return Standing(
        batch.name,
        batch.state.name,
        batch.state_message,
        batch.runtime_info.output_uri,
        batch.operation,
        dict(batch.labels),
    )
