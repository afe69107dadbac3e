"""Checks that sources and evaluation items exist, and that their first records have the columns
that the recipe needs. A part of `check.py`; no torch.

Remote sources (`hf:`, `gs://`) are read by child processes, all concurrently, which are killed
after a time limit: run as a program, this module checks one such source and writes the result as
JSON.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Collection
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ingot.base.errors import IngotError, WrongInput
from ingot.base.processes import own_python
from ingot.base.remote.service import EMULATOR
from ingot.base.storage import is_remote, open_read
from ingot.config.models.source import (
    ADAPTER,
    ModelKind,
    kind_of,
    kind_that_reads,
    model_config,
    named_config,
    trained_kind,
)
from ingot.config.recipe import NO_SOURCE, Recipe
from ingot.config.sections.data import SourceSettings
from ingot.config.sections.evaluation import LossTask, TaskSettings
from ingot.config.sections.measured import why_not_compressed
from ingot.config.values import Findings
from ingot.data.documents.kinds import DocumentExtractor
from ingot.data.documents.records import BadRecord
from ingot.data.sources.find import find_source, is_local, recipe_sources, records_of
from ingot.data.sources.hub import revision_of
from ingot.data.sources.readers import parse_file
from ingot.data.sources.records import read_records
from ingot.data.sources.source_file import SourceFile

LOOKED_AT = 100
"""Records read from each source: if none of so many has the columns, their names are wrong."""
UNREAD = ("wikipedia", "bigquery")
"""Schemes of sources whose records are only read by `ingest`."""
LOOK_S, REACH_S = 10.0, 1.0
"""Time limits in seconds: for all remote sources together, and for one connection to a bucket's
service.
"""
GOOGLE = "https://storage.googleapis.com"


class FarSources:
    """Checks of remote sources, each in a child process that `look` starts.

    Args:
        asked: False if no service may be queried, as in a dry run.
    """

    def __init__(self, *, asked: bool = True) -> None:
        self.asked = asked
        self._began = time.monotonic()
        self._started: list[tuple[subprocess.Popen[str], str, str]] = []

    def look(self, place: str, at: str, **asked: Any) -> None:
        """Start checking the source `place`, which the knob `at` names."""
        process = subprocess.Popen(
            [*own_python(), "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps(asked))
        process.stdin.close()
        process.stdin = None
        self._started.append((process, place, at))

    def finish(self, found: Findings) -> None:
        """Record the results; a check without a result at the time limit is killed."""
        for process, source, knob in self._started:
            left = max(0.1, LOOK_S - (time.monotonic() - self._began))
            try:
                said = json.loads(process.communicate(timeout=left)[0] or "null")
            except (subprocess.TimeoutExpired, ValueError):
                said = None
            finally:
                process.kill()
                process.wait()
            if said is None:
                found.skip(f"the records of {source}: none came within {LOOK_S:g} s", knob)
            elif "wrong" in said:
                found.add(said["wrong"], knob)
            elif "unknown" in said:
                found.skip(f"the records of {source}: {said['unknown']}", knob)


def check_sources(recipe: Recipe, found: Findings, far: FarSources) -> None:
    """Check that sources exist, and that their first records have the columns."""
    if not recipe.data.train:
        found.add(NO_SOURCE, "data.train")
    for split, sources in recipe_sources(recipe).items():
        for number, source in enumerate(sources):
            knob = f"data.{split}.{number}.source"
            if _reached(source, knob, found, far):
                how = {"documents": recipe.documents, "labels": recipe.labels, "knob": knob}
                far.look(source.source, knob, settings=source.model_dump(), **how)
            elif _is_near(source):
                found.ask(_look, source, recipe, knob, at=knob)


def _is_near(source: SourceSettings) -> bool:
    return source.scheme not in ("hf", *UNREAD) and not is_remote(source.source)


def _reached(source: SourceSettings, knob: str, found: Findings, far: FarSources) -> bool:
    """Whether a remote source can be checked; if not, the reason is recorded."""
    if _is_near(source):
        return False
    name = source.source
    if source.scheme in UNREAD:
        found.skip(f"{name} lies elsewhere and is read when it is used", knob)
    elif not far.asked:
        found.skip(f"{name} lies elsewhere, and a dry run asks nobody", knob)
    elif source.scheme == "hf":
        if found.ask(revision_of, name.split(":")[1], knob, at=knob):
            if importlib.util.find_spec("datasets") is not None:
                return True
            found.skip(f"the records of {name}, since `datasets` is not installed here", knob)
    elif name.startswith(("gs://", "gcs://")) and not _answers(os.environ.get(EMULATOR) or GOOGLE):
        found.skip(f"{name} lies elsewhere, and the service cannot be reached from here", knob)
    else:
        return True
    return False


def _answers(address: str) -> bool:
    parts = urlsplit(address if "://" in address else f"http://{address}")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname or "", port), timeout=REACH_S).close()
    except (OSError, ValueError):
        return False
    return True


def _look(source: SourceSettings, recipe: Recipe, knob: str) -> None:
    files = find_source(source, knob, tell=lambda _: None)  # which ingest tells
    if is_local(source):
        extractor = DocumentExtractor.for_source(source, recipe.documents, recipe.labels)
        look_into(files[0], extractor)


def look_into(file: SourceFile, extractor: DocumentExtractor) -> None:
    """Raises WrongInput if none of the first records of a file has the columns for a document."""
    if file.format == "megatron":
        return
    bad: BadRecord | None = None
    with ExitStack() as stack:
        kind = records_of(file)
        items = (
            kind.read(file, extractor)
            if kind is not None
            else parse_file(
                stack.enter_context(open_read(file.path)), file.path, file.format, extractor
            )
        )
        for item in itertools.islice(items, LOOKED_AT):
            if not isinstance(item, BadRecord):
                return
            bad = bad or item
    if bad is not None and bad.keys:
        raise extractor.missing_error(f"{file.path}:{bad.row}", bad.keys)


def check_tasks(recipe: Recipe, verbs: Collection[str], found: Findings) -> None:
    """Check that each task can be measured on the recipe's documents and on the model that it
    trains; on another one (`evaluate.model`) as far as the documents tell.
    """
    trained = trained_kind(recipe)
    for number, task in enumerate(recipe.tasks):
        kinds: list[str | None] = []
        if "train" in verbs and task.name in recipe.train.evaluate_tasks:
            kinds.append(trained)
        if "evaluate" in verbs:
            kinds.append(trained if recipe.evaluate.model is None else None)
        for kind in kinds:
            if problem := task.why_not(recipe.objective, kind):
                found.add(f"evaluate.tasks, {task.name}: {problem}", f"evaluate.tasks.{number}")


def check_evaluated(recipe: Recipe, source: str, found: Findings) -> None:
    """Check that `evaluate.model` is a model, of a kind that each task can measure. The kind of an
    adapter is seen when it is measured: its base may have to be fetched.
    """
    kind = found.ask(_kind_named, source, at="evaluate.model")
    if kind is None:
        return
    if recipe.evaluate.prompts and kind not in ("decoder", "seq2seq"):
        found.add(
            f"evaluate.prompts are for models that write, and evaluate.model {source} is of kind"
            f" {kind}; remove them, or give another model"
        )
    for number, task in enumerate(recipe.tasks):
        reads = kind == kind_that_reads(recipe) or not isinstance(task, LossTask)
        # What is wrong with the documents is told of every model.
        misfit = task.why_not(recipe.objective, kind) and not task.why_not(recipe.objective, None)
        if misfit or not reads:
            found.add(
                f"evaluate.tasks, {task.name}: {task.kind}, as it is set here, cannot be measured"
                f" on evaluate.model {source}, which is of kind {kind}; change or remove the task,"
                " or give another model",
                f"evaluate.tasks.{number}",
            )


def _kind_named(source: str) -> ModelKind | None:
    folder = named_config(source, "evaluate.model", adapters=True)
    return None if (folder / ADAPTER).is_file() else kind_of(model_config(folder))


def check_evaluation(recipe: Recipe, found: Findings, far: FarSources, *, here: bool) -> None:
    """Check each task's items and package."""
    on_this_machine = here and recipe.at("evaluate").launch.kind == "local"
    for number, task in enumerate(recipe.tasks):
        knob = f"evaluate.tasks.{number}"
        if task.package is not None and on_this_machine:
            module, get_it = task.package
            if importlib.util.find_spec(module) is None:
                found.add(
                    f"evaluate.tasks, {task.name}: {task.kind} needs {module}, which is not"
                    f" installed; {get_it}",
                    knob,
                )
        if problem := why_not_compressed(task.baseline_names, recipe.data.held_out_columns):
            found.add(problem, knob)
        for source in task.sources:
            _check_items(task, source, knob, found, far)


