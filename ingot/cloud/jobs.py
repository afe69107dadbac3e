"""Custom jobs of Vertex AI: make, look, cancel, find by labels. What a job means is the launcher's
to know.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ingot.cloud.clients import Google, ask, in_words, messages

_TYPES = "google.cloud.aiplatform_v1"
ALIVE = ("QUEUED", "PENDING", "RUNNING", "PAUSED", "UPDATING", "CANCELLING")
"""States of a job that may still do something, without their prefix."""
_PREFIX = "JOB_STATE_"


@dataclass(frozen=True)
class Standing:
    """How a job stands: `name` is its resource's, `state` without its prefix, `code` (of
    google.rpc) and `error` why it ended.
    """

    name: str
    state: str
    labels: Mapping[str, str]
    created: float
    code: int = 0
    error: str = ""

    @property
    def is_alive(self) -> bool:
        return self.state in ALIVE


def request(google: Google, job: Mapping[str, Any]) -> Any:
    """The request that makes `job`, which is written as the REST interface has it. Raises
    ValueError for a field that there is not.
    """
    types = messages(_TYPES)
    return types.CreateCustomJobRequest(
        parent=google.parent, custom_job=types.CustomJob.from_json(json.dumps(job))
    )


def create(google: Google, job: Mapping[str, Any]) -> Standing:
    """Make a job. Not repeated: the service gives the name, and asking twice would make two.

    Raises:
        WrongInput: it is refused: no right, no such machine or region.
        Failed: the quota is used up, or the service breaks down, after which the job may be there
            all the same.
    """
    what = f"make the job {job['displayName']}"
    return _standing(
        ask(
            google.client("jobs").create_custom_job,
            what,
            again=False,
            denied="ask for the role Vertex AI User",
            request=request(google, job),
        )
    )


def get(google: Google, name: str) -> Standing:
    return _standing(
        ask(google.client("jobs").get_custom_job, f"look at the job {name}", name=name)
    )


def cancel(google: Google, name: str) -> None:
    """Ask for the end of a job; it takes a while. One that is over is left as it is."""
    ask(google.client("jobs").cancel_custom_job, f"cancel the job {name}", name=name)


def labelled(google: Google, labels: Mapping[str, str]) -> list[Standing]:
    """All jobs of project and region with these labels, the newest first."""
    wanted = " AND ".join(f'labels.{key}="{value}"' for key, value in labels.items())
    what = f"look for jobs with {wanted}"
    with in_words(what):
        found = [
            _standing(job)
            for job in ask(
                google.client("jobs").list_custom_jobs,
                what,
                request={"parent": google.parent, "filter": wanted},
            )
        ]
    return sorted(found, key=lambda job: job.created, reverse=True)


def _standing(job: Any) -> Standing:
    created = job.create_time.timestamp() if job.create_time else 0.0
    return Standing(
        job.name,
        job.state.name.removeprefix(_PREFIX),
        dict(job.labels),
        created,
        job.error.code,
        job.error.message,
    )
