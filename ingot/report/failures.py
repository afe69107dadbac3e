"""What a run failed with, where to look and what to type next."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from ingot.base.runfolder import RunFolder
from ingot.report.incidents import number
from ingot.report.life import FAILED
from ingot.report.run_view import RunView


@dataclass(frozen=True)
class Failure:
    """The failure that a run ended with. `title`: what failed and where; `kept`: what need not be
    done again; `command`: what goes on from there.
    """

    verb: str
    title: str
    cause: str
    when: float | None
    kept: str
    where: str
    command: str


def last_failure(view: RunView) -> Failure | None:
    """The failure that the run ended with, or that it ended without a word; None while it runs,
    and where it ended otherwise.
    """
    if view.broken_off:
        verb, cause, when, ended = "train", view.last_word, view.last_sign, "broken off"
    elif view.failed is None:
        return None
    else:
        event = next(event for event in reversed(view.events) if event.get("kind") in FAILED)
        (verb, cause), when, ended = view.failed, number(event.get("t_wall")), "failed"
    run = RunFolder(view.root)
    done = [record.step for record in view.records]
    kept = ", ".join(done) or "nothing was finished before"
    if verb == "train" and view.saved_step is not None:
        kept += f"{'; ' if done else ''}training up to checkpoint {view.saved_step:,}"
    logs = sorted(run.logs.glob("*")) if run.logs.is_dir() else []
    moved = view.made_at.resolve() != view.root.resolve() and bool(view.recipe)
    here = [f"output={view.root.parent}", f"name={view.root.name}"] if moved else []
    at = f" at step {view.steps_done:,}" if verb == "train" and view.steps_done else ""
    return Failure(
        verb,
        f"{verb} {ended}{at}",
        cause,
        when,
        kept,
        str(run.logs if logs else run.events),
        shlex.join(["ingot", "run", str(run.recipe), *here]),
    )
