"""What can be known before the first step is checked before it: model, layout, sources and their
columns, tokenizer, evaluations, gate, places, server and disk, all findings at once, each with the
line of the recipe that it comes from.

Nothing large is read and torch is not imported. What would need a service that does not answer is
listed as not checked, never passed in silence.
"""

from __future__ import annotations

import importlib.util
import itertools
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from ingot.base.errors import WrongInput
from ingot.base.processes import python_with_module
from ingot.base.progress import say
from ingot.base.reports import read_record
from ingot.base.storage import is_remote, open_read
from ingot.cli.check_training import (
    check_model,
    check_other_model,
    check_tokenizer_fits,
    check_training,
    need,
)
from ingot.config.model_source import KIND_FOR_DOCUMENTS
from ingot.config.recipe import NO_SOURCE, Recipe
from ingot.config.sections.data import SourceSettings
from ingot.config.sections.evaluation import TaskSettings
from ingot.config.values import Findings, Values
from ingot.data.documents.kinds import DocumentExtractor
from ingot.data.documents.records import BadRecord
from ingot.data.sources.find import find_source, is_local, recipe_sources, records_of
from ingot.data.sources.hub import revision_of
from ingot.data.sources.readers import parse_file
from ingot.data.sources.records import read_records
from ingot.data.sources.source_file import SourceFile
from ingot.launch.job import launcher_of
from ingot.launch.run_job import job_of
from ingot.launch.staging import unreachable_inputs
from ingot.pipeline.plan import VERBS as SUBMITTED
from ingot.pipeline.plan import submission_problems
from ingot.pipeline.steps import STEPS, step_named

ALL = tuple(step.verb for step in STEPS)
LOOKED_AT = 100
"""Records of each source that are read: so many without the columns, and none with them, are wrong
names of columns.
"""
ELSEWHERE = ("hf", "wikipedia", "bigquery")
"""Schemes of sources that lie elsewhere, whose records are read when they are ingested."""


def findings(
    recipe: Recipe, values: Values, verbs: Sequence[str] = ALL, *, submitted: bool = False
) -> Findings:
    """Everything that can be told of `verbs` now. `submitted`: as a pipeline of Vertex AI, whose
    steps run on machines of their own.
    """
    found = Findings(values)
    here = not submitted
    for verb in verbs:
        for message, knob in recipe.missing_held_out(verb):
            found.add(message, knob)
    if {"ingest", "prepare"} & set(verbs) and read_record(recipe.folder.steps, "ingest") is None:
        _check_sources(recipe, found)
    model = check_model(recipe, found) if {"prepare", "train"} & set(verbs) else None
    if "prepare" in verbs:
        check_tokenizer_fits(recipe, model, found)
        if here:
            _check_cleaning(recipe, found)
    if "train" in verbs:
        check_training(recipe, model, found, here=here)
    if "evaluate" in verbs:
        _check_evaluation(recipe, found, here=here)
    if "gate" in verbs:
        _check_gate(recipe, found)
    if {"serve", "deploy", "register"} & set(verbs):
        _check_serving(recipe, found, here=here)
    if submitted:
        for problem in submission_problems(recipe):
            found.add(problem)
    else:
        _check_places(recipe, verbs, found)
    found.wrong = list(dict.fromkeys(found.wrong))
    return found


def check(
    recipe: Recipe,
    values: Values,
    verbs: Sequence[str] = ALL,
    *,
    submitted: bool = False,
    dry_run: bool = False,
) -> list[str]:
    """Say what cannot be checked, and refuse what is wrong; with `dry_run` only return it.

    Raises:
        WrongInput: everything that is wrong, a line each.
    """
    found = findings(recipe, values, verbs, submitted=submitted)
    for line in dict.fromkeys(found.unknown):
        say(f"not checked: {line}")
    if found.wrong and not dry_run:
        raise WrongInput("\n".join(found.wrong))
    return found.wrong


def _check_sources(recipe: Recipe, found: Findings) -> None:
    """Whether sources are there, and the first records of each file have the columns."""
    if not recipe.data.train:
        found.add(NO_SOURCE, "data.train")
    for split, sources in recipe_sources(recipe).items():
        for number, source in enumerate(sources):
            knob = f"data.{split}.{number}.source"
            if source.scheme == "hf" and not found.ask(
                revision_of, source.source.split(":")[1], knob, at=knob
            ):
                continue
            if source.scheme in ELSEWHERE or is_remote(source.source):
                found.skip(f"{source.source} lies elsewhere and is read by `ingot ingest`", knob)
                continue
            files = found.ask(find_source, source, knob, at=knob)
            if files and is_local(source):
                extractor = DocumentExtractor.for_source(source, recipe.documents, recipe.labels)
                found.ask(_look_into, files[0], extractor, at=knob)


def _look_into(file: SourceFile, extractor: DocumentExtractor) -> None:
    """Raises WrongInput where none of the first records of a file has what a document needs."""
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


