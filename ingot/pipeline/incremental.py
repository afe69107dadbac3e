"""Is a step done and unchanged? Compares what it would read now with the record that it left; says
in words what differs.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import ingot
from ingot.base.environment import ranks
from ingot.base.errors import Failed, IngotError, Stopped, WrongInput
from ingot.base.lock import folder_lock
from ingot.base.markers import canonical_json, fingerprint
from ingot.base.progress import say
from ingot.base.reports import PipelineStepRecord, VerbOutcome, is_intact, read_record, write_record
from ingot.base.runlog import record_event
from ingot.base.storage import find_files, fsync_folder, is_remote, stamp, write_atomic
from ingot.config.identity import changes
from ingot.config.load import dump_recipe
from ingot.config.recipe import Recipe
from ingot.pipeline.steps import Step, before

DATA = ("ingest", "prepare")
NOT_DONE = "not done yet"

Stamps = Mapping[str, Callable[[Recipe], Any]]
"""Verb -> what tells whether the things that it reads outside the run folder changed: the files
behind sources, the live model. Handed in by the command line, since the rooms that know these
things are not this room's to import.
"""


@dataclass(frozen=True)
class Check:
    """`record` is the step's own record when nothing changed, else None and `reasons` say why it
    must run.
    """

    record: PipelineStepRecord | None
    reasons: tuple[str, ...]
    reads: dict[str, Any]
    """All that the step reads: knobs, inputs, stamps, versions. Kept in its record."""


def check(step: Step, recipe: Recipe, stamps: Stamps) -> Check:
    """Compare `step` with its record. Reads no data, only records and file sizes."""
    run = recipe.folder
    reads = what_it_reads(step, recipe, stamps)
    record = read_record(run.steps, step.verb)
    if record is None:
        return Check(None, (NOT_DONE,), reads)
    if record.inputs != fingerprint(reads):
        return Check(None, tuple(describe(record.knobs, reads)), reads)
    if not is_intact(run.root, record):
        return Check(None, ("what it made is missing or was changed",), reads)
    return Check(record, (), reads)


def perform(
    step: Step,
    recipe: Recipe,
    do: Callable[[], VerbOutcome],
    stamps: Stamps,
    *,
    again: bool = False,
) -> PipelineStepRecord:
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
        record = PipelineStepRecord(
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


def what_it_reads(step: Step, recipe: Recipe, stamps: Stamps) -> dict[str, Any]:
    """Everything that decides what `step` makes; its fingerprint is `StepRecord.inputs`."""
    reads: dict[str, Any] = {"verb": step.verb, "knobs": step.knobs(recipe)}
    for verb in step.after(recipe):
        record = read_record(recipe.folder.steps, verb)
        reads[f"from {verb}"] = record.outputs if record else None
    if folders := step.folders(recipe):
        reads["folders"] = {folder: _stamped(folder) for folder in folders}
    if step.verb in stamps:
        reads["outside"] = stamps[step.verb](recipe)
    reads |= {"ingot": ingot.__version__, "revision": step.revision}
    # As the record will have it after a trip through its file, so that the two compare equal.
    plain: dict[str, Any] = json.loads(canonical_json(reads))
    return plain


def _stamped(folder: str) -> str:
    try:
        return fingerprint([stamp(file) for file in find_files(folder)])
    except IngotError:
        raise
    except Exception as error:  # each storage client raises its own kinds
        if not is_remote(folder):
            raise
        raise Failed(
            f"{folder} cannot be reached ({type(error).__name__}: {error}); check the network and"
            " your credentials"
        ) from error


def describe(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What differs between two `what_it_reads`, in words."""
    found = changes(old.get("knobs", {}), new["knobs"])
    for key in sorted((old.keys() | new.keys()) - {"knobs", "verb"}):
        if old.get(key) == new.get(key):
            continue
        if key.startswith("from "):
            found.append(f"{key.removeprefix('from ')} made something else")
        elif key == "folders":
            found += [
                f"{folder} changed"
                for folder in new.get(key) or {}
                if (old.get(key) or {}).get(folder) != new[key][folder]
            ]
        elif key == "outside":
            found += _outside(old.get(key), new.get(key))
        else:
            found.append(
                f"{'its code' if key == 'revision' else key} {old.get(key)} -> {new.get(key)}"
            )
    return found or ["its record is of another version"]


def _outside(old: Any, new: Any) -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            f"{key} changed"
            for key in sorted(old.keys() | new.keys())
            if old.get(key) != new.get(key)
        ]
    return [f"{old} -> {new}"]


def refuse_stale_data(step: Step, recipe: Recipe) -> None:
    """Before a single verb: data that was made with other knobs than the recipe's must not be used
    unseen.

    Only knobs are compared: a source that has moved since does not spoil what was made from it.
    Steps after the data (a model trained otherwise, say) are pointed out and not refused.

    Raises:
        WrongInput: names the knob, both values, and the command that makes the data anew.
    """
    for item in before(step, recipe):
        record = read_record(recipe.folder.steps, item.verb)
        if record is None or not (
            changed := changes(record.knobs.get("knobs", {}), item.knobs(recipe))
        ):
            continue
        if item.verb in DATA:
            raise WrongInput(
                f"{recipe.folder.root} holds what `{item.verb}` made with another recipe"
                f" ({'; '.join(changed)}); run `ingot {item.verb}` again, or `ingot run`"
            )
        say(f"note: `{item.verb}` was done with another recipe ({'; '.join(changed)})")
