"""Parts of columns that lie in a bucket come shortly before training draws from them, and go afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ingot.base.errors import IngotError
from ingot.base.progress import Progress, say
from ingot.data.opened import Opened
from ingot.data.order import Order

AGAIN_S = 10.0
"""Pause before what could not be fetched is tried again; whoever needs it meanwhile tries for itself."""
LAST_S = 1.0
"""How long the end waits for a part on its way: a rank that is asked to stop has little time, and a part may take minutes."""


class Ahead:
    """Keeps the parts at hand that a step and the next are drawn from, those of the window after these, and for slower ranks those of the one before.

    All ranks of a machine do this, each taking what no other one is fetching.
    """

    def __init__(self, rows: Opened, order: Order, global_batch: int) -> None:
        self._rows, self._order, self._batch = rows, order, global_batch
        self._wanted: list[int] = []
        self._had = rows.brought()  # by an attempt before this one
        self._over, self._news = False, threading.Event()
        self._thread = threading.Thread(target=self._run, name="ahead", daemon=True)
        self._thread.start()

    def ready(self, step: int, tell: Callable[[], None]) -> None:
        """Have the parts that `step` and the next are drawn from; `tell` is called at each."""
        now = self._order.parts(self._samples(step))
        self.look(step)
        with Progress("fetch", total=len(now), unit="parts") as progress:
            for count, part in enumerate(now, 1):
                self._rows.bring(part)
                tell()
                progress.update(count)

    def look(self, step: int) -> None:
        """Training has come to `step`."""
        samples = self._samples(step)
        wanted = self._order.parts(samples, after=1)
        if wanted != self._wanted:
            self._wanted = wanted
            for part in self._had.difference(self._order.parts(samples, before=1, after=1)):
                self._rows.drop(part)
                self._had.discard(part)
            self._had.update(wanted)
            self._news.set()

    def _samples(self, step: int) -> range:
        return range(step * self._batch, (step + 2) * self._batch)

    def close(self) -> None:
        self._over = True
        self._news.set()
        self._thread.join(LAST_S)

    def _run(self) -> None:
        pause: float | None = None
        while self._news.wait(pause) or pause:
            self._news.clear()
            pause = None
            for part in self._wanted:
                if self._over:
                    return
                try:
                    if self._news.is_set():
                        break
                    if not self._rows.bring(part, wait=False):
                        pause = AGAIN_S
                except IngotError as error:
                    say(f"warning: {error}; trying again")
                    pause = AGAIN_S
            if self._over:
                return