def _check_cleaning(recipe: Recipe, found: Findings) -> None:
    """What cleaning and the engine need on this machine."""
    engine = recipe.data.engine
    if recipe.data.clean.languages:
        need(found, "py3langid", "data.clean.languages", "pip install 'ingot[languages]'")
    if recipe.at("prepare").launch.kind != "local":
        return
    if engine.kind == "spark":
        need(found, "pyspark", "data.engine.kind spark", "pip install 'ingot[spark]'")
        if shutil.which("java") is None:
            found.add("data.engine.kind spark needs Java; apt install openjdk-17-jre-headless")
    if engine.kind == "beam" and engine.python is None:
        need(found, "apache_beam", "data.engine.kind beam", "run `make beam`")


def _check_evaluation(recipe: Recipe, found: Findings, *, here: bool) -> None:
    """The model that is evaluated, and for each task its items, its package and its kind of
    model.
    """
    given = recipe.evaluate.model
    if given is not None:
        found.ask(check_other_model, given, "evaluate.model")
    kind = KIND_FOR_DOCUMENTS[recipe.documents]
    on_this_machine = here and recipe.at("evaluate").launch.kind == "local"
    for number, task in enumerate(recipe.tasks):
        knob = f"evaluate.tasks.{number}"
        if task.model_kinds and kind not in task.model_kinds and given is None:
            found.add(
                f"evaluate.tasks, {task.name}: {task.kind} is for {' or '.join(task.model_kinds)}"
                f" models, and objective.kind {recipe.objective.kind} trains one of kind {kind};"
                " remove the task",
                knob,
            )
        if task.package is not None and on_this_machine:
            module, get_it = task.package
            if importlib.util.find_spec(module) is None:
                found.add(
                    f"evaluate.tasks, {task.name}: {task.kind} needs {module}, which is not"
                    f" installed; {get_it}",
                    knob,
                )
        for source in task.sources:
            _check_items(task, source, knob, found)


def _check_items(task: TaskSettings, source: str, knob: str, found: Findings) -> None:
    """Whether the items of a task are there and the first has the columns."""
    split = str(getattr(task, "split", "validation"))
    settings = SourceSettings(source=source, split=split)
    if settings.scheme in ELSEWHERE or is_remote(source):
        found.skip(f"{source} lies elsewhere and is read by `ingot evaluate`", f"{knob}.source")
    elif not task.item_columns:
        if not settings.scheme and not Path(source).exists():
            found.add(f"evaluate.tasks, {task.name}: {source} does not exist; check the path", knob)
    else:
        place, names = f"evaluate.tasks, {task.name}.source", getattr(task, "columns", None)
        first = partial(read_records, names=names, split=split, limit=1)
        found.ask(first, source, place, task.item_columns, at=f"{knob}.source")


def _check_gate(recipe: Recipe, found: Findings) -> None:
    """Whether some task gives what the gate reads."""
    if recipe.gate.override is not None:
        return
    names = [task.name for task in recipe.tasks]
    for metric in recipe.gate.metrics(recipe.documents):
        task, slash, _ = metric.partition("/")
        if not slash or task in names:
            continue
        if not recipe.data.holds_out and task in ("loss", "classification"):
            found.add(
                f"gate.metric {metric} needs held-out documents, and data.validation holds none"
                f" out; hold some out, set gate.metric to what evaluate.tasks measure, or set"
                " gate.override"
            )
        else:
            found.add(
                f"gate.metric {metric} is measured by none of evaluate.tasks ({', '.join(names)});"
                f" add a task called {task}, or set gate.metric"
            )


def _check_serving(recipe: Recipe, found: Findings, *, here: bool) -> None:
    """What answers, here or behind an endpoint."""
    if recipe.registry.kind == "vertex":
        from ingot.registry.vertexai.resources import container_of, machine_resources

        found.ask(container_of, recipe)
        found.ask(machine_resources, recipe)
    elif here and recipe.serve.engine in ("vllm", "triton"):
        module = "vllm" if recipe.serve.engine == "vllm" else "ingot"
        found.ask(python_with_module, recipe.serve.python, module, at="serve.engine")


def _check_places(recipe: Recipe, verbs: Sequence[str], found: Findings) -> None:
    """Whether the place of each step can do it."""
    for verb in verbs:
        if verb not in SUBMITTED or verb == "deploy":
            continue
        placed, step = recipe.at(verb), step_named(verb)
        elsewhere = step.distributed or verb in recipe.pipeline.steps or len(verbs) == 1
        if placed.launch.kind == "local":
            if step.distributed and placed.launch.nodes > 1:
                found.add(
                    f"launch.nodes={placed.launch.nodes} and launch.kind=local, which is this"
                    " machine alone; set launch.kind to where the others are"
                )
        elif elsewhere:
            found.ask(_check_place, placed, verb, found)


def _check_place(recipe: Recipe, verb: str, found: Findings) -> None:
    job = job_of(recipe, verb, distributed=step_named(verb).distributed)
    reasons = launcher_of(recipe).can(job)
    if job.run_folder_url is not None:
        reasons += unreachable_inputs(recipe, verb)
    for reason in dict.fromkeys(reasons):
        found.add(reason)
