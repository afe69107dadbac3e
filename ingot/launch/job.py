"""A job: one ingot command with what it needs; the handle that finds it again; and the protocol of
launchers. Does not import the recipe, so that a process that only starts ranks and waits stays
small.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from ingot.base.errors import IngotError, WrongInput
from ingot.base.progress import say
from ingot.config.doors import PLACES

if TYPE_CHECKING:
    from ingot.config.recipe import Recipe

JobState = Literal[
    "queued", "running", "suspended", "succeeded", "failed", "preempted", "cancelled", "unknown"
]
FINAL_STATES: tuple[JobState, ...] = ("succeeded", "failed", "preempted", "cancelled")


@dataclass(frozen=True)
class Job:
    """One command and the resources it needs.

    `argv` is what follows `ingot` (`("train", "recipe.yaml", "train.steps=10")`), the same wherever
    it runs. `processes` is the number of ranks on each node. `environment` is added to the nodes'
    own; `secrets` are names of variables whose values must never be written down. `rendezvous` is
    where the nodes of this start exchange notes, a folder or `gs://`. `run_folder_url` is the
    replica of the run folder for nodes that do not share our disk, else empty.
    """

    name: str
    argv: tuple[str, ...]
    processes: int = 1
    nodes: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    image: str | None = None
    time_limit_s: float | None = None
    rendezvous: str = ""
    run_folder_url: str = ""

    @property
    def world(self) -> int:
        """Ranks on all nodes together."""
        return self.nodes * self.processes

    @property
    def start_number(self) -> str:
        """The number of this start, the last part of its rendezvous."""
        return self.rendezvous.rpartition("-")[2]

    @property
    def public_environment(self) -> dict[str, str]:
        """`environment` without the secrets, sorted by name."""
        return {
            name: value
            for name, value in sorted(self.environment.items())
            if name not in self.secrets
        }


@dataclass(frozen=True)
class Handle:
    """Finds a submitted job again; stored as JSON under `RUN/jobs/`.

    `id` is the place's own identifier of the job (a process id, a Slurm job id), `started` is
    seconds since the epoch, `about` is what else is needed to find it (a zone, a list of hosts).
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


class JobLog(Protocol):
    """The log of a job, wherever it is stored."""

    def read(self) -> bytes:
        """What was added since the last call, b"" for nothing."""
        ...


class Launcher(Protocol):
    """The interface of every place that runs jobs. Made from the recipe alone, without side
    effects.

    `poll_s`: seconds between two queries of a job's state. `shares_disk`: whether the nodes see our
    disk; otherwise they work from the run folder's replica in `cloud.bucket`, and their time is
    bounded by `cloud.max_run` and `cloud.max_cost`. `paid_by_use`: whether the place is billed by
    use rather than by machine and hour.
    """

    poll_s: float
    shares_disk: bool
    paid_by_use: bool

    def can(self, job: Job) -> list[str]:
        """Why this launcher cannot run `job`, one reason each; [] if it can. No side effects."""
        ...

    def render(self, job: Job) -> str:
        """What would be sent, as text, without secrets. No side effects."""
        ...

    def submit(self, job: Job) -> Handle:
        """Start the job and store its handle. Raises WrongInput if it cannot run there, Failed if
        the place does not work.
        """
        ...

    def status(self, handle: Handle) -> JobState: ...

    def log(self, handle: Handle) -> JobLog: ...

    def signal(self, handle: Handle, number: int) -> None:
        """Send a signal to all ranks, as far as the place supports it."""
        ...

    def cancel(self, handle: Handle) -> None:
        """End the job immediately, and wait until nothing of it is left."""
        ...


@runtime_checkable
class ExclusiveLauncher(Protocol):
    """A launcher that also knows whether another computer has started the same job."""

    def busy(self, job: Job) -> str | None:
        """Why the job must not be started now; None if it may. No side effects."""
        ...


@runtime_checkable
class AdoptingLauncher(ExclusiveLauncher, Protocol):
    """One whose `submit` gives the handle of the job that another computer has started, where that
    does the same.
    """

    def runs(self, job: Job) -> bool:
        """Whether a job of this run and verb is alive, so that nothing of its folder in the bucket
        may be changed. No side effects.
        """
        ...


@runtime_checkable
class QueueLauncher(Protocol):
    """A launcher of a place where jobs wait for machines without being charged."""

    def waited_s(self, handle: Handle) -> float | None:
        """How long the job waited before it ran, by the place's clock; None if it never ran."""
        ...


def launcher_of(recipe: Recipe) -> Launcher:
    """The launcher of `launch.kind`. Raises WrongInput for `local`, which needs none, and for an
    unknown kind.
    """
    kind = recipe.launch.kind
    if kind == "local":
        raise WrongInput(
            "launch.kind local has no launcher; choose one of"
            f" {', '.join(name for name in PLACES.kinds() if name != 'local')}"
        )
    launcher: Launcher = PLACES.load(kind, "launch.kind")(recipe)
    return launcher


def status_or_unknown(launcher: Launcher, handle: Handle) -> JobState:
    """The state, or `unknown` while the place does not answer: a short network outage must not end
    a training.
    """
    try:
        return launcher.status(handle)
    except IngotError as error:
        say(f"warning: {error}")
        return "unknown"
