"""Runs a pipeline step unless its record shows that nothing changed.

A step's inputs (knobs, outputs of earlier steps, external files, versions) are fingerprinted and
compared with the record of its last run. Every verb goes through `run_step`, whether typed alone or
started by `ingot run`, so that each sees what the other did.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import ingot
from ingot.base.environment import ranks
from ingot.base.errors import Failed, IngotError, Stopped, WrongInput, differing
from ingot.base.listing import find_files, is_hidden
from ingot.base.markers import fingerprint
from ingot.base.masking import keys_hidden, knobs_hidden
from ingot.base.progress import say
from ingot.base.reports import (
    FormerRecord,
    PipelineStepRecord,
    VerbOutcome,
    begin_record,
    did_not_end,
    is_intact,
    put_back,
    read_record,
    write_record,
)
from ingot.base.runfolder import RunFolder, check_no_other_run, folder_lock
from ingot.base.runlog import record_event
from ingot.base.storage import is_remote, stamp, write_atomic
from ingot.config.identity import changes
from ingot.config.load import dump_recipe
from ingot.config.models.lineage import earlier_model
from ingot.config.recipe import Recipe
from ingot.pipeline.origin import is_of_unfinished, tell_origin
from ingot.pipeline.steps import PipelineStep, upstream_steps
from ingot.report.living import keep_page, renew_page, show_page

DATA_STEPS = ("ingest", "prepare")
NOT_DONE = "not done yet"
LAST_PAGE_S = 10.0
"""How long a training that is over waits for a page of it that is still being written."""

ExternalStamps = Mapping[str, Callable[[Recipe], Mapping[str, Any]]]
"""Verb -> a function that names what the verb reads outside the run folder (source files, the live
model), each with a value that changes when it does. The command line passes these in, because this
package may not import the packages that compute them.
"""


class StepFailed(IngotError):
    """A step's command failed or was stopped, and printed its own message. The exit code is the
    command's.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class StepCheck:
    """The result of `check_step`: `record` is the step's record when nothing changed; otherwise it
    is None and `reasons` say why the step must run.
    """

    record: PipelineStepRecord | None
    reasons: tuple[str, ...]
    reads: dict[str, Any]
    """Everything the step reads: knobs, inputs, stamps, versions. Stored in its record."""


def check_step(step: PipelineStep, recipe: Recipe, stamps: ExternalStamps) -> StepCheck:
    """Compare `step` with its record. Only records and file sizes are read, no data."""
    run = recipe.folder
    record = read_record(run.steps, step.verb)
    reads = step_inputs(step, recipe, stamps, record)
    if record is None:
        return StepCheck(None, (NOT_DONE,), reads)
    if record.inputs != fingerprint(reads):
        return StepCheck(None, tuple(describe_changes(record.knobs, reads)), reads)
    if not is_intact(run.root, record):
        return StepCheck(None, ("what it made is missing or was changed",), reads)
    return StepCheck(record, (), reads)


def keeps_data(step: PipelineStep, recipe: Recipe, found: StepCheck) -> PipelineStepRecord | None:
    """The record of a data step that is left as it is though what it read outside the run folder
    changed since, or ingot did: an unfinished training can only go on with the data that it began
    with, and these are its own.
    """
    run = recipe.folder
    record = read_record(run.steps, step.verb) if step.verb in DATA_STEPS else None
    if record is None or not is_intact(run.root, record):
        return None
    same = all(
        record.knobs.get(key) == found.reads.get(key)
        for key in (record.knobs.keys() | found.reads.keys()) - {"outside", "folders", "ingot"}
    )
    return record if same and is_of_unfinished(run, record) else None


def run_step(
    step: PipelineStep,
    recipe: Recipe,
    work: Callable[[], VerbOutcome],
    stamps: ExternalStamps,
    *,
    again: bool = False,
) -> PipelineStepRecord:
    """Run `step` by calling `work`, unless its record shows that nothing changed; `again` runs it
    anyway.

    Under torchrun every rank calls this. All ranks reach the same answer from the same files; only
    rank 0 writes.

    Raises:
        Failed: another process holds the lock of this run folder, or does all steps in it.
        WrongInput: the data it depends on was made with other knobs, or the model that it is about
            by an earlier training.
    """
    run, is_main = recipe.folder, ranks().is_main
    if is_main:
        check_no_other_run(run.root)
    with folder_lock(run.root) if is_main else contextlib.nullcontext():
        found = check_step(step, recipe, stamps)
        check_data_is_current(step, recipe)
        _check_model_is_current(step, recipe)
        if found.record is not None and not again:
            if is_main:
                say(f"{step.verb}: unchanged, {found.record.result}")
                tell_origin(step, recipe)
                renew_page(run, run.steps / f"{step.verb}.json")
            return found.record
        former = FormerRecord.of(run, step.verb) if is_main else None
        if is_main:
            if found.reasons and found.reasons != (NOT_DONE,):
                say(f"{step.verb}: again, because {'; '.join(found.reasons)}")
            write_atomic(run.recipe, dump_recipe(recipe))
            begin_record(run.steps, step.verb)
        with page_kept(run, step.verb) if is_main else contextlib.nullcontext():
            return _recorded(step, recipe, work, found, former)


