"""A job: one ingot command with what it needs; the launcher's protocol; and the handles of a run's
jobs, `RUN/jobs/VERB.KIND.json`, each with the recipe that its place was given, `VERB.KIND.yaml`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from ingot.base.errors import IngotError, WrongInput
from ingot.base.progress import say
from ingot.base.storage import write_atomic
from ingot.config.doors import PLACES
from ingot.config.load import dump_recipe, load_recipe
from ingot.config.recipe import Recipe

JobState = Literal["queued", "running", "succeeded", "failed", "preempted", "cancelled", "unknown"]
FINAL_STATES: tuple[JobState, ...] = ("succeeded", "failed", "preempted", "cancelled")


@dataclass(frozen=True)
class Job:
    """One command and the place it needs.

    `argv` is what stands after `ingot` (`("train", "recipe.yaml", "train.steps=10")`), the same
    wherever it runs. `processes` is the number of ranks on each node. `environment` is added to
    what the nodes have; `secrets` are names of variables whose values must never be written down.
    `rendezvous` is where the nodes of this start leave notes, a folder or `gs://`. `run_folder_url`
    is the replica of the run folder that nodes without our disk work from, None where they share a
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
    rendezvous: str | None = None
    run_folder_url: str | None = None

    @property
    def world(self) -> int:
        """Ranks on all nodes together."""
        return self.nodes * self.processes

    @property
    def start_number(self) -> str:
        """The number of this start, which its rendezvous ends with."""
        return (self.rendezvous or "").rpartition("-")[2]

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


class JobLog(Protocol):
    """The log of a job, wherever it is kept."""

    def read(self) -> bytes:
        """What was added since the last call, b"" for nothing."""
        ...


class Launcher(Protocol):
    """What every place that runs jobs must offer. It is made of the recipe alone, without effects.

    `poll_s`: seconds between two queries of a job's state. `shares_disk`: whether the nodes see our
    disk; otherwise they work from the run folder's replica in `cloud.bucket`, and their time is
    bounded by `cloud.max_run` and `cloud.max_cost`. `paid_by_use`: whether the place is billed by
    what is used rather than by machine and hour.
    """

    poll_s: float
    shares_disk: bool
    paid_by_use: bool

    def can(self, job: Job) -> list[str]:
        """Why this launcher cannot run `job`, one reason each; [] when it can. Has no effect."""
        ...

    def render(self, job: Job) -> str:
        """What would be sent, as text, without secrets. Has no effect."""
        ...

    def submit(self, job: Job) -> Handle:
        """Start it and store the handle. Raises WrongInput when it cannot run there, Failed when
        the place breaks down.
        """
        ...

    def status(self, handle: Handle) -> JobState: ...

    def log(self, handle: Handle) -> JobLog: ...

    def signal(self, handle: Handle, number: int) -> None:
        """Send a signal to all ranks, as far as the place can."""
        ...

    def cancel(self, handle: Handle) -> None:
        """End it at once, and wait until nothing of it is left."""
        ...


@runtime_checkable
class ExclusiveLauncher(Protocol):
    """A launcher that also knows whether another computer has started the same job."""

    def busy(self, job: Job) -> str | None:
        """Why the job must not be started now; None when it may. Changes nothing."""
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
    """The state, `unknown` while the place does not answer: a network that is down for a minute
    must not end a training.
    """
    try:
        return launcher.status(handle)
    except IngotError as error:
        say(f"warning: {error}")
        return "unknown"


def jobs_folder(root: Path) -> Path:
    return root / "jobs"


def store_handle(root: Path, handle: Handle, recipe: Recipe | None = None) -> Handle:
    """Store a handle, and the recipe by which its place is queried later; without `recipe` that is
    stored already.
    """
    if recipe is not None:
        store_recipe(root, handle, recipe)
    write_atomic(jobs_folder(root) / f"{handle.name}.{handle.kind}.json", handle.to_json())
    return handle


def stored_handles(root: Path) -> list[Handle]:
    """The handles of all jobs of a run at other places, the newest first."""
    found = []
    for path in jobs_folder(root).glob("*.*.json"):
        try:
            found.append(Handle.from_json(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # of another version, or being written
    return sorted(found, key=lambda handle: handle.started, reverse=True)


def find_handle(root: Path, name: str, kind: str) -> Handle | None:
    """The handle of the job that was last submitted as `name` to the place `kind`."""
    return next(
        (handle for handle in stored_handles(root) if (handle.name, handle.kind) == (name, kind)),
        None,
    )


def store_recipe(root: Path, handle: Handle, recipe: Recipe) -> None:
    write_atomic(_recipe_file(root, handle), dump_recipe(recipe))


def recipe_of(root: Path, handle: Handle) -> Recipe:
    """The recipe that the job was submitted with. Raises WrongInput where it cannot be read, such
    as one of another version.
    """
    return load_recipe([_recipe_file(root, handle)], environ={}, dotenv=None)


def has_same_result(root: Path, handle: Handle, recipe: Recipe) -> bool:
    """Whether a job was submitted with this recipe, as far as its result depends on it."""
    with contextlib.suppress(IngotError):  # a recipe of another version counts as another recipe
        return _result_knobs(recipe_of(root, handle)) == _result_knobs(recipe)
    return False


def _result_knobs(recipe: Recipe) -> dict[str, Any]:
    """All but where it runs; the number of ranks counts."""
    return {
        **recipe.model_dump(exclude={"launch", "cloud", "serve"}),
        "ranks": (recipe.launch.nodes, recipe.launch.processes),
    }


def _recipe_file(root: Path, handle: Handle) -> Path:
    return jobs_folder(root) / f"{handle.name}.{handle.kind}.yaml"
