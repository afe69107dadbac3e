"""What the seconds of a training go to, kept so that nothing is forgotten however it dies: in the
heartbeat, and at each commit in the events.
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

from ingot.base.heartbeat import TIME_USES, HeartbeatWriter, Phase, TimeUse, read_beats
from ingot.base.runfolder import RunFolder
from ingot.base.runlog import read_lines, record_event
from ingot.checkpoints.saver import Saved
from ingot.checkpoints.store import committed
from ingot.train.step import StepInfo

WINDOW = 32
"""Steps whose median duration is the usual one."""


class EventSink:
    """Writes the events of this run, on rank 0 alone; `heart` knows which attempt it is."""

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
    """Attempts are counted by their starts, from 1."""
    return 1 + len([event for event in read_lines(events) if event.get("kind") == "start"])


def record_lost_time(run: RunFolder, events: EventSink) -> None:
    """Record what an attempt that died had done beyond its last checkpoint; by rank 0, before this
    attempt's own first beat.

    An attempt that ended in good order said so. Whatever machine it ran on: its file is in the run
    folder.
    """
    beats = [
        beat
        for path in sorted(run.heartbeats.glob("*"))
        for beat in read_beats(path)
        if beat.rank == 0
    ]
    died = max(beats, key=lambda beat: beat.wall, default=None)
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
    """Whatever nothing else takes of a step's wall time was the step itself.

    `spent` are the seconds since the last committed checkpoint, which are lost if this process dies
    now.
    """

    def __init__(self, heart: HeartbeatWriter, events: EventSink) -> None:
        self.heart, self._events = heart, events
        self._spent: dict[TimeUse, float] = dict.fromkeys(TIME_USES, 0.0)
        self._kept: dict[int, dict[TimeUse, float]] = {}
        self._mark, self._elsewhere = time.monotonic(), 0.0
        self._durations: deque[float] = deque(maxlen=WINDOW)

    def begin(self) -> None:
        """The first step begins now."""
        self._mark, self._elsewhere = time.monotonic(), 0.0

    @contextmanager
    def spending(self, what: TimeUse, phase: Phase | None = None) -> Iterator[None]:
        """What happens within is not the step's own; in a `phase` of its own, where that takes
        long.
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
            if phase is not None:
                self.heart.beat(before)

    def after_step(self, info: StepInfo) -> bool:
        now = time.monotonic()
        own = max(now - self._mark - self._elsewhere, 0.0)
        self._spent["productive"] += own
        self._mark, self._elsewhere = now, 0.0
        if self.heart.phase == "step":
            self._durations.append(own)  # the first one compiles, and is not usual
            self.heart.usual_s = statistics.median(self._durations)
        self.heart.spent = dict(self._spent)
        self.heart.beat("step", step=info.step, place=0)
        return False

    def snapshot(self, step: int) -> None:
        """The state after `step` is being saved: once that is committed, what was spent so far is
        safe.
        """
        self._kept[step] = dict(self._spent)

    def committed(self, saved: Saved) -> None:
        """A checkpoint stands."""
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
    """Seconds since this process was made."""
    return max(time.time() - float(psutil.Process().create_time()), 0.0)