def _check_items(
    task: TaskSettings, source: str, knob: str, found: Findings, far: FarSources
) -> None:
    """Check that the items of a task exist and that the first has the columns."""
    split = str(getattr(task, "split", "validation"))
    settings = SourceSettings(source=source, split=split)
    place, names = f"evaluate.tasks, {task.name}.source", getattr(task, "columns", None)
    if not _is_near(settings):
        if _reached(settings, f"{knob}.source", found, far) and task.item_columns:
            columns = {"columns": task.item_columns, "names": names, "split": split}
            far.look(source, f"{knob}.source", source=source, knob=place, **columns)
    elif not task.item_columns:
        if not settings.scheme and not Path(source).exists():
            found.add(f"evaluate.tasks, {task.name}: {source} does not exist; check the path", knob)
    else:
        first = partial(read_records, names=names, split=split, limit=1)
        found.ask(first, source, place, task.item_columns, at=f"{knob}.source")


def _look_far(asked: dict[str, Any]) -> None:
    """Check one source with the arguments of `FarSources.look`. Raises whatever reading it
    raises.
    """
    if "columns" in asked:
        columns, names, split = asked["columns"], asked["names"], asked["split"]
        read_records(asked["source"], asked["knob"], columns, names=names, split=split, limit=1)
        return
    source = SourceSettings.model_validate(asked["settings"])
    extractor = DocumentExtractor.for_source(source, asked["documents"], asked["labels"])
    look_into(find_source(source, asked["knob"])[0], extractor)


def _main() -> None:
    said = {}
    try:
        _look_far(json.load(sys.stdin))
    except WrongInput as error:
        said = {"wrong": str(error)}
    except IngotError as error:
        said = {"unknown": str(error)}
    except Exception as error:  # a client may raise anything for its connection
        said = {"unknown": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    print(json.dumps(said), flush=True)
    os._exit(0)  # a client's threads may still be running


if __name__ == "__main__":
    _main()
