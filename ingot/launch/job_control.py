"""The jobs of a run folder, wherever they run, for `ingot launch status`, `logs` and `cancel`."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Protocol

from ingot.base.errors import Failed, IngotError
from ingot.base.heartbeat import read_beats
from ingot.config.load import load_recipe
from ingot.config.sections.checkpoint import Checkpoint
from ingot.launch.handles import recipe_of, stored_handles
from ingot.launch.job import FINAL_STATES, Handle, JobLog, JobState, launcher_of, status_or_unknown
from ingot.launch.places.local import LocalLauncher
from ingot.launch.places.logs import FileLog

LOCAL_POLL_S = 0.2
STOP_MARGIN_S = 60.0
"""How much longer than `checkpoint.grace_s`, which its ranks have, a job may take to end."""


class SubmittedJob(Protocol):
    """One job as shown to the user."""

    handle: Handle
    where: str
    has_log: bool
    poll_s: float

    def state(self) -> JobState: ...
    def progress(self) -> str: ...
    def log(self) -> JobLog: ...
    def cancel(self) -> None: ...


def submitted_jobs(root: Path) -> list[SubmittedJob]:
    """The jobs of a run folder, newest first; a local process that waits for a remote job precedes
    that job.
    """
    local: list[SubmittedJob] = [LocalJob(root, handle) for handle in LocalLauncher(root).handles()]
    remote = [_remote_job(root, handle) for handle in stored_handles(root)]
    return sorted(
        [*local, *remote],
        key=lambda job: (job.handle.kind == "local", job.handle.started),
        reverse=True,
    )


def _remote_job(root: Path, handle: Handle) -> SubmittedJob:
    try:
        return RemoteJob(root, handle)
    except IngotError as error:
        # The error has a line for each unknown knob; the first one is enough here.
        return UnreadableJob(handle, str(error).splitlines()[0])


class LocalJob:
    """A process of this machine: a supervisor, or one that runs the verb itself."""

    poll_s = LOCAL_POLL_S

    def __init__(self, root: Path, handle: Handle) -> None:
        self._root, self.handle, self._launcher = root, handle, LocalLauncher(root)
        self.where, self.has_log = f"process {handle.id}", bool(handle.log)

    def state(self) -> JobState:
        return self._launcher.status(self.handle)

    def progress(self) -> str:
        beats = [
            beat for path in (self._root / "heartbeats").glob("*") for beat in read_beats(path)
        ]
        beat = max(beats, key=lambda beat: beat.order, default=None)
        return f", {beat.step:,} steps done, {beat.phase}" if beat else ""

    def log(self) -> JobLog:
        return FileLog(lambda: [Path(self.handle.log)])

    def cancel(self) -> None:
        """Waits as long as its ranks may take to stop, and a minute longer for its parent
        processes.
        """
        resolved = self._root / "recipe.yaml"
        checkpoint = (
            load_recipe([resolved], environ={}, dotenv=None).checkpoint
            if resolved.exists()
            else Checkpoint()
        )
        self._launcher.cancel(self.handle, grace_s=STOP_MARGIN_S + checkpoint.grace_s)


class RemoteJob:
    """A job at a place of `launch.kind`."""

    has_log = True

    def __init__(self, root: Path, handle: Handle) -> None:
        self.handle, self.where = handle, f"{handle.kind} {handle.id}"
        recipe = recipe_of(root, handle)
        self._launcher, self._grace_s = launcher_of(recipe), recipe.checkpoint.grace_s
        self.poll_s = self._launcher.poll_s

    def state(self) -> JobState:
        return status_or_unknown(self._launcher, self.handle)

    def progress(self) -> str:
        return ""

    def log(self) -> JobLog:
        return self._launcher.log(self.handle)

    def cancel(self) -> None:
        """The ranks are asked to stop first, with time to save a checkpoint; also where the place
        does not tell now whether there are any.
        """
        state = self.state()
        if state not in ("queued", *FINAL_STATES):
            self._launcher.signal(self.handle, signal.SIGTERM)
            deadline = time.monotonic() + STOP_MARGIN_S + self._grace_s
            ended = ("queued", *FINAL_STATES)  # in a queue there is nobody who could save
            while (state := self.state()) not in ended and time.monotonic() < deadline:
                time.sleep(self.poll_s)
        if state not in FINAL_STATES:
            self._launcher.cancel(self.handle)


class UnreadableJob:
    """A remote job whose recipe cannot be read: from another version, or edited by hand."""

    has_log, poll_s = False, LOCAL_POLL_S

    def __init__(self, handle: Handle, reason: str) -> None:
        self.handle, self._reason = handle, reason
        self.where = f"{handle.kind} {handle.id}, which cannot be asked: {reason}"

    def state(self) -> JobState:
        return "unknown"

    def progress(self) -> str:
        return ""

    def log(self) -> JobLog:
        raise Failed(self._reason)

    def cancel(self) -> None:
        raise Failed(f"{self.handle.name} cannot be cancelled from here: {self._reason}")
