"""One step, done properly: lock the run folder, look whether it is done already, do it, leave its
record.

Every verb goes through here, typed alone or started by `ingot run`, so that each knows what the
other did.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from ingot.base.environment import ranks
from ingot.base.errors import IngotError, Stopped
from ingot.base.events import record_event
from ingot.base.fingerprint import fingerprint
from ingot.base.lock import folder_lock
from ingot.base.progress import say
from ingot.base.steprecord import Outcome, StepRecord, write_record
from ingot.base.storage import fsync_folder, write_atomic
from ingot.config.load import dump_recipe
from ingot.config.recipe import Recipe
from ingot.pipeline.skip import NOT_DONE, Stamps, check, refuse_stale_data
from ingot.pipeline.steps import Step


def perform(
    step: Step, recipe: Recipe, do: Callable[[], Outcome], stamps: Stamps, *, again: bool = False
) -> StepRecord:
    """Do `step` by calling `do`, unless its record says that nothing changed (`again` does it all
    the same).

    Under torchrun every rank calls this: all come to the same answer from the same files, rank 0
    alone writes.

    Raises:
        Failed: another process works in this run folder.
        WrongInput: the data that it rests on was made with other knobs.
    """
    run, is_main = recipe.folder, ranks().is_main
    with folder_lock(run.root) if is_main else contextlib.nullcontext():
        found = check(step, recipe, stamps)
        if found.record is not None and not again:
            if is_main:
                say(f"{step.verb}: unchanged, {found.record.result}")
            return found.record
        refuse_stale_data(step, recipe)
        if is_main:
            if found.reasons and found.reasons != (NOT_DONE,):
                say(f"{step.verb}: again, because {'; '.join(found.reasons)}")
            write_atomic(run.recipe, dump_recipe(recipe))
            # From here on what the old record vouches for is no longer sure. A crash of the machine
            # must not bring it back.
            with contextlib.suppress(FileNotFoundError):
                (run.steps / f"{step.verb}.json").unlink()
                fsync_folder(run.steps)
        began = time.monotonic()
        with _noting_failure(step, recipe) if is_main else contextlib.nullcontext():
            outcome = do()
        record = StepRecord(
            step.verb,
            fingerprint(found.reads),
            outcome.outputs,
            round(time.monotonic() - began, 3),
            outcome.result,
            outcome.where,
            found.reads,
            outcome.files,
            outcome.exit_code,
        )
        if is_main:
            write_record(run.steps, record)
        return record


@contextlib.contextmanager
def _noting_failure(step: Step, recipe: Recipe) -> Iterator[None]:
    """Write a failure into `events.jsonl`, where it is looked for when a run is judged later."""
    try:
        yield
    except Stopped:
        raise
    except Exception as error:
        cause = str(error) if isinstance(error, IngotError) else f"{type(error).__name__}: {error}"
        with contextlib.suppress(OSError, IngotError):
            record_event(recipe.folder.events, "failure", cause=f"{step.verb}: {cause}")
        raise
