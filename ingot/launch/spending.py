"""What the starts of a job have had of `cloud.max_run` and `cloud.max_cost`: kept in the run folder
until the job is done, so that the bounds
hold for all launches of it together, whoever repeats the command: a person, a service, or a
pipeline that tries a step again.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from ingot.base.storage import write_atomic


@dataclass
class Spent:
    """Of starts that are over; and of the one that runs, since when (seconds since the epoch), what
    it costs an hour, and for how long at most.
    """

    seconds: float = 0.0
    dollars: float = 0.0
    since: float | None = None
    dollars_an_hour: float = 0.0
    limit_s: float = 0.0


class Meter:
    """Counts by the wall clock: machines go on while a laptop sleeps. `path` is
    `RUN/jobs/VERB.spent.json`.
    """

    def __init__(self, root: Path, name: str, dollars_an_hour: float) -> None:
        self._path, self._rate = root / "jobs" / f"{name}.spent.json", dollars_an_hour

    def used(self) -> tuple[float, float]:
        """Seconds and US dollars, of the start that runs as well."""
        spent = _closed(self._read(), time.time())
        return spent.seconds, spent.dollars

    def begin(self, limit_s: float) -> bool:
        """A start begins, which its place ends after `limit_s`. False where one runs already, which
        goes on.
        """
        spent = self._read()
        if spent.since is not None:
            return False
        self._write(Spent(spent.seconds, spent.dollars, time.time(), self._rate, limit_s))
        return True

    def end(self, at: float | None = None) -> None:
        """The start is over, since now or since `at`; nothing where none runs."""
        spent = self._read()
        if spent.since is not None:
            self._write(_closed(spent, time.time() if at is None else at))

    def forget(self) -> None:
        """The job is done, or begins anew."""
        self._path.unlink(missing_ok=True)

    def _read(self) -> Spent:
        try:
            return Spent(**json.loads(self._path.read_text(encoding="utf-8")))
        except (FileNotFoundError, ValueError, TypeError):
            return Spent()

    def _write(self, spent: Spent) -> None:
        write_atomic(self._path, json.dumps(asdict(spent)) + "\n")


def _closed(spent: Spent, at: float) -> Spent:
    if spent.since is None:
        return spent
    seconds = min(max(0.0, at - spent.since), spent.limit_s)
    return Spent(spent.seconds + seconds, spent.dollars + seconds / 3600 * spent.dollars_an_hour)
