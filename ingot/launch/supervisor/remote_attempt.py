"""An attempt whose ranks run elsewhere: queries the launcher for the job's state, reads heartbeats
from the run folder or its replica, and the nodes' notes for how it ended. The same for every place.
"""

from __future__ import annotations

import contextlib
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ingot.base.errors import EXIT_DONE, EXIT_FAILED, EXIT_KEEP, EXIT_STOPPED, Failed, IngotError
from ingot.base.heartbeat import Heartbeat, parse_beats, read_beats
from ingot.base.progress import say
from ingot.base.remote.bucket import Bucket, open_bucket
from ingot.base.remote.replica import push
from ingot.base.remote.service import Missing
from ingot.base.storage import write_atomic
from ingot.cloud.instances import NoCapacity
from ingot.launch.attempt import STOP_SIGNALS, AttemptExit
from ingot.launch.job import FINAL_STATES, Handle, Job, JobLog, JobState, Launcher
from ingot.launch.rendezvous import EXIT, Rendezvous, asked_to_stop, exit_by_notes
from ingot.launch.run_folder_sync import pull_results
from ingot.launch.supervisor.budget import SpendingMeter, leave_out_waiting

NOTES_TIMEOUT_S = 10.0
"""How long the nodes' last notes may take to arrive after the place reports the end of the job
(network disks cache listings for seconds).
"""
RETRY_S = 5.0
"""Seconds between two attempts to submit or to cancel."""
CANCEL_TIMEOUT_S = 120.0
"""How long cancelling is retried at a place that does not answer."""
RESULTS_TIMEOUT_S = 1800.0
"""How long fetching the job's results from a bucket that does not answer is retried."""
STACKS_S, STACKS_BUCKET_S = 5.0, 30.0
"""How long a rank's stacks may take to arrive here: on a shared disk, and through a bucket."""
HEARTBEAT_POLL_S = 5.0
"""Seconds between two polls of the bucket."""
PARALLEL_READS = 32
STACKS = re.compile(r"stacks-rank\d+\.txt")


