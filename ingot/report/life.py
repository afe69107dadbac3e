"""Signs of life of a run: whether a process is at work on it, when it was last heard of, and which
step it is safe up to.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from ingot.base.heartbeat import Heartbeat, heard_elsewhere
from ingot.base.runfolder import RUN_LOCK, RunFolder, lock_holder, names_process_of_here
from ingot.report.incidents import whole
from ingot.report.metrics import is_number

FAILED = ("failure", "give_up")
"""Events after which a run does not go on by itself."""
ENDS = ("start", "stop", "finish", *FAILED)
"""The last of these events tells how a run stands."""
SAVED = ("start", "save", "stop", "finish")
"""Events whose step is that of the newest checkpoint; a start has one if it is resumed."""
RESUMED = "resumed"


def at_work(run: RunFolder) -> bool:
    """Whether another process holds the run, or one of another machine, whose locks cannot be seen,
    was heard of just now.
    """
    return any(_another_holds(run, name) for name in ("lock", RUN_LOCK)) or heard_elsewhere(
        run.heartbeats
    )


def _another_holds(run: RunFolder, name: str) -> bool:
    holder = lock_holder(run.root, name)
    is_this_one = holder == os.getpid() and names_process_of_here(run.root, name)
    return holder is not None and not is_this_one


def last_sign(
    beat: Heartbeat | None, events: list[dict[str, Any]], logged: Iterable[float]
) -> float | None:
    """The last beat, event or logged step by what they say themselves: a copy has the times of its
    files anew.
    """
    times = [*logged, *(event.get("t_wall") for event in events), beat.wall if beat else None]
    return max((when for when in times if is_number(when)), default=None)


def last_changed(run: RunFolder) -> float:
    """When the run last changed, by the times of its files; that of the folder itself is also the
    time of whatever else was put into it.
    """
    times = [
        path.stat().st_mtime
        for path in (run.recipe, run.metrics, run.events, *run.steps.glob("*.json"))
        if path.exists()
    ]
    return max(times, default=0.0)


def saved_step(events: Iterable[dict[str, Any]]) -> int | None:
    """The step of the newest checkpoint; None before the first. Only the last event that knows it
    counts: what stands before may be of another training in the same folder.
    """
    told = [event for event in events if event.get("kind") in SAVED]
    if not told or (told[-1]["kind"] == "start" and told[-1].get("cause") != RESUMED):
        return None
    return whole(told[-1].get("step")) or None
