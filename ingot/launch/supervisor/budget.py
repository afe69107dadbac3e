"""The budget of a job: what its starts have used of `cloud.max_run` and `cloud.max_cost`, and what
is left for the next one.

It is kept in the run folder until the job is done, so that the limits hold for all starts together,
whoever repeats the command: a user, a service, or a pipeline that retries a step.
"""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ingot.base.errors import Failed, IngotError
from ingot.base.progress import duration, say
from ingot.base.storage import write_atomic
from ingot.cloud.prices import SHORTEST_RUN_S, hourly_price_of, time_limit_s
from ingot.config.recipe import Recipe
from ingot.launch.handles import SPENT, find_handle
from ingot.launch.job import Handle, Job, Launcher, QueueLauncher, launcher_of
from ingot.launch.rendezvous import EXIT, Rendezvous


@dataclass
class Spending:
    """Seconds and US dollars of finished starts; of the running one, its start (seconds since the
    epoch), its price per hour and its time limit.
    """

    seconds: float = 0.0
    dollars: float = 0.0
    since: float | None = None
    dollars_an_hour: float = 0.0
    limit_s: float = 0.0


class SpendingMeter:
    """Counts wall-clock time, since machines keep running while a laptop sleeps. The file is
    `RUN/jobs/VERB.spent.json`.
    """

    def __init__(self, root: Path, name: str, dollars_an_hour: float) -> None:
        self._path, self._rate = root / "jobs" / f"{name}{SPENT}", dollars_an_hour

    def used(self) -> tuple[float, float]:
        """Seconds and US dollars, including the running start."""
        spending = _finished(self._read(), time.time())
        return spending.seconds, spending.dollars

    def begin(self, limit_s: float) -> bool:
        """Record the beginning of a start, which its place ends after `limit_s`. False if one is
        running already; that one continues to be counted.
        """
        spending = self._read()
        if spending.since is not None:
            return False
        self._write(Spending(spending.seconds, spending.dollars, time.time(), self._rate, limit_s))
        return True

    def leave_out(self, waited_s: float | None) -> None:
        """Count the running start without the seconds that it waited; None: not at all."""
        spending = self._read()
        if spending.since is None:
            return
        if waited_s is None:
            self._write(Spending(spending.seconds, spending.dollars))
        else:
            self._write(replace(spending, since=spending.since + max(0.0, waited_s)))

    def end(self, at: float | None = None) -> None:
        """Record the end of the start, now or at `at`; does nothing if none is running."""
        spending = self._read()
        if spending.since is not None:
            self._write(_finished(spending, time.time() if at is None else at))

    def reset(self) -> None:
        """Reset when the job is done, or starts from scratch."""
        self._path.unlink(missing_ok=True)

    def _read(self) -> Spending:
        try:
            return Spending(**json.loads(self._path.read_text(encoding="utf-8")))
        except (FileNotFoundError, ValueError, TypeError):
            return Spending()

    def _write(self, spending: Spending) -> None:
        write_atomic(self._path, json.dumps(asdict(spending)) + "\n")


def _finished(spending: Spending, at: float) -> Spending:
    if spending.since is None:
        return spending
    seconds = min(max(0.0, at - spending.since), spending.limit_s)
    dollars = seconds / 3600 * spending.dollars_an_hour
    return Spending(spending.seconds + seconds, spending.dollars + dollars)


def meter_of(recipe: Recipe, job: Job) -> SpendingMeter | None:
    """The meter of a job whose time is limited; None for others."""
    if job.time_limit_s is None:
        return None
    rate = 0.0 if launcher_of(recipe).paid_by_use else hourly_price_of(recipe, job.nodes)
    return SpendingMeter(recipe.folder.root, job.name, rate)


def time_left_s(recipe: Recipe, nodes: int, used: tuple[float, float] = (0.0, 0.0)) -> float | None:
    """Seconds that the job may still take; None if nothing is billed. `used`: seconds and US
    dollars of earlier starts.
    """
    launcher = launcher_of(recipe)
    if launcher.paid_by_use:
        if recipe.cloud.max_cost is not None and not used[0]:
            say(
                f"note: {recipe.launch.kind} is paid by what it uses, which cloud.max_cost does not"
                " bound; cloud.max_run does"
            )
        return recipe.cloud.max_run - used[0]
    return None if launcher.shares_disk else time_limit_s(recipe, nodes=nodes, used=used)


def with_time_left(recipe: Recipe, job: Job, meter: SpendingMeter) -> Job:
    """The job with the time limit of one more start. Raises Failed if too little is left."""
    used = meter.used()
    left = time_left_s(recipe, job.nodes, used) or 0.0
    if left < SHORTEST_RUN_S and used[0]:
        raise Failed(
            f"what cloud.max_run and cloud.max_cost allow is used up ({duration(used[0])}, about"
            f" {used[1]:.2f} US dollars); raise them, and the same command goes on"
        )
    return replace(job, time_limit_s=left)


def end_last_start(meter: SpendingMeter, recipe: Recipe, job: Job, launcher: Launcher) -> None:
    """Record the end of a start that no launcher waited for, from its nodes' notes; now if they
    left none.
    """
    handle, at = find_handle(recipe.folder.root, job.name, recipe.launch.kind), None
    if handle is not None:
        leave_out_waiting(meter, launcher, handle)
    if handle is not None and "meet" in handle.about:
        notes = Rendezvous.of(handle).notes(EXIT).values()
        at = max((float(note["t_wall"]) for note in notes), default=None)
    meter.end(at)


def leave_out_waiting(meter: SpendingMeter, launcher: Launcher, handle: Handle) -> None:
    """Count a start without what its place does not charge; with it while that does not answer."""
    if isinstance(launcher, QueueLauncher):
        with contextlib.suppress(IngotError):
            meter.leave_out(launcher.waited_s(handle))
