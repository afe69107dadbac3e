"""What the supervisor does while an attempt runs: it detects hangs and stragglers, requests stacks
from ranks, kills them on purpose if `chaos` asks for it, and records each of these as an event.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NoReturn

from ingot.base.errors import IngotError
from ingot.base.progress import say
from ingot.base.runlog import read_lines, record_event
from ingot.config.recipe import Recipe
from ingot.config.sections.deployment import Chaos
from ingot.launch.attempt import Attempt, StopRequests
from ingot.launch.supervisor.hang_detection import (
    NAMED,
    Hang,
    HangDetector,
    StragglerDetector,
    name_ranks,
)

CHECK_INTERVAL_S = 0.25
"""Seconds between two checks of the heartbeats."""
BUCKET_DELAY_S = 60.0
"""How old a heartbeat may be when it arrives through a bucket: nodes push them every 15 seconds,
and a request may have to be retried.
"""
STOP_MARGIN_S = 30.0
"""How much longer than `checkpoint.grace_s` ranks that were asked to stop may take to exit by
themselves.
"""


class AttemptWatch:
    """Checks one attempt. `hang` is the hang that ended it, `failure` its description;
    `stop_timed_out`: its ranks did not exit in time after a stop request.
    """

    def __init__(
        self,
        recipe: Recipe,
        attempt: Attempt,
        stops: StopRequests,
        kills: ChaosKills,
        *,
        through_bucket: bool,
    ) -> None:
        self._recipe, self._attempt, self._stops, self._kills = recipe, attempt, stops, kills
        self.hang: Hang | None = None
        self.failure = ""
        self.stop_timed_out = False
        self._next_check, self._last_call = 0.0, time.monotonic()
        self._stop_deadline, self._told_suspended = 0.0, False
        self._hangs = HangDetector(
            recipe.launch,
            time.monotonic(),
            delay_s=BUCKET_DELAY_S if through_bucket else 0.0,
        )
        # Pipeline stages are at different micro-batches by design, so none of them is a straggler.
        self._stragglers = StragglerDetector() if recipe.parallel.pipeline == 1 else None

    def check(self) -> bool:
        """Whether the ranks must be terminated now."""
        now = time.monotonic()
        passed, self._last_call = now - self._last_call, now
        if self._stops.first:
            self.stop_timed_out = self._is_stop_overdue(now, passed)
            if self.stop_timed_out:
                return True
        else:
            self._kills.kill_if_due(self._attempt)
        if now < self._next_check:
            return False
        self._next_check = now + CHECK_INTERVAL_S
        if self.hang is not None:
            return True  # also if its ranks are back while they are being ended
        running, beats = self._attempt.running(), self._attempt.beats()
        self.hang = self._hangs.check(running, beats, now)
        if self.hang is not None:
            self._report_hang(self.hang)
            return True
        if (
            self._stragglers is not None
            and (found := self._stragglers.check(running, beats, now)) is not None
        ):
            stacks = request_stacks(self._attempt, self._recipe.folder.logs, [found.rank])
            say(f"{found.describe()}{describe_stacks(stacks)}")
            record_if_possible(
                self._recipe.folder.events,
                "straggler",
                attempt=beats[found.rank].attempt,
                rank=found.rank,
                step=found.step,
                seconds=found.seconds,
                cause=found.describe(),
                stacks=str(stacks[found.rank]) if found.rank in stacks else None,
            )
        return False

    def _is_stop_overdue(self, now: float, passed: float) -> bool:
        """Whether ranks that were asked to stop have had their time. While their place suspends
        them it does not pass: they save when they go on.
        """
        is_suspended = self._attempt.suspended()
        if not self._stop_deadline:
            self._stop_deadline = now + self._recipe.checkpoint.grace_s + STOP_MARGIN_S
        elif is_suspended:
            self._stop_deadline += passed
        if is_suspended and not self._told_suspended:
            self._told_suspended = True
            say(
                "the job is suspended: it saves and stops when it goes on; another Ctrl-C ends it"
                " now, without a checkpoint"
            )
        return now > self._stop_deadline

    def _report_hang(self, hang: Hang) -> None:
        stacks = request_stacks(self._attempt, self._recipe.folder.logs, self._attempt.beats())
        of_hanging = {rank: stacks[rank] for rank in hang.ranks if rank in stacks}
        self.failure = f"{hang.describe()}{describe_stacks(of_hanging)}"
        if of_hanging and (silent := [rank for rank in hang.ranks if rank not in stacks]):
            verb = "does" if len(silent) == 1 else "do"
            self.failure += f"; {name_ranks(silent)} {verb} not answer"
        record_if_possible(
            self._recipe.folder.events,
            "hang",
            rank=hang.ranks[0],
            ranks=hang.ranks[:NAMED],
            count=len(hang.ranks),
            step=hang.step,
            seconds=hang.quiet_s,
            cause=hang.describe(),
            stacks=[str(path) for path in of_hanging.values()][:NAMED],
        )


class ChaosKills:
    """The deliberate kills of one run (`chaos`), each recorded before it happens. The n-th depends
    only on the seed and n, so that a restarted supervisor continues with the next one.
    """

    def __init__(self, knobs: Chaos, events: Path) -> None:
        self._knobs, self._events = knobs, events
        self._count = (
            sum(event.get("kind") == "killed" for event in read_lines(events))
            if knobs.kill_every_s
            else 0
        )
        self.has_killed = False
        """Whether we caused the failure of this attempt."""
        self._due: float | None = None

    def arm(self) -> None:
        """Draw what to kill in the attempt that starts now, and when."""
        self.has_killed = False
        if self._knobs.kill_every_s is not None:
            self._random = random.Random(f"{self._knobs.seed} {self._count}")
            self._due = time.monotonic() + self._random.expovariate(1 / self._knobs.kill_every_s)

    def kill_if_due(self, attempt: Attempt) -> None:
        """Kill once the drawn time has come; at most once per attempt."""
        ranks = sorted(attempt.running())
        if self._due is None or time.monotonic() < self._due or not ranks:
            return
        what = self._random.choice(self._knobs.what)
        victim = self._random.choice(ranks) if what == "rank" else None
        beats = attempt.beats()
        beat = beats.get(ranks[0] if victim is None else victim)
        # The event's rank is null if all ranks are killed.
        record_if_possible(
            self._events,
            "killed",
            cause="chaos",
            rank=victim,
            what=what,
            attempt=beat.attempt if beat else 0,
            step=beat.step if beat else None,
            phase=beat.phase if beat else None,
        )
        self._count, self._due, self.has_killed = self._count + 1, None, True
        victims = {
            "rank": f"rank {victim}",
            "group": "all ranks",
            "supervisor": "all ranks and this supervisor",
        }
        where = f" at step {beat.step:,} ({beat.phase})" if beat else " before its first heartbeat"
        say(f"chaos: {victims[what]} killed{where}")
        if what == "supervisor":
            _kill_this_process()
        attempt.send(signal.SIGKILL, None if victim is None else [victim])


def _kill_this_process() -> NoReturn:
    """The kernel kills the ranks too; the same command, started again, resumes the training."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("this process is dead")


