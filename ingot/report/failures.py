"""What a run failed with, where to look and what to type next."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from ingot.base.runfolder import RunFolder
from ingot.report.formatting import timestamp
from ingot.report.incidents import number, whole
from ingot.report.run_view import FAILED, RunView


@dataclass(frozen=True)
class Failure:
    """The failure that a run ended with. `kept`: what need not be done again; `command`: what goes
    on from there.
    """

    verb: str
    cause: str
    step: int | None
    when: str
    kept: str
    where: str
    command: str


def last_failure(view: RunView) -> Failure | None:
    """The failure that the run ended with; None while it runs, and where it ended otherwise."""
    if view.running or not view.state.startswith("failed"):
        return None
    event = next(event for event in reversed(view.events) if event.get("kind") in FAILED)
    verb, _, cause = str(event.get("cause") or "").partition(": ")
    if event.get("kind") == "give_up" or not cause:
        verb, cause = "train", str(event.get("cause") or "no reason was noted")
    run = RunFolder(view.root)
    saved = [
        step
        for other in view.events
        if other.get("kind") == "save" and (step := whole(other.get("step"))) is not None
    ]
    done = [record.step for record in view.records]
    kept = ", ".join(done) or "nothing was finished before"
    if verb == "train" and saved:
        kept += f"{'; ' if done else ''}training up to checkpoint {saved[-1]:,}"
    logs = sorted(run.logs.glob("*")) if run.logs.is_dir() else []
    return Failure(
        verb,
        cause,
        (view.steps_done or None) if verb == "train" else None,
        timestamp(number(event.get("t_wall"))),
        kept,
        str(run.logs if logs else run.events),
        f"ingot run {shlex.quote(str(run.recipe))}",
    )
