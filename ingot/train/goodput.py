"""Accounts for the wall time of a training. The account is kept in the heartbeat and, at each
commit, in the events, so that it survives however the process dies.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from ingot.base.heartbeat import TIME_USES, HeartbeatWriter, Phase, TimeUse, last_beat
from ingot.base.runfolder import RunFolder
from ingot.base.runlog import read_lines, record_event
from ingot.checkpoints.saver import Saved
from ingot.checkpoints.store import committed
from ingot.train.step import StepInfo

WINDOW = 32
"""Number of recent steps whose median is the usual step duration."""


class EventSink:
    """Writes this run's events on rank 0; `heart` supplies the number of the attempt."""

    def __init__(self, events: Path, heart: HeartbeatWriter, *, is_main: bool) -> None:
        self._events, self._heart, self._is_main = events, heart, is_main

    def emit(
        self,
        kind: str,
        *,
        step: int,
        seconds: float | None = None,
        cause: str | None = None,
        **more: Any,
    ) -> None:
        """Append one event; see `ingot.base.runlog.record_event`."""
        if self._is_main:
            attempt = self._heart.attempt
            record_event(
                self._events, kind, attempt=attempt, step=step, seconds=seconds, cause=cause, **more
            )


def next_attempt(events: Path) -> int:
    """The number of the next attempt, counted from 1 by `start` events."""
    return 1 + len([event for event in read_lines(events) if event.get("kind") == "start"])


def record_lost_time(run: RunFolder, events: EventSink) -> None:
    """Record the time that an attempt spent after its last checkpoint before it died; called on
    rank 0 before this attempt's first heartbeat.

    An attempt that ended in good order left the phase "over". Heartbeat files lie in the run
    folder, so the machine that it ran on does not matter.
    """
    died = last_beat(run.heartbeats)
    if died is None or died.phase == "over" or not any(died.spent.values()):
        return
    kept = next((found.step for found in committed(run.checkpoints)), 0)
    cause = f"attempt {died.attempt} ended in phase {died.phase}"
    events.emit(
        "lost",
        step=kept,
        seconds=sum(died.spent.values()),
        steps=max(died.step - kept, 0),
        cause=cause,
    )


class TimeAccount:
    """Divides wall time among uses; time within a step that no other use claims is productive.

    `heart.spent` holds the seconds since the last committed checkpoint: the time lost if the
    process dies now.
    """

    def __init__(self, heart: HeartbeatWriter, events: EventSink) -> None:
        self.heart, self._events = heart, events
        self._spent: dict[TimeUse, float] = dict.fromkeys(TIME_USES, 0.0)
        self._kept: dict[int, dict[TimeUse, float]] = {}
        self.begin()
        self._durations: deque[float] = deque(maxlen=WINDOW)

    def begin(self) -> None:
        """Start the clock of the first step."""
        self._mark = self._began = time.monotonic()
        self._elsewhere = self._beside = 0.0

    def in_steps(self) -> float:
        """Seconds since `begin` less those of evaluating and saving. Waiting for data counts."""
        return time.monotonic() - self._began - self._beside

    @contextmanager
    def spending(self, what: TimeUse, phase: Phase | None = None) -> Iterator[None]:
        """Book the time inside the block under `what` instead of the step; `phase` is shown in the
        heartbeat meanwhile, for what takes long.
        """
        before, began = self.heart.phase, time.monotonic()
        if phase is not None:
            self.heart.beat(phase)
        try:
            yield
        finally:
            seconds = time.monotonic() - began
            self._spent[what] += seconds
            self._elsewhere += seconds
            if what != "waiting":
                self._beside += seconds
            if phase is not None:
                self.heart.beat(before)

    def after_step(self, info: StepInfo) -> bool:
        now = time.monotonic()
        own = max(now - self._mark - self._elsewhere, 0.0)
        self._spent["productive"] += own
        self._mark, self._elsewhere = now, 0.0
        if self.heart.phase == "step":
            self._durations.append(own)  # the first step, which compiles, is in another phase
            self.heart.usual_s = statistics.median(self._durations)
        self.heart.spent = dict(self._spent)
        self.heart.beat("step", step=info.step, place=0)
        return False

    def snapshot(self, step: int) -> None:
        """The state after `step` is being saved: the time spent until now is safe once that
        checkpoint is committed.
        """
        self._kept[step] = dict(self._spent)

    def committed(self, saved: Saved) -> None:
        """A checkpoint was committed: emit its event and subtract the time that it made safe."""
        kept = self._kept.pop(saved.step)
        self._events.emit(
            "save",
            step=saved.step,
            seconds=saved.blocked_s,
            total_s=saved.total_s,
            bytes=saved.bytes,
            spent=kept,
        )
        for earlier in [self._spent, *self._kept.values()]:
            for what, seconds in kept.items():
                earlier[what] -= seconds
        self.heart.spent = dict(self._spent)

    def close(self) -> None:
        pass


def since_created() -> float:
    """Seconds since this process was created."""
    return max(time.time() - float(psutil.Process().create_time()), 0.0)
