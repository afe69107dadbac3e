"""The jobs that a run folder knows of, wherever they run: what `ingot launch status`, `logs` and
`cancel` ask.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Protocol

from ingot.base.errors import Failed, IngotError
from ingot.base.heartbeat import read_beats
from ingot.config.load import load_recipe
from ingot.config.sections.training import Checkpoint
from ingot.launch.handles import recipe_of, stored
from ingot.launch.job import OVER, Handle, Log, State
from ingot.launch.local import LocalLauncher
from ingot.launch.places import launcher
from ingot.launch.remote import FileLog, ask_or_unknown

LOCAL_LOOK_S = 0.2
MORE_S = 60.0
"""What a job may take to end beyond `checkpoint.grace_s`, which its ranks have."""


class Known(Protocol):
    """One job, as a person asks for it."""

    handle: Handle
    where: str
    has_log: bool
    look_s: float

    def state(self) -> State: ...
    def how_far(self) -> str: ...
    def log(self) -> Log: ...
    def cancel(self) -> None: ...


def known_jobs(root: Path) -> list[Known]:
    """The last one first; a process of this machine that waits for a job elsewhere comes before
    that job.
    """
    here: list[Known] = [Here(root, handle) for handle in LocalLauncher(root).handles()]
    there = [_there(root, handle) for handle in stored(root)]
    return sorted(
        [*here, *there],
        key=lambda job: (job.handle.kind == "local", job.handle.started),
        reverse=True,
    )


def _there(root: Path, handle: Handle) -> Known:
    try:
        return There(root, handle)
    except IngotError as error:
        return Unreadable(
            handle, str(error).splitlines()[0]
        )  # of a line for each knob that is unknown


class Here:
    """A process of this machine: a supervisor, or one that does the work itself."""

    look_s = LOCAL_LOOK_S

    def __init__(self, root: Path, handle: Handle) -> None:
        self._root, self.handle, self._launcher = root, handle, LocalLauncher(root)
        self.where, self.has_log = f"process {handle.id}", bool(handle.log)

    def state(self) -> State:
        return self._launcher.status(self.handle)

    def how_far(self) -> str:
        beats = [
            beat for path in (self._root / "heartbeats").glob("*") for beat in read_beats(path)
        ]
        beat = max(beats, key=lambda beat: beat.wall, default=None)
        return f", {beat.step:,} steps done, {beat.phase}" if beat else ""

    def log(self) -> Log:
        return FileLog(lambda: [self._launcher.logs(self.handle)])

    def cancel(self) -> None:
        """Waits for all that its ranks may take to stop, and a minute for what waits for them."""
        resolved = self._root / "recipe.yaml"
        checkpoint = (
            load_recipe([resolved], environ={}, dotenv=None).checkpoint
            if resolved.exists()
            else Checkpoint()
        )
        self._launcher.cancel(self.handle, grace_s=MORE_S + checkpoint.grace_s)


class There:
    """A job at a place of `launch.kind`."""

    has_log = True

    def __init__(self, root: Path, handle: Handle) -> None:
        self.handle, self.where = handle, f"{handle.kind} {handle.id}"
        recipe = recipe_of(root, handle)
        self._launcher, self._grace_s = launcher(recipe), recipe.checkpoint.grace_s
        self.look_s = self._launcher.look_s

    def state(self) -> State:
        return ask_or_unknown(lambda: self._launcher.status(self.handle))

    def how_far(self) -> str:
        return ""

    def log(self) -> Log:
        return self._launcher.log(self.handle)

    def cancel(self) -> None:
        """Its ranks are asked first, and have the time to save a checkpoint."""
        if self.state() == "running":
            self._launcher.signal(self.handle, signal.SIGTERM)
            until = time.monotonic() + MORE_S + self._grace_s
            while self.state() not in OVER and time.monotonic() < until:
                time.sleep(self.look_s)
        if self.state() not in OVER:
            self._launcher.cancel(self.handle)


class Unreadable:
    """A job at such a place whose recipe cannot be read: of another version, or by hand."""

    has_log, look_s = False, LOCAL_LOOK_S

    def __init__(self, handle: Handle, why: str) -> None:
        self.handle, self.where, self._why = (
            handle,
            f"{handle.kind} {handle.id}, which cannot be asked: {why}",
            why,
        )

    def state(self) -> State:
        return "unknown"

    def how_far(self) -> str:
        return ""

    def log(self) -> Log:
        raise Failed(self._why)

    def cancel(self) -> None:
        raise Failed(f"{self.handle.name} cannot be cancelled from here: {self._why}")
