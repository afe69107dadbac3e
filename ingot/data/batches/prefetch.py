"""Fetches parts of columns that lie in a bucket shortly before training draws from them, and
removes them afterwards.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ingot.base.errors import Failed, IngotError
from ingot.base.progress import Progress, say
from ingot.base.remote.deferred import UnusableReplica
from ingot.data.batches.order import SampleOrder
from ingot.data.columns.reader import PreparedSplit

LOOK_S = 0.05
BUSY_S, AGAIN_S, AWAY_S = 1.0, 10.0, 900.0
"""When a part that another rank is fetching, and one that could not be fetched, is tried again; and
how long training waits for what cannot be.
"""
LAST_S = 1.0
"""How long the end waits for a part on its way: a rank that is asked to stop has little time, and a
part may take minutes.
"""


class PartPrefetcher:
    """Keeps the parts at hand that a step and the next are drawn from, those of the window after
    these, and for slower ranks those of the one before.

    All ranks of a machine do this, each taking what no other one is fetching.
    """

    def __init__(
        self, rows: PreparedSplit, order: SampleOrder, global_batch: int, *, quiet: bool = False
    ) -> None:
        self._rows, self._order, self._batch, self._quiet = rows, order, global_batch, quiet
        self._wanted, self._here = list[int](), list[int]()
        self._had = rows.brought()  # by an attempt before this one
        self._trouble: tuple[float, IngotError | OSError] | None = None
        self._over, self._news = False, threading.Event()
        self._thread = threading.Thread(target=self._run, name="ahead", daemon=True)
        self._thread.start()

    def wait(self, step: int, meanwhile: Callable[[], bool]) -> bool:
        """Training has come to `step`: until the parts are here that it and the next are drawn
        from. `meanwhile` is called now and then, and ends the wait when it says so, which gives
        False.

        Raises:
            UnusableReplica: a part is not what was prepared.
            IngotError: a part could not be had for a quarter of an hour.
        """
        samples = range(step * self._batch, (step + 2) * self._batch)
        self._want(samples)
        now = self._order.parts(samples)
        if now == self._here:
            return True
        if lacking := self._lacking(now):
            with Progress("fetch", total=len(now), unit="parts", quiet=self._quiet) as progress:
                while lacking:
                    self._judge()
                    if meanwhile():
                        return False
                    time.sleep(LOOK_S)
                    lacking = self._lacking(now)
                    progress.update(len(now) - lacking)
        self._here = now
        return True

    def close(self) -> None:
        self._over = True
        self._news.set()
        self._thread.join(LAST_S)

    def _want(self, samples: range) -> None:
        wanted = self._order.parts(samples, after=1)
        if wanted != self._wanted:
            for part in self._had.difference(self._order.parts(samples, before=1, after=1)):
                self._rows.drop(part)
                self._had.discard(part)
            self._had.update(wanted)
            self._wanted = wanted
            self._news.set()

    def _lacking(self, parts: list[int]) -> int:
        return sum(not self._rows.has(part) for part in parts)

    def _judge(self) -> None:
        if self._trouble is not None and (
            isinstance(self._trouble[1], UnusableReplica)
            or time.monotonic() > self._trouble[0] + AWAY_S
        ):
            if isinstance(self._trouble[1], IngotError):
                raise self._trouble[1]
            raise Failed(
                f"parts of the columns cannot be fetched ({self._trouble[1]}); see to the disk of"
                " this machine and run the same command again"
            )

    def _run(self) -> None:
        pause: float | None = None
        while self._news.wait(pause) or pause:
            self._news.clear()
            pause = None
            for part in self._wanted:
                if self._over:
                    return
                if self._news.is_set():
                    break
                try:
                    if not self._rows.bring(part, wait=False):
                        pause = pause or BUSY_S
                    self._trouble = None
                except (IngotError, OSError) as error:
                    self._trouble = (self._trouble[0] if self._trouble else time.monotonic()), error
                    say(f"warning: {error}; trying again")
                    pause = AGAIN_S
                    break
                if part not in self._had:  # training has left it behind meanwhile
                    self._rows.drop(part)
            if self._over:
                return
