"""`ingot run`: every step of the table as a command of its own, skipping what is done and
unchanged; then one table and one page.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field

from ingot.base.errors import (
    EXIT_DONE,
    EXIT_KEEP,
    EXIT_STOPPED,
    EXIT_WRONG_INPUT,
    Failed,
    IngotError,
)
from ingot.base.lock import folder_lock
from ingot.base.progress import say
from ingot.base.steprecord import StepRecord, read_record
from ingot.config.recipe import Recipe
from ingot.launch.job import Job
from ingot.launch.local import Ended, foreground
from ingot.launch.places import do, place
from ingot.launch.supervise import supervise
from ingot.pipeline.ask import serve_and_ask
from ingot.pipeline.perform import perform
from ingot.pipeline.skip import Stamps, check
from ingot.pipeline.steps import STEPS, Step
from ingot.report.page import write_page


class StepEnded(IngotError):
    """A step did not finish; its own message has been shown already. The exit code is the
    step's.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass
class Done:
    """What `ingot run` has behind it: the record of each step that is done, and which of them were
    skipped.
    """

    records: list[StepRecord] = field(default_factory=list)
    skipped: set[str] = field(default_factory=set)


def run(
    recipe: Recipe,
    arguments: Sequence[str],
    stamps: Stamps,
    *,
    fresh: bool = False,
    debug: bool = False,
) -> Done:
    """Do all steps in order, each in a process of its own. `arguments` are recipe files and
    overrides as typed.

    `fresh` trains from the first step, where training is to be done; `debug` lets the steps show
    tracebacks.

    Raises:
        StepEnded: a step failed or was stopped; the same command goes on from there.
        Failed: another `ingot run` works in this run folder.
    """
    done = Done()
    with folder_lock(recipe.folder.root, "run-lock"):
        for number, step in enumerate(STEPS, start=1):
            found = check(step, recipe, stamps)
            if found.record is not None:
                record = found.record
                done.skipped.add(step.verb)
            else:
                say(f"[{number}/{len(STEPS)}] {step.verb}")
                options = [
                    *(["--fresh"] if fresh and step.verb == "train" else []),
                    *(["--debug"] if debug else []),
                ]
                record = _do(step, recipe, [*arguments, *options], stamps)
            done.records.append(record)
            if record.exit_code == EXIT_KEEP:
                break
        if (
            len(done.skipped) < len(done.records)
            or not (recipe.folder.reports / "index.html").exists()
        ):
            write_page(recipe.folder)
    return done


def _do(step: Step, recipe: Recipe, arguments: Sequence[str], stamps: Stamps) -> StepRecord:
    if step.verb == "serve":
        return perform(step, recipe, lambda: serve_and_ask(recipe, arguments), stamps)
    ended = _in_its_place(step, recipe, arguments)
    if ended.signum or ended.code not in (EXIT_DONE, EXIT_KEEP):
        code = ended.code or 128 + ended.signum
        raise StepEnded(f"{step.verb} {_how_it_ended(ended)}", code)
    record = read_record(recipe.folder.steps, step.verb)
    if record is None:
        raise Failed(
            f"{step.verb} ended well and left no record in {recipe.folder.steps}; run the same"
            " command again"
        )
    return record


def _in_its_place(step: Step, recipe: Recipe, arguments: Sequence[str]) -> Ended:
    """What several nodes can share goes where `launch` says; everything else is done here."""
    supervised, recipe = step.verb == "train", recipe.at(step.verb)
    if recipe.launch.kind != "local" and (step.distributed or step.verb in recipe.pipeline.steps):
        options = [argument for argument in arguments if argument.startswith("--")]
        return do(
            recipe,
            place(recipe, step.verb, shared=step.distributed, options=options),
            supervised=supervised,
        )
    job = Job(
        step.verb,
        (step.verb, *arguments),
        recipe.launch.processes if step.distributed else 1,
        environment=recipe.launch.variables,
    )
    return supervise(job, recipe) if supervised else foreground(job)


def _how_it_ended(ended: Ended) -> str:
    onward = "the same command goes on from here"
    if ended.signum or ended.code == EXIT_STOPPED:
        return f"was stopped; {onward}"
    if ended.code == 128 + signal.SIGKILL:
        return f"was killed, perhaps for want of memory; {onward}"
    if ended.code == EXIT_WRONG_INPUT:
        return "cannot be done, see above; mend that and run the same command again"
    return f"failed (exit {ended.code}), see above; {onward}"
