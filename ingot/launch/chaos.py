"""Kills on purpose, at random moments: to see that nothing is lost. What will be killed is written
down before it is.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import NoReturn

from ingot.base.progress import say
from ingot.base.runlog import read_lines
from ingot.config.sections.deployment import Chaos
from ingot.launch.attempt import Attempt
from ingot.launch.notes import note


class Kills:
    """The kills of one run. The n-th depends on the seed and n alone, so that a supervisor that is
    killed and started again goes on with the next.
    """

    def __init__(self, knobs: Chaos, events: Path) -> None:
        self._knobs, self._events = knobs, events
        self._count = (
            sum(event.get("kind") == "killed" for event in read_lines(events))
            if knobs.kill_every_s
            else 0
        )
        self.struck = False
        self._due: float | None = None

    def arm(self) -> None:
        """An attempt starts: draw what is killed next, and when."""
        self.struck = False
        if self._knobs.kill_every_s is not None:
            self._draw = random.Random(f"{self._knobs.seed} {self._count}")
            self._due = time.monotonic() + self._draw.expovariate(1 / self._knobs.kill_every_s)

    def look(self, attempt: Attempt) -> None:
        """Kill, when it is time; `struck` then says that the failure to come is ours."""
        ranks = sorted(attempt.running())
        if self._due is None or time.monotonic() < self._due or not ranks:
            return
        what = self._draw.choice(self._knobs.what)
        victim = self._draw.choice(ranks) if what == "rank" else None
        beats = attempt.beats()
        beat = beats.get(ranks[0] if victim is None else victim)
        # An event's rank is null where it is all of them.
        note(
            self._events,
            "killed",
            cause="chaos",
            rank=victim,
            what=what,
            attempt=beat.attempt if beat else 0,
            step=beat.step if beat else None,
            phase=beat.phase if beat else None,
        )
        self._count, self._due, self.struck = self._count + 1, None, True
        where = (
            f" at step {beat.step:,} ({beat.phase})" if beat else " before its first sign of life"
        )
        say(
            "chaos:"
            f" {f'rank {victim}' if what == 'rank' else 'all ranks' if what == 'group' else 'all ranks and this supervisor'}"
            f" killed{where}"
        )
        if what == "supervisor":
            _die()
        attempt.send(signal.SIGKILL, victim)


def _die() -> NoReturn:
    """The ranks go with us; whoever wants to go on starts the same command again."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("this process is dead")