def record_if_possible(events: Path, kind: str, **fields: Any) -> None:
    """Record an event. A disk that refuses it must not stop the run."""
    with contextlib.suppress(OSError, IngotError):
        record_event(events, kind, **fields)


def request_stacks(attempt: Attempt, logs: Path, ranks: Collection[int]) -> dict[int, Path]:
    """Ask `ranks` for the stacks of all their threads; returns the files that were written. Only
    for ranks that sent a heartbeat: SIGUSR2 kills a process that has not installed a handler yet.
    """
    running = attempt.running()
    files = {rank: logs / f"stacks-rank{rank}.txt" for rank in ranks if rank in running}
    before = {rank: _size_and_time(path) for rank, path in files.items()}
    if files:
        attempt.send(signal.SIGUSR2, list(files))
    deadline = time.monotonic() + attempt.stacks_s
    while time.monotonic() < deadline and any(
        _size_and_time(path) == before[rank] for rank, path in files.items()
    ):
        time.sleep(0.05)
    time.sleep(0.1)  # a file that has begun to grow is soon complete
    return {rank: path for rank, path in files.items() if _size_and_time(path) != before[rank]}


def describe_stacks(files: Mapping[int, Path]) -> str:
    """The part of a message that points to the stacks of these ranks, of many to the first."""
    if not files:
        return "; it does not answer when asked for its stacks"
    named, more = [str(path) for path in files.values()][:NAMED], len(files) - NAMED
    return f"; stacks: {', '.join(named)}{f' and {more:,} more beside them' if more > 0 else ''}"


def _size_and_time(path: Path) -> tuple[int, int]:
    """Size and time: size alone is not enough, as a rank on another machine begins a file of its
    own.
    """
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_size, status.st_mtime_ns
