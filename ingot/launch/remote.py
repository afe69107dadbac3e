"""An attempt whose ranks run elsewhere: asks a launcher how the job stands, and the nodes' notes how it ended. The same for every place."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from ingot.base.bucket import open_bucket
from ingot.base.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, Failed, IngotError
from ingot.base.heartbeat import Beat, parse_beats, read_beats
from ingot.base.progress import say
from ingot.base.replica import pull
from ingot.launch.attempt import WELL, Exit
from ingot.launch.job import OVER, Handle, Job, Launcher, Log, State
from ingot.launch.meeting import EXIT, Meeting
from ingot.launch.stops import SIGNALS

NOTES_S = 10.0
"""How long the nodes' last notes may take to be seen after the place says that the job is over (network disks keep old listings for seconds)."""
BEATS_S = 5.0
"""Between two looks into the bucket for signs of life."""
RETRY_S = 5.0
"""Between two tries to submit."""


class RemoteAttempt:
    """An attempt (`ingot.launch.attempt.Attempt`): submits `job` when it is made, and shows on stderr what it says. `root` is the run folder here.

    `patience_s`: how long a place that cannot take the job now is asked again; without patience that is an error.
    """

    def __init__(self, launcher: Launcher, job: Job, root: Path, *, patience_s: float = 0.0) -> None:
        self._launcher, self._job, self._root = launcher, job, root
        self._meeting = Meeting(job.meet) if job.meet else None
        self._state: State = "queued"
        self._beats_next = 0.0
        self._old = {_identity(beat) for beat in self._read_beats()}
        self._next = self._beats_next = 0.0
        self._beats: dict[int, Beat] = {}
        self._asked = False
        self._trouble = ""
        self._end: Exit | None = None
        self._log: Log | None = None
        self.handle: Handle | None = None
        self._patient_until = time.monotonic() + patience_s
        self._submit()

    def _submit(self) -> None:
        try:
            handle = self._launcher.submit(self._job)
        except Failed as error:
            if time.monotonic() >= self._patient_until:
                raise
            self._tell_trouble(f"{error}; trying again")
            self._next = time.monotonic() + RETRY_S
            return
        self.handle, self._log = handle, self._launcher.log(handle)
        if "meet" in handle.about and self._meeting is not None:
            self._meeting = Meeting(handle.about["meet"])  # of a job that runs already
        say(f"{self._job.name}: {handle.kind} {handle.id}")

    def poll(self) -> Exit | None:
        now = time.monotonic()
        if self._end is not None or now < self._next:
            return self._end
        if self.handle is None:
            return self._try_again()
        self._next = now + self._launcher.look_s
        try:
            state = self._launcher.status(self.handle)
        except IngotError as error:
            self._tell_trouble(str(error))
            return None
        if state != self._state and state != "unknown":
            say(f"{self._job.name}: {state} ({self.handle.kind} {self.handle.id})")
        self._state, self._trouble = state, ""
        self._show()
        if state in OVER:
            self._end = self._how_it_ended(state, self.handle.kind)
            self._show()
            if self._job.mirror is not None:
                pull(self._job.mirror, self._root)
        return self._end

    def _try_again(self) -> Exit | None:
        """The place could not take the job, and was to be asked again."""
        if self._asked:
            self._end = Exit(0, 128 + signal.SIGTERM)
        else:
            try:
                self._submit()
            except Failed as error:
                self._end = Exit(0, EXIT_FAILED, str(error))
        return self._end

    def _tell_trouble(self, trouble: str) -> None:
        """Once, however often we meet with it."""
        if trouble != self._trouble:
            say(f"warning: {trouble}")
        self._trouble = trouble

    def _show(self) -> None:
        """Whatever the log's place answers, a job does not end for it."""
        with contextlib.suppress(IngotError, OSError):
            sys.stderr.buffer.write(self._log.read() if self._log is not None else b"")
            sys.stderr.buffer.flush()

    def running(self) -> Collection[int]:
        return range(self._job.world) if self._state == "running" else ()

    def beats(self) -> dict[int, Beat]:
        """Of this attempt only: those of earlier ones lie there still, of other machines as well."""
        self._beats |= {beat.rank: beat for beat in self._read_beats() if _identity(beat) not in self._old}
        return self._beats

    def send(self, number: int, rank: int | None = None) -> None:
        self._asked = self._asked or number in SIGNALS
        if self.handle is not None and rank is not None and self._meeting is not None:
            self._meeting.send(number, rank)  # no place can tell ranks apart
        elif self.handle is not None and number in SIGNALS and self._launcher.status(self.handle) == "queued":
            self._launcher.cancel(self.handle)  # there is nobody yet who could be asked
        elif self.handle is not None:
            self._launcher.signal(self.handle, number)

    def taken(self) -> bool:
        by_place = self._meeting is not None and any("by" in asked for asked in self._meeting.signals(set()))
        stopped = self._end is not None and (self._end.code == EXIT_STOPPED or by_place)
        return not self._asked and self._state != "cancelled" and (self._state == "preempted" or stopped)

    def stop(self) -> None:
        self._asked = True
        if self.handle is not None:
            self._launcher.cancel(self.handle)
        self._next = 0.0

    def _how_it_ended(self, state: State, kind: str) -> Exit:
        """By the nodes' notes: of those that failed by themselves the first; by the place's word where they left none."""
        notes = self._notes(enough={"succeeded": self._job.nodes, "failed": self._job.nodes, "cancelled": 0}.get(state, 1))
        if state == "cancelled" and not self._asked:
            say(f"{self._job.name}: somebody cancelled it; the same command goes on from its newest checkpoint")
            return Exit(0, EXIT_STOPPED)
        failed = [note for note in notes.values() if note["code"] not in WELL and "because" not in note]
        if failed and state not in ("preempted", "cancelled"):
            first = min(failed, key=lambda note: (note["code"] > 0, note["t_wall"]))
            return Exit(int(first["rank"]), int(first["code"]), first.get("how", ""))
        codes = [int(note["code"]) for note in notes.values() if "because" not in note]
        if len(codes) == self._job.nodes and not failed:
            return Exit(0, max(codes), f"{kind} stopped the job before its time" if max(codes) == EXIT_STOPPED and not self._asked else "")
        if state == "preempted":
            return Exit(0, EXIT_STOPPED, f"{kind} took the job's machines away")
        if state == "cancelled":
            return Exit(0, 128 + signal.SIGTERM)
        lost = [node for node in range(self._job.nodes) if node not in notes]
        if state == "succeeded" and not lost:
            return Exit(0, EXIT_DONE)
        named = f"node {', '.join(map(str, lost))} was lost" if lost and len(lost) < self._job.nodes else f"{kind} says that the job {state}"
        return Exit(lost[0] * self._job.processes if lost else 0, EXIT_FAILED, named)

    def _notes(self, *, enough: int) -> dict[int, dict[str, Any]]:
        if self._meeting is None:
            return {}
        until = time.monotonic() + NOTES_S
        while len(notes := self._meeting.notes(EXIT)) < enough and time.monotonic() < until:
            time.sleep(0.5)
        return notes

    def _read_beats(self) -> list[Beat]:
        if self._job.mirror is None:
            return [beat for path in (self._root / "heartbeats").glob("*") for beat in read_beats(path)]
        if time.monotonic() < self._beats_next:
            return []
        self._beats_next = time.monotonic() + BEATS_S
        bucket = open_bucket(f"{self._job.mirror}/heartbeats")
        return [beat for blob in bucket.list() for beat in parse_beats(bucket.get(blob.name))]


def _identity(beat: Beat) -> tuple[int, int, int, float]:
    """Attempts are counted by those that came to their first step, so that their number alone tells no two of them apart."""
    return beat.pid, beat.rank, beat.attempt, beat.mono


class FileLog:
    """A log that is a file, or several: read from where the last look ended, first from the bytes `at`."""

    def __init__(self, paths: Callable[[], Collection[Path]], at: Mapping[Path, int] | None = None) -> None:
        self._paths = paths
        self._at: dict[Path, int] = dict(at or {})

    def read(self) -> bytes:
        said = b""
        for path in self._paths():
            try:
                with path.open("rb") as stream:
                    stream.seek(self._at.get(path, 0))
                    new = stream.read()
            except OSError:
                continue
            self._at[path] = self._at.get(path, 0) + len(new)
            said += new
        return said


def ask_or_unknown(ask: Callable[[], State]) -> State:
    """A state, `unknown` where the place cannot be asked at the moment: a network that is down for a minute ends no training."""
    try:
        return ask()
    except IngotError as error:
        say(f"warning: {error}")
        return "unknown"