class RemoteAttempt:
    """An attempt (`ingot.launch.attempt.Attempt`): submits `job` when constructed, and shows its
    log on stderr. `root` is the local run folder.

    A place, disk or network that does not answer for a while is not an error: each query is
    repeated. `patience_s`: how long submission is retried while the place cannot take the job; 0
    makes that an error. `prepare` is called before the first submission, and may change the job; it
    gives None if the job runs already.
    """

    def __init__(
        self,
        launcher: Launcher,
        job: Job,
        root: Path,
        *,
        patience_s: float = 0.0,
        prepare: Callable[[Job], Job | None] | None = None,
        meter: SpendingMeter | None = None,
    ) -> None:
        self._launcher, self._job, self._root, self._meter = launcher, job, root, meter
        self._prepare = prepare
        self._rendezvous: Rendezvous | None = None
        self._heartbeats: RemoteHeartbeats | None = None
        self._state: JobState = "queued"
        self._next_poll = 0.0
        self._stop_requested = self._stopped_by_place = self._cancelled = False
        self._prepared_here = False
        """Whether this start staged the nodes' inputs. Otherwise the job was running already, and
        only its node 0 may write to the folder in the bucket.
        """
        self._unsent: list[tuple[int, Collection[int] | None]] = []
        self._trouble = ""
        self._final_since: float | None = None
        self._found: AttemptExit | None = None
        self._end: AttemptExit | None = None
        self._log: JobLog | None = None
        self.handle: Handle | None = None
        self.stacks_s = STACKS_BUCKET_S if job.run_folder_url else STACKS_S
        self._submit_deadline = time.monotonic() + patience_s
        self._submit()

    def _submit(self) -> None:
        try:
            if self._prepare is not None and (prepared := self._prepare(self._job)) is not None:
                self._job, self._prepare, self._prepared_here = prepared, None, True
            if self._heartbeats is None:
                self._heartbeats = RemoteHeartbeats(self._root, self._job.run_folder_url)
            handle = self._metered(lambda: self._launcher.submit(self._job))
        except (IngotError, OSError) as error:
            if time.monotonic() >= self._submit_deadline:
                raise
            # The first start was possible, so this may pass, whatever the error says: a disk that
            # is not mounted yet, a controller that is down.
            self._warn(f"{error}; trying again")
            self._next_poll = time.monotonic() + RETRY_S
            return
        self.handle, self._log = handle, self._launcher.log(handle)
        # A job that was running already has its own rendezvous.
        place = handle.about.get("meet") or self._job.rendezvous
        self._rendezvous = Rendezvous(place) if place else None
        say(f"{self._job.name}: {handle.kind} {handle.id}")
        if self._job.run_folder_url and self._prepared_here:
            # If we are killed, another machine finds the handle there.
            with contextlib.suppress(IngotError):
                push(self._root, self._job.run_folder_url, parts=("jobs",))

    def _metered(self, submit: Callable[[], Handle]) -> Handle:
        """Start counting before the place is asked, since its answer may be lost."""
        if self._meter is None:
            return submit()
        begun = self._meter.begin(self._job.time_limit_s or 0.0)
        try:
            return submit()
        except BaseException as error:
            if begun:
                # Of several machines some may have been there for a while.
                if isinstance(error, NoCapacity) and self._job.nodes == 1:
                    self._meter.leave_out(None)
                self._meter.end()
            raise

    def poll(self) -> AttemptExit | None:
        now = time.monotonic()
        if self._end is not None or now < self._next_poll:
            return self._end
        if self.handle is None:
            return self._retry_submit()
        self._next_poll = now + self._launcher.poll_s
        try:
            self._deliver_signals()
            return self._poll_job(self.handle)
        except (IngotError, OSError) as error:
            self._warn(str(error))
            return None

    def _poll_job(self, handle: Handle) -> AttemptExit | None:
        is_final = self._state in FINAL_STATES
        state = self._state if is_final else self._launcher.status(handle)
        if state not in (self._state, "unknown"):
            say(f"{self._job.name}: {state} ({handle.kind} {handle.id})")
        self._state, self._trouble = state, ""
        self._show_log()
        if state not in FINAL_STATES:
            return None
        self._final_since = self._final_since or time.monotonic()
        if self._found is None:  # once, since it may say something, and results may be late
            self._found = self._exit(state, handle.kind)
        end = self._found
        self._stopped_by_place = self._rendezvous is not None and any(
            "by" in note for note in self._rendezvous.signals(set())
        )
        self._show_log()
        if self._job.run_folder_url:
            self._pull_results(self._job.run_folder_url)
        if self._heartbeats is not None:
            self._heartbeats.close()
        if self._meter is not None:
            leave_out_waiting(self._meter, self._launcher, handle)
            self._meter.end()
        self._end = end
        return end

    def _pull_results(self, url: str) -> None:
        """Raises while the bucket does not answer; after a long time it only reports where the
        results are.
        """
        try:
            pull_results(url, self._root)
        except (IngotError, OSError) as error:
            if time.monotonic() < (self._final_since or 0.0) + RESULTS_TIMEOUT_S:
                raise
            say(
                f"warning: {error}; what the job has made lies in {url}, and the same command"
                " fetches it"
            )

    def _retry_submit(self) -> AttemptExit | None:
        if self._stop_requested:
            self._end = AttemptExit(0, 128 + signal.SIGTERM)
        else:
            try:
                self._submit()
            except (IngotError, OSError) as error:
                self._end = AttemptExit(0, EXIT_FAILED, str(error))
        return self._end

    def _warn(self, trouble: str) -> None:
        """Warn once, however often it repeats."""
        if trouble != self._trouble:
            say(f"warning: {trouble}")
        self._trouble = trouble

    def _show_log(self) -> None:
        """Show the log; failing to read it must not end the job."""
        with contextlib.suppress(IngotError, OSError):
            sys.stderr.buffer.write(self._log.read() if self._log is not None else b"")
            sys.stderr.buffer.flush()

    def running(self) -> Collection[int]:
        """Empty while no heartbeats can be read or the place suspends the job, which does not count
        as silence of the ranks.
        """
        unreadable = self._heartbeats is not None and self._heartbeats.trouble is not None
        return range(self._job.world) if self._state == "running" and not unreadable else ()

    def suspended(self) -> bool:
        return self._state == "suspended"

    def beats(self) -> dict[int, Heartbeat]:
        """Heartbeats of this attempt only: those of earlier ones may still be there."""
        if self._heartbeats is None:
            return {}
        found = self._heartbeats.latest()
        if self._heartbeats.trouble is not None:
            self._warn(self._heartbeats.trouble)
        return found

    def send(self, number: int, ranks: Collection[int] | None = None) -> None:
        """Signal ranks; what cannot be sent now is sent when the place answers again."""
        self._stop_requested = self._stop_requested or number in STOP_SIGNALS
        if number == signal.SIGUSR2 and self._heartbeats is not None:
            self._heartbeats.fetch_stacks = True
        self._unsent.append((number, ranks))
        try:
            self._deliver_signals()
        except (IngotError, OSError) as error:
            self._warn(str(error))

    def _deliver_signals(self) -> None:
        while self._unsent and self.handle is not None and self._state not in FINAL_STATES:
            number, ranks = self._unsent[0]
            if ranks is not None and self._rendezvous is not None:
                self._rendezvous.send(number, ranks)  # places cannot signal single ranks
            elif number in STOP_SIGNALS and self._launcher.status(self.handle) == "queued":
                self._launcher.cancel(self.handle)  # no rank is running that could be asked
            else:
                self._launcher.signal(self.handle, number)
            self._unsent.pop(0)

    def preempted(self) -> bool:
        stopped = self._end is not None and (
            self._end.code == EXIT_STOPPED or self._stopped_by_place
        )
        return (
            not self._stop_requested
            and self._state != "cancelled"
            and (self._state == "preempted" or stopped)
        )

    def stop(self) -> None:
        """Raises Failed if the place does not answer for long: the job may continue, and cost
        money.
        """
        self._stop_requested, self._next_poll = True, 0.0
        deadline = time.monotonic() + CANCEL_TIMEOUT_S
        while self.handle is not None and not self._cancelled:
            try:
                self._launcher.cancel(self.handle)
                self._cancelled = True
            except (IngotError, OSError) as error:
                if time.monotonic() >= deadline:
                    raise Failed(
                        f"{error}; {self.handle.kind} {self.handle.id} may still run: `ingot launch"
                        f" cancel {self._root}` ends it"
                    ) from error
                self._warn(str(error))
                time.sleep(RETRY_S)

    def _exit(self, state: JobState, kind: str) -> AttemptExit:
        expected = {"succeeded": self._job.nodes, "failed": self._job.nodes, "cancelled": 0}
        notes = self._exit_notes(expected.get(state, 1))
        end = exit_by_notes(self._job, state, kind, notes, stop_requested=self._stop_requested)
        if self._stop_requested:
            return end
        # Whoever asks from elsewhere leaves a note; the place itself tells of an orderly stop, a
        # failure while stopping and the loss of a machine alike.
        asked = self._rendezvous is not None and asked_to_stop(self._rendezvous)
        if state == "cancelled" or (asked and end.code not in (EXIT_DONE, EXIT_KEEP)):
            self._state, trains = "cancelled", self._job.name == "train"
            say(
                f"{self._job.name}: somebody cancelled it; the same command"
                f" {'goes on from its newest checkpoint' if trains else 'does it again'}"
            )
            return AttemptExit(0, EXIT_STOPPED if trains else 128 + signal.SIGTERM)
        return end

    def _exit_notes(self, expected: int) -> dict[int, dict[str, Any]]:
        if self._rendezvous is None:
            return {}
        deadline = time.monotonic() + NOTES_TIMEOUT_S
        while len(notes := self._rendezvous.notes(EXIT)) < expected and time.monotonic() < deadline:
            time.sleep(0.5)
        return notes


