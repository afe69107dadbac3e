"""A job: one ingot command with what it needs. Every launcher takes the same."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

State = Literal["queued", "running", "succeeded", "failed", "preempted", "cancelled", "unknown"]
OVER: tuple[State, ...] = ("succeeded", "failed", "preempted", "cancelled")


@dataclass(frozen=True)
class Job:
    """One command and the place it needs.

    `argv` is what stands after `ingot` (`("train", "recipe.yaml", "train.steps=10")`), the same
    wherever it runs. `processes` is processes (devices) per node. `environment` is added to what
    the nodes have; `secrets` are names of variables whose values must never be written down. `meet`
    is where the nodes of this start leave notes for each other and for us, a folder or `gs://`;
    `mirror` is the run folder's replica in a bucket that they work from, None where they share a
    disk with us.
    """

    name: str
    argv: tuple[str, ...]
    processes: int = 1
    nodes: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    image: str | None = None
    time_limit_s: float | None = None
    meet: str | None = None
    mirror: str | None = None

    @property
    def world(self) -> int:
        return self.nodes * self.processes


@dataclass(frozen=True)
class Handle:
    """What finds a submitted job again; stored as JSON under `RUN/jobs/`.

    `id` is the place's own number for the job (a process id, a Slurm job id), `started` is seconds
    since the epoch, `about` is what else the place needs to find it (a zone, a list of hosts).
    """

    name: str
    kind: str
    id: str
    argv: tuple[str, ...]
    started: float
    log: str
    about: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Handle:
        values = json.loads(text)
        return cls(**{**values, "argv": tuple(values["argv"])})


class Log(Protocol):
    """What a job says, wherever that is kept."""

    def read(self) -> bytes:
        """What was said since the last call, b"" when nothing."""
        ...


class Launcher(Protocol):
    """The face of every place that jobs run in. `look_s`: seconds between two questions how a job
    stands.
    """

    look_s: float

    def can(self, job: Job) -> list[str]:
        """Why this launcher cannot run `job`, one reason each; [] when it can. Has no effect."""
        ...

    def render(self, job: Job) -> str:
        """What would be sent, as text, without secrets. Has no effect."""
        ...

    def submit(self, job: Job) -> Handle:
        """Start it; the handle is stored. Raises WrongInput when it cannot run there, Failed when
        the place breaks down.
        """
        ...

    def status(self, handle: Handle) -> State: ...

    def log(self, handle: Handle) -> Log: ...

    def signal(self, handle: Handle, number: int) -> None:
        """Send a signal to all ranks, as far as the place can."""
        ...

    def cancel(self, handle: Handle) -> None:
        """End it at once and wait until it is gone; nothing of it is left behind."""
        ...
