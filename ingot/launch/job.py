"""A job: one ingot command with what it needs. Every launcher takes the same."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

State = Literal["queued", "running", "succeeded", "failed", "preempted", "cancelled", "unknown"]


@dataclass(frozen=True)
class Job:
    """One command and the place it needs.

    `argv` is what stands after `ingot` (`("train", "recipe.yaml", "train.steps=10")`), the same wherever it runs.
    `processes` is processes (devices) per node. `environment` is added to what the
    launcher's machine has; `secrets` are names of variables whose values must never be written down.
    """

    name: str
    argv: tuple[str, ...]
    processes: int = 1
    nodes: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    image: str | None = None
    time_limit_s: float | None = None


@dataclass(frozen=True)
class Handle:
    """What finds a submitted job again; stored as JSON under `RUN/jobs/`.

    `id` is the place's own number for the job (a process id, a Slurm job id), `started` is seconds since the epoch.
    """

    name: str
    kind: str
    id: str
    argv: tuple[str, ...]
    started: float
    log: str

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Handle:
        values = json.loads(text)
        return cls(**{**values, "argv": tuple(values["argv"])})


class Launcher(Protocol):
    """The face of every place that jobs run in."""

    def can(self, job: Job) -> list[str]:
        """Why this launcher cannot run `job`, one reason each; [] when it can."""
        ...

    def render(self, job: Job) -> str:
        """What would be sent, as text. Has no effect."""
        ...

    def submit(self, job: Job) -> Handle: ...
    def status(self, handle: Handle) -> State: ...
    def logs(self, handle: Handle) -> Path: ...
    def cancel(self, handle: Handle) -> None: ...
