"""An attempt whose ranks run elsewhere: asks a launcher how the job stands, and the nodes' notes
how it ended. The same for every place.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from ingot.base.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, Failed, IngotError
from ingot.base.heartbeat import Heartbeat
from ingot.base.progress import say
from ingot.base.remote.replica import push
from ingot.launch.attempt import WELL, Exit
from ingot.launch.job import OVER, Handle, Job, Launcher, Log, State
from ingot.launch.meeting import EXIT, Meeting
from ingot.launch.remotebeats import RemoteBeats
from ingot.launch.sending import bring_back
from ingot.launch.spending import Meter
from ingot.launch.stops import SIGNALS

NOTES_S = 10.0
"""How long the nodes' last notes may take to be seen after the place says that the job is over
(network disks keep old listings for seconds).
"""
RETRY_S = 5.0
"""Between two tries to submit, or to cancel."""
STOP_S = 120.0
"""How long a place that does not answer is asked to cancel."""
BRING_S = 1800.0
"""How long a bucket that does not answer is asked for what the job has made."""
STACKS_S, STACKS_BUCKET_S = 5.0, 30.0
"""How long a rank's stacks may take to be seen here: on a shared disk, and by way of a bucket."""


class RemoteAttempt:
    """An attempt (`ingot.launch.attempt.Attempt`): submits `job` when it is made, and shows on
    stderr what it says. `root` is the run folder here.

    A place, disk or network that does not answer for a while ends nothing: all is asked again.
    `patience_s`: how long a place that cannot take the job now is asked again; without patience
    that is an error. `ready` is called before it is asked the first time, and may change the job.
    """

    def __init__(
        self,
        launcher: Launcher,
        job: Job,
        root: Path,
        *,
        patience_s: float = 0.0,
        ready: Callable[[Job], Job] | None = None,
        meter: Meter | None = None,
    ) -> None:
        self._launcher, self._job, self._root, self._ready, self._meter = (
            launcher,
            job,
            root,
            ready,
            meter,
        )
        self._meeting: Meeting | None = None
        self._beats: RemoteBeats | None = None
        self._state: State = "queued"
        self._next = 0.0
        self._asked, self._by_place, self._cancelled = False, False, False
        self._is_ours = False
        """Whether this start put there what the nodes need. Else the job runs already, and the
        folder in the bucket is its node 0's to write to.
        """
        self._unsent: list[tuple[int, int | None]] = []
        self._trouble = ""
        self._over_since: float | None = None
        self._end: Exit | None = None
        self._log: Log | None = None
        self.handle: Handle | None = None
        self.stacks_s = STACKS_S if job.mirror is None else STACKS_BUCKET_S
        self._patient_until = time.monotonic() + patience_s
        self._submit()

    def _submit(self) -> None:
        try:
            if self._ready is not None:
                self._job, self._ready, self._is_ours = self._ready(self._job), None, True
            if self._beats is None:
                self._beats = RemoteBeats(self._root, self._job.mirror)
            handle = self._metered(lambda: self._launcher.submit(self._job))
        except (IngotError, OSError) as error:
            if time.monotonic() >= self._patient_until:
                raise
            # What was right at the first start is not wrong now, whatever the place says: a disk
            # may not be mounted yet, a controller be away.
            self._tell_trouble(f"{error}; trying again")
            self._next = time.monotonic() + RETRY_S
            return
        self.handle, self._log = handle, self._launcher.log(handle)
        meet = handle.about.get("meet") or self._job.meet  # a job that runs already has its own
        self._meeting = Meeting(meet) if meet else None
        say(f"{self._job.name}: {handle.kind} {handle.id}")
        if self._job.mirror is not None and self._is_ours:
            with contextlib.suppress(
                IngotError
            ):  # for whoever takes this up on another machine, if we are killed
                push(self._root, self._job.mirror, parts=("jobs",))

    def _metered(self, submit: Callable[[], Handle]) -> Handle:
        """Counted from before the place is asked: its answer may be lost."""
        if self._meter is None:
            return submit()
        begun = self._meter.begin(self._job.time_limit_s or 0.0)
        try:
            return submit()
        except BaseException:
            if begun:
                self._meter.end()
            raise

    def poll(self) -> Exit | None:
        now = time.monotonic()
        if self._end is not None or now < self._next:
            return self._end
        if self.handle is None:
            return self._try_again()
        self._next = now + self._launcher.look_s
        try:
            self._deliver()
            return self._look(self.handle)
        except (IngotError, OSError) as error:
            self._tell_trouble(str(error))
            return None

    def _look(self, handle: Handle) -> Exit | None:
        state = self._state if self._state in OVER else self._launcher.status(handle)
        if state != self._state and state != "unknown":
            say(f"{self._job.name}: {state} ({handle.kind} {handle.id})")
        self._state, self._trouble = state, ""
        self._show()
        if state not in OVER:
            return None
        self._over_since = self._over_since or time.monotonic()
        end = self._how_it_ended(state, handle.kind)
        self._by_place = self._meeting is not None and any(
            "by" in asked for asked in self._meeting.signals(set())
        )
        self._show()
        if self._job.mirror is not None:
            self._bring_back(self._job.mirror)
        if self._beats is not None:
            self._beats.end()
        if self._meter is not None:
            self._meter.end()
        self._end = end
        return end

    def _bring_back(self, mirror: str) -> None:
        """What the job has made. Raises while the bucket does not answer, and tells where it lies
        when it does not for long.
        """
        try:
            bring_back(mirror, self._root)
        except (IngotError, OSError) as error:
            if time.monotonic() < (self._over_since or 0.0) + BRING_S:
                raise
            say(
                f"warning: {error}; what the job has made lies in {mirror}, and the same command"
                " fetches it"
            )

    def _try_again(self) -> Exit | None:
        """The place could not take the job, and was to be asked again."""
        if self._asked:
            self._end = Exit(0, 128 + signal.SIGTERM)
        else:
            try:
                self._submit()
            except (IngotError, OSError) as error:
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
        """None as long as no sign of life can be had: that is not the ranks' silence."""
        deaf = self._beats is not None and self._beats.trouble is not None
        return range(self._job.world) if self._state == "running" and not deaf else ()

    def beats(self) -> dict[int, Heartbeat]:
        """Of this attempt only: those of earlier ones lie there still, of other machines as
        well.
        """
        if self._beats is None:
            return {}
        found = self._beats.latest()
        if self._beats.trouble is not None:
            self._tell_trouble(self._beats.trouble)
        return found

    def send(self, number: int, rank: int | None = None) -> None:
        """What cannot be handed on now is when the place answers again."""
        self._asked = self._asked or number in SIGNALS
        if number == signal.SIGUSR2 and self._beats is not None:
            self._beats.want_stacks()
        self._unsent.append((number, rank))
        try:
            self._deliver()
        except (IngotError, OSError) as error:
            self._tell_trouble(str(error))

    def _deliver(self) -> None:
        while self._unsent and self.handle is not None and self._state not in OVER:
            number, rank = self._unsent[0]
            if rank is not None and self._meeting is not None:
                self._meeting.send(number, rank)  # no place can tell ranks apart
            elif number in SIGNALS and self._launcher.status(self.handle) == "queued":
                self._launcher.cancel(self.handle)  # there is nobody yet who could be asked
            else:
                self._launcher.signal(self.handle, number)
            self._unsent.pop(0)

    def taken(self) -> bool:
        stopped = self._end is not None and (self._end.code == EXIT_STOPPED or self._by_place)
        return (
            not self._asked
            and self._state != "cancelled"
            and (self._state == "preempted" or stopped)
        )

    def stop(self) -> None:
        """Raises Failed where the place does not answer for long: the job may go on, and be
        paid.
        """
        self._asked, self._next = True, 0.0
        until = time.monotonic() + STOP_S
        while self.handle is not None and not self._cancelled:
            try:
                self._launcher.cancel(self.handle)
                self._cancelled = True
            except (IngotError, OSError) as error:
                if time.monotonic() >= until:
                    raise Failed(
                        f"{error}; {self.handle.kind} {self.handle.id} may still run: `ingot launch"
                        f" cancel {self._root}` ends it"
                    ) from error
                self._tell_trouble(str(error))
                time.sleep(RETRY_S)

    def _how_it_ended(self, state: State, kind: str) -> Exit:
        """By the nodes' notes: of those that failed by themselves the first; by the place's word
        where they left none.
        """
        notes = self._notes(
            enough={"succeeded": self._job.nodes, "failed": self._job.nodes, "cancelled": 0}.get(
                state, 1
            )
        )
        if state == "cancelled" and not self._asked:
            trains = self._job.name == "train"
            say(
                f"{self._job.name}: somebody cancelled it; the same command"
                f" {'goes on from its newest checkpoint' if trains else 'does it again'}"
            )
            return Exit(0, EXIT_STOPPED if trains else 128 + signal.SIGTERM)
        failed = [
            note for note in notes.values() if note["code"] not in WELL and "because" not in note
        ]
        if failed and state not in ("preempted", "cancelled"):
            first = min(failed, key=lambda note: (note["code"] > 0, note["t_wall"]))
            return Exit(int(first["rank"]), int(first["code"]), first.get("how", ""))
        codes = [int(note["code"]) for note in notes.values() if "because" not in note]
        if len(codes) == self._job.nodes and not failed:
            return Exit(
                0,
                max(codes),
                (
                    f"{kind} stopped the job before its time"
                    if max(codes) == EXIT_STOPPED and not self._asked
                    else ""
                ),
            )
        if state == "preempted":
            return Exit(0, EXIT_STOPPED, f"{kind} took the job's machines away")
        if state == "cancelled":
            return Exit(
                0, next((code for code in codes if code - 128 in SIGNALS), 128 + signal.SIGTERM)
            )
        lost = [node for node in range(self._job.nodes) if node not in notes]
        if state == "succeeded" and not lost:
            return Exit(0, EXIT_DONE)
        named = (
            f"node {', '.join(map(str, lost))} was lost"
            if lost and len(lost) < self._job.nodes
            else f"{kind} says that the job {state}"
        )
        return Exit(lost[0] * self._job.processes if lost else 0, EXIT_FAILED, named)

    def _notes(self, *, enough: int) -> dict[int, dict[str, Any]]:
        if self._meeting is None:
            return {}
        until = time.monotonic() + NOTES_S
        while len(notes := self._meeting.notes(EXIT)) < enough and time.monotonic() < until:
            time.sleep(0.5)
        return notes


class FileLog:
    """A log that is a file, or several: read from where the last look ended, first from the bytes
    `at`.
    """

    def __init__(
        self, paths: Callable[[], Collection[Path]], at: Mapping[Path, int] | None = None
    ) -> None:
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
    """A state, `unknown` where the place cannot be asked at the moment: a network that is down for
    a minute ends no training.
    """
    try:
        return ask()
    except IngotError as error:
        say(f"warning: {error}")
        return "unknown"
