"""Fetches parts of columns from a bucket shortly before training needs them, and removes them
afterwards.
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
"""Seconds until a part that another rank is fetching, and one that could not be fetched, are tried
again; and how long fetching may keep failing before training fails.
"""
LAST_S = 1.0
"""How long `close` waits for a part in flight: a rank that is asked to stop has little time, and a
part may take minutes.
"""


class PartPrefetcher:
    """Keeps on this machine the parts for the current step, the next step and the next window;
    parts of the previous window stay for slower ranks.

    All ranks of a machine run this; each fetches what no other rank is fetching.
    """

    def __init__(
        self, rows: PreparedSplit, order: SampleOrder, global_batch: int, *, quiet: bool
    ) -> None:
        self._rows, self._order, self._batch, self._quiet = rows, order, global_batch, quiet
        self._target_parts, self._available = list[int](), list[int]()
        self._fetched = rows.brought()  # by an earlier attempt
        self._failing: tuple[int, float, IngotError | OSError] | None = None
        self._closed, self._changed = False, threading.Event()
        self._thread = threading.Thread(target=self._run, name="ahead", daemon=True)
        self._thread.start()

    def wait(self, step: int, meanwhile: Callable[[], bool]) -> bool:
        """Block until the parts that `step` and the next step draw from are on this machine.
        `meanwhile` is polled; when it returns True, the wait ends and the result is False.

        Raises:
            UnusableReplica: a part differs from what was prepared.
            IngotError: fetching has failed for 15 minutes.
        """
        samples = range(step * self._batch, (step + 2) * self._batch)
        self._set_target(samples)
        now = self._order.parts(samples)
        if now == self._available:
            return True
        if lacking := self._missing(now):
            with Progress("fetch", total=len(now), unit="parts", quiet=self._quiet) as progress:
                while lacking:
                    self._raise_lasting_error()
                    if meanwhile():
                        return False
                    time.sleep(LOOK_S)
                    lacking = self._missing(now)
                    progress.update(len(now) - lacking)
        self._available = now
        return True

    def close(self) -> None:
        self._closed = True
        self._changed.set()
        self._thread.join(LAST_S)

    def _set_target(self, samples: range) -> None:
        wanted = self._order.parts(samples, after=1)
        if wanted != self._target_parts:
            for part in self._fetched.difference(self._order.parts(samples, before=1, after=1)):
                self._rows.drop(part)
                self._fetched.discard(part)
            self._fetched.update(wanted)
            self._target_parts = wanted
            if self._failing is not None and self._failing[0] not in wanted:
                self._failing = None
            self._changed.set()

    def _missing(self, parts: list[int]) -> int:
        return sum(not self._rows.has(part) for part in parts)

    def _raise_lasting_error(self) -> None:
        if self._failing is None:
            return
        _, since, error = self._failing
        if isinstance(error, UnusableReplica) or time.monotonic() > since + AWAY_S:
            if isinstance(error, IngotError):
                raise error
            raise Failed(
                f"parts of the columns cannot be fetched ({error}); check the disk of this machine"
                " and run the same command again"
            )

    def _run(self) -> None:
        pause: float | None = None
        while self._changed.wait(pause) or pause:
            self._changed.clear()
            pause = None
            for part in self._target_parts:
                if self._closed:
                    return
                if self._changed.is_set():
                    break
                try:
                    if not self._rows.bring(part, wait=False):
                        pause = pause or BUSY_S
                    # Parts that are here already say nothing about the one that fails.
                    if self._failing is not None and self._failing[0] == part:
                        self._failing = None
                except (IngotError, OSError) as error:
                    failing = self._failing
                    is_known = failing is not None and failing[0] == part
                    since = failing[1] if failing and is_known else time.monotonic()
                    self._failing = part, since, error
                    say(f"warning: {error}; trying again")
                    pause = AGAIN_S
                    break
                if part not in self._fetched:  # training has moved past it meanwhile
                    self._rows.drop(part)
            if self._closed:
                return
