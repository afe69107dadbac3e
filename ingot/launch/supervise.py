"""The one restarter: starts a training's ranks, watches them, and after a failure starts the same
argv again from the newest checkpoint.

Works wherever an `Attempt` can be started; the local one is the first. Reads the run folder only:
heartbeats and commit markers. No torch.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from ingot.base.errors import EXIT_FAILED, EXIT_STOPPED, EXIT_WRONG_INPUT, Failed, WrongInput
from ingot.base.lock import lock_holder
from ingot.base.markers import read_marker
from ingot.base.progress import say
from ingot.base.runfolder import RunFolder
from ingot.base.runlog import read_lines
from ingot.config.recipe import Recipe
from ingot.launch.attempt import WELL, Attempt, Start, follow
from ingot.launch.chaos import Kills
from ingot.launch.job import Job
from ingot.launch.local import Ended, LocalLauncher
from ingot.launch.notes import ask_for_stacks, note, told_stacks
from ingot.launch.ranks import LocalRanks
from ingot.launch.stops import Stops
from ingot.launch.watch import Hang, HangWatch, StragglerWatch

LOOK_S = 0.25
"""Seconds between two looks at the signs of life."""
LONGEST_WAIT_S = 60.0
MOST_TAKEN = 3
"""How often in a row a place may end a training that has come no further, before more would be paid
in vain.
"""
LATE_S = 60.0
"""What a sign of life may take by way of a bucket: nodes send them every 15 seconds, and a request
may have to be repeated.
"""
LEAVE_S = 30.0
"""What ranks that were asked to stop get beyond `checkpoint.grace_s`, after which they end
themselves.
"""
FRESH = "--fresh"
COMMIT = "COMMIT.json"
Stamp = tuple[int, int]
"""A file as it stands: its inode and when it was written, nanoseconds."""


def supervise(
    job: Job,
    recipe: Recipe,
    *,
    results: TextIO | None = None,
    start: Start | None = None,
    checkpoints: Callable[[], dict[int, Stamp]] | None = None,
) -> Ended:
    """Run a training until it is done, starting it again when it fails. Whoever calls it holds the
    run folder's `run-lock`.

    A failure is a rank's death by a signal, an exit code that says so, or a hang; 0, 2, 3, 75 and
    the answer to a signal that we handed on are none. It ends with the last failure's exit code
    after `launch.restarts` restarts, or when there is no newer checkpoint than at the failure
    before. `start` starts the ranks, on this machine when it is not given; results go to `results`,
    or stderr. `checkpoints` tells the steps that are committed, those of the run folder when it is
    not given.

    Raises:
        Failed: something else trains in this run folder already.
        WrongInput: the job cannot run here.
    """
    if start is None:
        if reasons := LocalLauncher(recipe.folder.root).can(job):
            raise WrongInput(f"{job.name} cannot run here: {'; '.join(reasons)}")
        start = lambda job: LocalRanks(job, results=results, heartbeats=recipe.folder.heartbeats)  # noqa: E731
    if recipe.launch.kind == "local" and (holder := lock_holder(recipe.folder.root)) is not None:
        raise Failed(
            f"{recipe.folder.root} is in use by process {holder}; wait for it, stop it, or choose"
            " another `name`"
        )
    with Stops() as stops:
        return _Supervisor(
            job, recipe, start, stops, checkpoints or (lambda: committed(recipe.folder.checkpoints))
        ).run()


@dataclass(frozen=True)
class _Failure:
    code: int
    told: str
    noticed: float
    """Monotonic seconds."""
    by_us: bool = False
    """Whether chaos made it."""
    taken: bool = False
    """Whether the place ended it."""


class _Supervisor:
    def __init__(
        self,
        job: Job,
        recipe: Recipe,
        start: Start,
        stops: Stops,
        committed: Callable[[], dict[int, Stamp]],
    ) -> None:
        self.job, self.recipe, self.start, self.stops, self.run_folder, self.committed = (
            job,
            recipe,
            start,
            stops,
            recipe.folder,
            committed,
        )
        self.kills = Kills(recipe.chaos, recipe.folder.events)
        self.restarts = 0
        self.barren, self.barren_of_itself = 0, 0
        """Failures in a row without a newer checkpoint between them, and those of them that chaos
        did not make.
        """
        self.number = sum(
            event.get("kind") == "start" for event in read_lines(recipe.folder.events)
        )
        """Of the last attempt that came as far as to have one."""

    def run(self) -> Ended:
        old = _old_files(self.run_folder) if FRESH in self.job.argv else {}
        job, checkpoints = self.job, self.committed()
        while True:
            outcome = self._attempt(job)
            if isinstance(outcome, Ended):
                return outcome
            found = self.committed()
            progress, checkpoints = bool(found.items() - checkpoints.items()), found
            if reason := self._hopeless(outcome, progress):
                say(f"{outcome.told}; given up: {reason}")
                self._note("give_up", cause=f"{reason}; the last failure: {outcome.told}")
                return Ended(outcome.code, 0)
            # What has not been set aside yet must be: the first attempt may have died before it
            # came to that.
            if not any(stamp_of(path) == stamp for path, stamp in old.items()):
                job = replace(
                    self.job,
                    argv=tuple(argument for argument in self.job.argv if argument != FRESH),
                )
            self.restarts += 1
            onward = (
                "starting again"
                f" {f'from checkpoint {max(found):,}' if found and FRESH not in job.argv else 'from the beginning'}"
            )
            wait = self._wait_s()
            say(
                f"{outcome.told}; {onward} (restart {self.restarts} of"
                f" {self.recipe.launch.restarts}){f' in {wait:g} s' if wait else ''}"
            )
            if not self._pause(wait):
                return self._stopped(found)
            self._note("restart", seconds=time.monotonic() - outcome.noticed, cause=outcome.told)

    def _attempt(self, job: Job) -> Ended | _Failure:
        """One start, until all its ranks are gone."""
        self.kills.arm()
        attempt = self.start(job)
        watch = _Watch(self, attempt)
        try:
            end = follow(attempt, self.stops, watch.look)
        except BaseException:
            attempt.stop()
            raise
        noticed, beats = time.monotonic(), attempt.beats()
        self.number = max([self.number, *(beat.attempt for beat in beats.values())])
        if self.stops.first:
            if watch.too_late or watch.hang:
                say(
                    "the ranks did not stop in time and were"
                    f" ended{f': {watch.hang.told()}' if watch.hang else ''}"
                )
                return self._stopped(self.committed())
            # Ended by the signal itself, in the queue or while it was loading: what earlier
            # attempts saved stands all the same.
            return (
                self._stopped(self.committed())
                if end.shown in (128 + self.stops.asked, 128 + signal.SIGTERM)
                else Ended(end.shown, self.stops.first)
            )
        if attempt.taken():
            return _Failure(end.shown, end.told(), noticed, taken=True)
        if end.code == EXIT_STOPPED and not self.committed():
            return Ended(
                128 + signal.SIGTERM, 0
            )  # there is nothing yet that the same command could go on from
        if end.code in (*WELL, EXIT_WRONG_INPUT):
            return Ended(end.code, 0)
        if watch.hang is not None:
            return _Failure(EXIT_FAILED, watch.told, noticed)
        at = f" at step {beats[end.rank].step:,}" if end.rank in beats else ""
        return _Failure(end.shown, f"{end.told()}{at}", noticed, by_us=self.kills.struck)

    def _hopeless(self, failure: _Failure, progress: bool) -> str | None:
        """Why it is no use to start again, or None."""
        if progress:
            self.barren, self.barren_of_itself = 0, 0
        self.barren += 1
        self.barren_of_itself += not (failure.by_us or failure.taken)
        if self.barren_of_itself > 1 and not failure.by_us:
            return "two failures in a row without a newer checkpoint between them"
        if self.barren > MOST_TAKEN and failure.taken:
            return (
                f"it came no further in {self.barren} starts; make checkpoint.every smaller, or the"
                " time limit longer"
            )
        if self.restarts >= self.recipe.launch.restarts:
            return f"launch.restarts={self.recipe.launch.restarts} allows no more"
        return None

    def _wait_s(self) -> float:
        """At once, then 1, 2, 4 ... 60 seconds as long as nothing comes of it."""
        return min(LONGEST_WAIT_S, 2.0 ** (self.barren - 2)) if self.barren > 1 else 0.0

    def _pause(self, seconds: float) -> bool:
        """Wait before a restart; False when we were asked to stop."""
        until = time.monotonic() + seconds
        while not self.stops.first and (left := until - time.monotonic()) > 0:
            time.sleep(min(0.1, left))
        return not self.stops.first

    def _stopped(self, checkpoints: Collection[int]) -> Ended:
        """The end that a signal asked for while no rank could answer it."""
        if checkpoints:
            say(f"stopped; the same command goes on from checkpoint {max(checkpoints):,}")
        return Ended(EXIT_STOPPED if checkpoints else 128 + self.stops.first, self.stops.first)

    def _note(self, kind: str, **about: Any) -> None:
        note(self.run_folder.events, kind, attempt=self.number + (kind == "restart"), **about)


class _Watch:
    """What is looked at while an attempt runs."""

    def __init__(self, supervisor: _Supervisor, attempt: Attempt) -> None:
        self.run_folder, self.recipe, self.stops, self.kills = (
            supervisor.run_folder,
            supervisor.recipe,
            supervisor.stops,
            supervisor.kills,
        )
        self.attempt = attempt
        self.hang: Hang | None = None
        self.told = ""
        self.too_late = False
        self._next, self._stop_until = 0.0, 0.0
        self._hangs = HangWatch(
            self.recipe.launch,
            time.monotonic(),
            late_s=LATE_S if supervisor.job.mirror is not None else 0.0,
        )
        # The stages of a pipeline stand at different places by their nature.
        self._stragglers = StragglerWatch() if self.recipe.parallel.pipeline == 1 else None

    def look(self) -> bool:
        """Whether the ranks are to be ended."""
        now = time.monotonic()
        if self.stops.first:
            self._stop_until = self._stop_until or now + self.recipe.checkpoint.grace_s + LEAVE_S
            self.too_late = now > self._stop_until
            if self.too_late:
                return True
        else:
            self.kills.look(self.attempt)
        if now < self._next:
            return False
        self._next = now + LOOK_S
        running, beats = self.attempt.running(), self.attempt.beats()
        self.hang = self._hangs.look(running, beats, now)
        if self.hang is not None:
            self._tell_hang(self.hang)
            return True
        if (
            self._stragglers is not None
            and (found := self._stragglers.look(running, beats, now)) is not None
        ):
            wrote = ask_for_stacks(self.attempt, self.run_folder.logs, [found.rank])
            say(f"{found.told()}{told_stacks(wrote)}")
            note(
                self.run_folder.events,
                "straggler",
                attempt=beats[found.rank].attempt,
                rank=found.rank,
                step=found.step,
                seconds=found.seconds,
                cause=found.told(),
                stacks=str(wrote[found.rank]) if found.rank in wrote else None,
            )
        return False

    def _tell_hang(self, hang: Hang) -> None:
        wrote = ask_for_stacks(self.attempt, self.run_folder.logs, self.attempt.beats())
        named = {rank: path for rank, path in wrote.items() if rank in hang.ranks}
        silent = [
            f"rank {rank} does not answer" for rank in hang.ranks if named and rank not in wrote
        ]
        self.told = "; ".join([f"{hang.told()}{told_stacks(named)}", *silent])
        for rank in hang.ranks:
            note(
                self.run_folder.events,
                "hang",
                rank=rank,
                step=hang.step,
                seconds=hang.quiet_s,
                cause=hang.told(),
                stacks=str(named[rank]) if rank in named else None,
            )


def committed(checkpoints: Path) -> dict[int, Stamp]:
    """The steps with a whole commit marker, and how the marker stands."""
    found = {}
    for folder in checkpoints.glob("step-*"):
        stamp, marker = stamp_of(folder / COMMIT), read_marker(folder, COMMIT)
        if stamp is not None and marker is not None:
            found[int(marker["step"])] = stamp
    return found


def stamp_of(path: Path) -> Stamp | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _old_files(run: RunFolder) -> dict[Path, Stamp]:
    """What vouches for an earlier training, and is gone from its place when a fresh one has
    begun.
    """
    paths = [
        *(folder / COMMIT for folder in run.checkpoints.glob("step-*")),
        run.steps / "train.json",
    ]
    return {path: stamp for path in paths if (stamp := stamp_of(path)) is not None}