@contextlib.contextmanager
def page_kept(run: RunFolder, verb: str) -> Iterator[None]:
    """While entered, the page of the run says that `verb` is at work, and shows a training as it
    goes; afterwards it says how that ended.
    """
    over = threading.Event()
    page = threading.Thread(target=keep_page, args=(run, verb, over), daemon=True)
    # Only training is long and logs as it goes. Other verbs fork, which no thread should live to
    # see.
    if verb == "train":
        page.start()
    else:
        show_page(run, verb)
    try:
        yield
    finally:
        over.set()
        if verb == "train":
            page.join(LAST_PAGE_S)
        if not page.is_alive():  # else the verb would wait here for what that waits for
            show_page(run)


def _recorded(
    step: PipelineStep,
    recipe: Recipe,
    work: Callable[[], VerbOutcome],
    found: StepCheck,
    former: FormerRecord | None,
) -> PipelineStepRecord:
    """Do the work and keep its record."""
    is_main, began = ranks().is_main, time.monotonic()
    with _recording_failure(step, recipe, former) if is_main else contextlib.nullcontext():
        outcome = work()
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
        outcome.parts,
    )
    if is_main:
        write_record(recipe.folder.steps, record)
    return record


@contextlib.contextmanager
def _recording_failure(
    step: PipelineStep, recipe: Recipe, former: FormerRecord | None
) -> Iterator[None]:
    """Record a failure in `events.jsonl`, where reports look for it."""
    try:
        yield
    except Stopped:
        raise
    except Exception as error:
        cause = str(error) if isinstance(error, IngotError) else f"{type(error).__name__}: {error}"
        with contextlib.suppress(OSError, IngotError):
            record_event(recipe.folder.events, "failure", cause=f"{step.verb}: {cause}")
            if isinstance(error, WrongInput):  # others are tried again, and must not find it done
                put_back(former)
        raise


def step_inputs(
    step: PipelineStep,
    recipe: Recipe,
    stamps: ExternalStamps,
    last: PipelineStepRecord | None = None,
) -> dict[str, Any]:
    """Everything that determines the output of `step`; its fingerprint is
    `PipelineStepRecord.inputs`. `last`, the record of its last run, answers for what cannot be
    asked now.
    """
    reads: dict[str, Any] = {"verb": step.verb, "knobs": knobs_hidden(step.knobs(recipe))}
    parts = step.parts(recipe)
    for verb in step.after(recipe):
        record = read_record(recipe.folder.steps, verb)
        reads[f"from {verb}"] = record.of(parts.get(verb, ())) if record else None
    if folders := step.folders(recipe):
        known = {} if last is None else last.knobs.get("folders", {})
        reads["folders"] = {
            folder: _or_as_read(
                step, partial(_folder_stamp, folder), known.get(keys_hidden(folder))
            )
            for folder in folders
        }
    reads["ingot"] = ingot.__version__
    if step.verb in stamps:
        known = None
        if last is not None and "outside" in last.knobs and _data_stands(step, recipe, last, reads):
            # With the version that read it: this one cannot read what does not answer.
            known = {key: last.knobs.get(key) for key in ("outside", "ingot")}
        reads |= _or_as_read(step, lambda: {"outside": stamps[step.verb](recipe)}, known)
    return _as_stored(reads)


def _as_stored(reads: dict[str, Any]) -> dict[str, Any]:
    """Through JSON, as the stored record goes, so that the two compare equal; keys and logins in
    addresses are not stored.
    """
    plain = json.loads(json.dumps(reads, sort_keys=True, allow_nan=False))
    stored: dict[str, Any] = keys_hidden(plain)
    return stored


def _data_stands(
    step: PipelineStep, recipe: Recipe, record: PipelineStepRecord, reads: dict[str, Any]
) -> bool:
    """Whether documents of these knobs were read before, completely, and are still there."""
    return (
        step.verb in DATA_STEPS
        and record.knobs.get("knobs") == _as_stored(reads)["knobs"]
        and is_intact(recipe.folder.root, record)
    )


