"""The only place that restarts a training: starts the ranks, watches them, and after a failure runs
the same command again from the newest checkpoint.

Works with any `Attempt`, local or remote. It reads heartbeats and commit markers only. No torch.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from ingot.base.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_KEEP,
    EXIT_STOPPED,
    EXIT_WRONG_INPUT,
    WrongInput,
)
from ingot.base.markers import COMMIT, read_marker
from ingot.base.progress import say
from ingot.base.runfolder import RunFolder, in_use, lock_holder
from ingot.base.runlog import read_lines
from ingot.config.recipe import Recipe
from ingot.launch.attempt import StartAttempt, StopRequested, StopRequests, follow
from ingot.launch.job import Job
from ingot.launch.node.ranks import LocalRanks
from ingot.launch.places.local import JobExit, LocalLauncher
from ingot.launch.supervisor.attempt_watch import AttemptWatch, ChaosKills, record_if_possible

LONGEST_WAIT_S = 60.0
MOST_PREEMPTIONS = 3
"""How often in a row a place may preempt a training that makes no progress before the supervisor
gives up rather than pay for more.
"""
FRESH = "--fresh"
FileStamp = tuple[int, int]
"""The version of a file: its inode and modification time in nanoseconds, or an object's generation.
"""


def supervise(
    job: Job,
    recipe: Recipe,
    *,
    results: TextIO | None = None,
    start: StartAttempt | None = None,
    checkpoints: Callable[[], dict[int, FileStamp]] | None = None,
) -> JobExit:
    """Run a training until it is done, restarting it when it fails. The caller holds the run
    folder's `run-lock`.

    A failure is a rank ended by a signal, an exit code that says so, or a hang; 0, 2, 3, 75 and the
    response to a signal that we forwarded are none. Gives up with the last failure's exit code
    after `launch.restarts` restarts, or after two failures without a newer checkpoint between them.
    A start that its place ended after a newer checkpoint counts as neither.
    `start` starts the ranks (default: on this machine), whose results go to `results` (default:
    stderr); it may raise StopRequested. `checkpoints` returns the committed steps (default: those
    of the run folder).

    Raises:
        Failed: another process trains in this run folder.
        WrongInput: the job cannot run here.
    """
    if start is None:
        if reasons := LocalLauncher(recipe.folder.root).can(job):
            raise WrongInput(f"{job.name} cannot run here: {'; '.join(reasons)}")
        beats = recipe.folder.heartbeats
        start = lambda job, stops: LocalRanks(job, results=results, heartbeats=beats)  # noqa: E731
    if recipe.launch.kind == "local" and (holder := lock_holder(recipe.folder.root)) is not None:
        raise in_use(recipe.folder.root, holder)
    committed = checkpoints or (lambda: committed_steps(recipe.folder.checkpoints))
    with StopRequests() as stops:
        return _Supervisor(job, recipe, start, stops, committed).run()


@dataclass(frozen=True)
class _Failure:
    """`noticed_at`: monotonic seconds. `by_chaos`: we caused it on purpose. `preempted`: the place
    ended it.
    """

    code: int
    description: str
    noticed_at: float
    by_chaos: bool = False
    preempted: bool = False


class _Supervisor:
    def __init__(
        self,
        job: Job,
        recipe: Recipe,
        start: StartAttempt,
        stops: StopRequests,
        committed: Callable[[], dict[int, FileStamp]],
    ) -> None:
        self._job, self._recipe, self._start, self._stops = job, recipe, start, stops
        self._run_folder, self._committed = recipe.folder, committed
        self._kills = ChaosKills(recipe.chaos, recipe.folder.events)
        self._restarts = 0
        self._failures_without_progress = 0
        """Consecutive failures without a newer checkpoint between them."""
        self._own_failures_without_progress = 0
        """Those of them caused neither by chaos nor by the place."""
        self._starts_without_progress = 0
        """Consecutive starts that made no newer checkpoint."""
        self._attempt_number = sum(
            event.get("kind") == "start" for event in read_lines(recipe.folder.events)
        )
        """The last attempt that reached its first step."""

    def run(self) -> JobExit:
        old_files = _earlier_training_files(self._run_folder) if FRESH in self._job.argv else {}
        job, checkpoints, most = self._job, self._committed(), self._recipe.launch.restarts
        while True:
            try:
                outcome = self._run_attempt(job)
            except StopRequested:
                return self._stopped(self._committed())
            if isinstance(outcome, JobExit):
                return outcome
            found = self._committed()
            progress, checkpoints = bool(found.items() - checkpoints.items()), found
            if reason := self._reason_to_give_up(outcome, progress):
                say(f"{outcome.description}; given up: {reason}")
                self._record("give_up", cause=f"{reason}; the last failure: {outcome.description}")
                return JobExit(outcome.code, 0)
            # --fresh is repeated until this training has a checkpoint: without one, an attempt may
            # have died before it set an earlier training aside, or the next one would bring back
            # one that was set aside.
            if found and not any(file_stamp(path) == stamp for path, stamp in old_files.items()):
                job = replace(
                    self._job,
                    argv=tuple(argument for argument in self._job.argv if argument != FRESH),
                )
            if counts := not (outcome.preempted and progress):
                self._restarts += 1
            resumes = found and FRESH not in job.argv
            source = f"from checkpoint {max(found):,}" if resumes else "from the beginning"
            wait = self._backoff_s()
            say(
                f"{outcome.description}; starting again {source}"
                f"{f' (restart {self._restarts} of {most})' if counts else ''}"
                f"{f' in {wait:g} s' if wait else ''}"
            )
            if not self._wait(wait):
                return self._stopped(found)
            self._record(
                "restart",
                seconds=time.monotonic() - outcome.noticed_at,
                cause=outcome.description,
            )

    def _run_attempt(self, job: Job) -> JobExit | _Failure:
        """One start, until all its ranks have ended."""
        self._kills.arm()
        attempt = self._start(job, self._stops)
        watch = AttemptWatch(
            self._recipe,
            attempt,
            self._stops,
            self._kills,
            through_bucket=bool(self._job.run_folder_url),
        )
        try:
            end = follow(attempt, self._stops, watch.check)
        except BaseException:
            attempt.stop()
            raise
        noticed_at, beats = time.monotonic(), attempt.beats()
        self._attempt_number = max(
            [self._attempt_number, *(beat.attempt for beat in beats.values())]
        )
        if self._stops.first:
            if watch.stop_timed_out or watch.hang:
                hang = f": {watch.hang.describe()}" if watch.hang else ""
                say(f"the ranks did not stop in time and were ended{hang}")
                return self._stopped(self._committed())
            # A rank ended by the signal itself, in a queue or while loading, leaves the checkpoints
            # of earlier attempts: the job can still be resumed.
            if end.shell_code in (128 + self._stops.signal_to_forward, 128 + signal.SIGTERM):
                return self._stopped(self._committed())
            return JobExit(end.shell_code, self._stops.first)
        if attempt.preempted():
            return _Failure(end.shell_code, end.describe(), noticed_at, preempted=True)
        if end.code in (EXIT_DONE, EXIT_KEEP, EXIT_WRONG_INPUT):
            return JobExit(end.code, 0)
        # Before EXIT_STOPPED: places ask ranks to stop before they kill them, and ranks that stood
        # still may have come back and saved.
        if watch.hang is not None:
            return _Failure(EXIT_FAILED, watch.failure, noticed_at)
        if end.code == EXIT_STOPPED:
            # Without a checkpoint, 75 would promise in vain that the same command resumes.
            return JobExit(EXIT_STOPPED if self._committed() else 128 + signal.SIGTERM, 0)
        step = f" at step {beats[end.rank].step:,}" if end.rank in beats else ""
        return _Failure(
            end.shell_code,
            f"{end.describe()}{step}",
            noticed_at,
            by_chaos=self._kills.has_killed,
        )

    def _reason_to_give_up(self, failure: _Failure, progress: bool) -> str | None:
        """Why another start would not help, or None."""
        if progress:
            self._failures_without_progress = self._own_failures_without_progress = 0
        self._starts_without_progress = 0 if progress else self._starts_without_progress + 1
        self._failures_without_progress += 1
        self._own_failures_without_progress += not (failure.by_chaos or failure.preempted)
        if self._own_failures_without_progress > 1 and not failure.by_chaos:
            return "two failures in a row without a newer checkpoint between them"
        if self._starts_without_progress > MOST_PREEMPTIONS and failure.preempted:
            return (
                f"no newer checkpoint in {self._starts_without_progress} starts; make"
                " checkpoint.every smaller, or the time limit longer"
            )
        if failure.preempted and progress:
            return None  # no failure, so that it is none of the restarts after failures
        if self._restarts >= self._recipe.launch.restarts:
            return f"launch.restarts={self._recipe.launch.restarts} allows no more"
        return None

    def _backoff_s(self) -> float:
        """Seconds before a restart: 0 after a first failure, then 1, 2, 4 ... 60 while there is no
        progress.
        """
        failures = self._failures_without_progress
        return min(LONGEST_WAIT_S, 2.0 ** (failures - 2)) if failures > 1 else 0.0

    def _wait(self, seconds: float) -> bool:
        """Wait before a restart; False if we were asked to stop."""
        deadline = time.monotonic() + seconds
        while not self._stops.first and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(0.1, left))
        return not self._stops.first

    def _stopped(self, checkpoints: Collection[int]) -> JobExit:
        """How the job ends after a stop request that arrived while no rank was running."""
        if checkpoints:
            say(f"stopped; the same command goes on from checkpoint {max(checkpoints):,}")
        return JobExit(EXIT_STOPPED if checkpoints else 128 + self._stops.first, self._stops.first)

    def _record(self, kind: str, **fields: Any) -> None:
        number = self._attempt_number + (kind == "restart")
        record_if_possible(self._run_folder.events, kind, attempt=number, **fields)


def committed_steps(checkpoints: Path) -> dict[int, FileStamp]:
    """The steps with a valid commit marker, and the version of that marker."""
    found = {}
    for folder in checkpoints.glob("step-*"):
        if not re.fullmatch(r"step-\d+(\.before)?", folder.name):
            continue  # a copy that somebody keeps
        stamp, marker = file_stamp(folder / COMMIT), read_marker(folder, COMMIT)
        if stamp is not None and marker is not None:
            found[int(marker["step"])] = stamp
    return found


def file_stamp(path: Path) -> FileStamp | None:
    """None if the file does not exist."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _earlier_training_files(run: RunFolder) -> dict[Path, FileStamp]:
    """The commit markers of an earlier training, which a fresh one sets aside when it begins."""
    paths = [
        *(folder / COMMIT for folder in run.checkpoints.glob("step-*")),
        run.steps / "train.json",
    ]
    return {path: stamp for path in paths if (stamp := file_stamp(path)) is not None}