class RemoteHeartbeats:
    """The last heartbeats of one start's ranks, from the run folder or, in a thread, from its
    replica, so that a slow bucket does not delay signals. Heartbeats that existed before belong to
    earlier starts and are ignored. `trouble` says why none can be read now. With `fetch_stacks`,
    stacks that ranks write are downloaded to our `logs/` if no disk is shared.
    """

    def __init__(self, root: Path, run_folder_url: str) -> None:
        self._root, self._url = root, run_folder_url
        self._latest: dict[int, Heartbeat] = {}
        self._generations: dict[str, int] = {}
        self._closed, self.fetch_stacks = threading.Event(), False
        self.trouble: str | None = None
        self._earlier: set[tuple[int, int, int, float]] = set()
        self._earlier = {_identity(beat) for beat in self._read()}
        if run_folder_url:
            threading.Thread(target=self._poll_until_closed, daemon=True).start()

    def latest(self) -> dict[int, Heartbeat]:
        if not self._url:
            self._poll()
        return dict(self._latest)

    def close(self) -> None:
        self._closed.set()

    def _poll_until_closed(self) -> None:
        while not self._closed.wait(HEARTBEAT_POLL_S):
            self._poll()

    def _poll(self) -> None:
        try:
            self._latest |= {
                beat.rank: beat for beat in self._read() if _identity(beat) not in self._earlier
            }
            if self.fetch_stacks and self._url:
                for name, content in self._changed(f"{self._url}/stacks"):
                    if STACKS.fullmatch(name):
                        write_atomic(self._root / "logs" / name, content)
            self.trouble = None
        except (IngotError, OSError) as error:
            self.trouble = str(error)

    def _read(self) -> list[Heartbeat]:
        if not self._url:
            files = (self._root / "heartbeats").glob("*")
            return [beat for path in files for beat in read_beats(path)]
        changed = self._changed(f"{self._url}/heartbeats")
        return [beat for _, content in changed for beat in parse_beats(content)]

    def _changed(self, url: str) -> list[tuple[str, bytes]]:
        """Names and contents of the objects that changed since the last poll."""
        bucket = open_bucket(url, patience_s=HEARTBEAT_POLL_S)
        changed = {
            blob.name: blob.generation
            for blob in bucket.list()
            if self._generations.get(bucket.url_of(blob.name)) != blob.generation
        }
        if not changed:
            return []
        with ThreadPoolExecutor(min(PARALLEL_READS, len(changed))) as pool:
            contents = list(pool.map(lambda name: _get(bucket, name), changed))
        self._generations |= {bucket.url_of(name): number for name, number in changed.items()}
        return [
            (name, content)
            for name, content in zip(changed, contents, strict=True)
            if content is not None
        ]


def _get(bucket: Bucket, name: str) -> bytes | None:
    try:
        return bucket.get(name)
    except Missing:
        return None


def _identity(beat: Heartbeat) -> tuple[int, int, int, float]:
    """The attempt's number alone is not enough: attempts that end before their first step are not
    counted.
    """
    return beat.pid, beat.rank, beat.attempt, beat.mono
