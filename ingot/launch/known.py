"""The jobs that a run folder knows of, wherever they run: what `ingot launch status`, `logs` and `cancel` ask."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from ingot.base.heartbeat import read_beats
from ingot.config.load import load_recipe
from ingot.config.work import Checkpoint
from ingot.launch.handles import recipe_of, stored
from ingot.launch.job import Handle, Log, State
from ingot.launch.local import LocalLauncher
from ingot.launch.places import launcher
from ingot.launch.remote import FileLog, ask_or_unknown

LOCAL_LOOK_S = 0.2


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
    """The last one first; a process of this machine that waits for a job elsewhere comes before that job."""
    here: list[Known] = [Here(root, handle) for handle in LocalLauncher(root).handles()]
    there: list[Known] = [There(root, handle) for handle in stored(root)]
    return sorted([*here, *there], key=lambda job: (job.handle.kind == "local", job.handle.started), reverse=True)


class Here:
    """A process of this machine: a supervisor, or one that does the work itself."""

    look_s = LOCAL_LOOK_S

    def __init__(self, root: Path, handle: Handle) -> None:
        self._root, self.handle, self._launcher = root, handle, LocalLauncher(root)
        self.where, self.has_log = f"process {handle.id}", bool(handle.log)

    def state(self) -> State:
        return self._launcher.status(self.handle)

    def how_far(self) -> str:
        beats = [beat for path in (self._root / "heartbeats").glob("*") for beat in read_beats(path)]
        beat = max(beats, key=lambda beat: beat.wall, default=None)
        return f", {beat.step:,} steps done, {beat.phase}" if beat else ""

    def log(self) -> Log:
        return FileLog(lambda: [self._launcher.logs(self.handle)])

    def cancel(self) -> None:
        """Waits for all that its ranks may take to stop, and a minute for what waits for them."""
        resolved = self._root / "recipe.yaml"
        checkpoint = load_recipe([resolved], environ={}, dotenv=None).checkpoint if resolved.exists() else Checkpoint()
        self._launcher.cancel(self.handle, grace_s=60.0 + checkpoint.grace_s)


class There:
    """A job at a place of `launch.kind`."""

    has_log = True

    def __init__(self, root: Path, handle: Handle) -> None:
        self.handle, self.where = handle, f"{handle.kind} {handle.id}"
        self._launcher = launcher(recipe_of(root, handle))
        self.look_s = self._launcher.look_s

    def state(self) -> State:
        return ask_or_unknown(lambda: self._launcher.status(self.handle))

    def how_far(self) -> str:
        return ""

    def log(self) -> Log:
        return self._launcher.log(self.handle)

    def cancel(self) -> None:
        self._launcher.cancel(self.handle)