def _or_as_read(step: PipelineStep, ask: Callable[[], Any], known: Any) -> Any:
    """The result of `ask`; if the source cannot be asked now, its stamp `known` from the last run,
    whose output is a copy and still valid.
    """
    try:
        return ask()
    except IngotError as error:
        if known is None:
            raise
        say(f"{step.verb}: {str(error).partition('; ')[0]}; what was read of it before is used")
        return known


def _folder_stamp(folder: str) -> str:
    """Of what is not hidden in it, as Finder's `.DS_Store` is."""
    try:
        files = find_files(folder)
        if not files and is_remote(folder):
            raise Failed(f"{folder} is empty or does not answer; check the address")
        return fingerprint([stamp(file) for file in files if not is_hidden(file, folder)])
    except IngotError:
        raise
    except Exception as error:  # each storage client has exceptions of its own
        if not is_remote(folder):
            raise
        raise Failed(
            f"{folder} cannot be reached ({type(error).__name__}: {error}); check the network and"
            " your credentials"
        ) from error


def describe_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The differences between two results of `step_inputs`, as phrases for the user."""
    found = changes(old.get("knobs", {}), new["knobs"])
    for key in sorted((old.keys() | new.keys()) - {"knobs", "verb"}):
        if old.get(key) == new.get(key):
            continue
        if key.startswith("from "):
            found.append(f"{key.removeprefix('from ')} made something else")
        elif key in ("folders", "outside"):
            found += _stamp_changes(old.get(key, {}), new.get(key, {}))
        else:
            found.append(f"{key} {' -> '.join(differing(old.get(key), new.get(key)))}")
    return found or ["its record is damaged"]


def _stamp_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """A phrase for each source that changed, is new, or is no longer read. Of a new one and of one
    that is no longer read, nobody knows whether they changed.
    """
    return [
        f"its record says nothing of {name}"
        if name not in old
        else f"{name} is no longer read"
        if name not in new
        else f"{name} changed"
        for name in sorted(old.keys() | new.keys())
        if name not in old or name not in new or old[name] != new[name]
    ]


def check_data_is_current(step: PipelineStep, recipe: Recipe) -> None:
    """Refuse to run a single verb on data that was made with other knobs than the recipe's, or by a
    verb that did not end, and to call it unchanged: its own knobs may be, those of the data are not
    among them.

    Only knobs are compared: a source that changed later does not invalidate what was made from it.

    Raises:
        WrongInput: names the knob, both values, and the command that rebuilds the data.
    """
    run = recipe.folder
    for item in upstream_steps(step, recipe):
        if item.verb not in DATA_STEPS:
            continue
        if did_not_end(run.steps, item.verb):
            raise WrongInput(
                f"`{item.verb}` was begun in {run.root} and did not end, so what it holds may be of"
                f" another recipe; run `ingot {item.verb}` again, or `ingot run`"
            )
        if changed := _changed_since(item, recipe):
            raise WrongInput(
                f"{run.root} holds what `{item.verb}` made with another recipe"
                f" ({'; '.join(changed)}); run `ingot {item.verb}` again, or `ingot run`"
            )


def _check_model_is_current(step: PipelineStep, recipe: Recipe) -> None:
    """Refuse to decide about or to register the model of an earlier training where this recipe's
    did not end. Otherwise a note says so, and that a step was done with another recipe.

    Raises:
        WrongInput: says what the model is, and the commands that go on.
    """
    run = recipe.folder
    for item in upstream_steps(step, recipe):
        if item.verb in DATA_STEPS:
            continue
        if item.verb in ("evaluate", "gate") and did_not_end(run.steps, item.verb):
            raise WrongInput(
                f"`{item.verb}` was begun in {run.root} and did not end, so its report may be of"
                f" another recipe; run `ingot {item.verb}` again, or `ingot run`"
            )
        if changed := _changed_since(item, recipe):
            say(f"note: `{item.verb}` was done with another recipe ({'; '.join(changed)})")
        of_run = item.verb == "train" and recipe.evaluate.model is None
        if of_run and (told := earlier_model(run)):
            if step.verb in ("gate", "register"):
                raise WrongInput(
                    f"{told}; run `ingot train` to its end, or set evaluate.model={run.model} if"
                    " you mean that model"
                )
            say(f"note: {told}")


def _changed_since(step: PipelineStep, recipe: Recipe) -> list[str]:
    """How the knobs of `step` differ from those that it was last done with."""
    record = read_record(recipe.folder.steps, step.verb)
    if record is None:
        return []
    return changes(knobs_hidden(record.knobs.get("knobs", {})), knobs_hidden(step.knobs(recipe)))
