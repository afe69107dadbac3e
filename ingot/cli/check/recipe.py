"""Checks everything that can be known before the first step: model, layout, sources and their
columns, tokenizer, evaluations, gate, places, server and disk. Reports all findings at once, each
with its line of the recipe.

Nothing large is read and torch is not imported. Checks that need a service which does not answer
are reported as not checked, never passed silently.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any

from ingot.base.environment import install_command
from ingot.base.errors import WrongInput
from ingot.base.processes import python_with_module
from ingot.base.progress import say
from ingot.base.reports import read_record
from ingot.cli.check.sources import (
    FarSources,
    check_evaluated,
    check_evaluation,
    check_sources,
    check_tasks,
)
from ingot.cli.check.training import (
    check_model,
    check_tokenizer_fits,
    check_training,
    need,
)
from ingot.cli.installed import java, java_wanted
from ingot.config.load import RecipeErrors, read_with_origins, without_errors
from ingot.config.recipe import Recipe
from ingot.config.sections.data import SourceSettings
from ingot.config.sections.measured import is_measured, is_tail, metrics_of
from ingot.config.sections.rewards import RewardSettings
from ingot.config.values import Findings, Values
from ingot.data.sources.find import find_source, recipe_sources
from ingot.evaluate.sources import source_names
from ingot.launch.job import launcher_of
from ingot.launch.run_job import job_of
from ingot.launch.staging import unreachable_inputs
from ingot.pipeline.incremental import check_data_is_current
from ingot.pipeline.plan import VERBS as SUBMITTED
from ingot.pipeline.plan import submission_problems
from ingot.pipeline.steps import STEPS, step_named
from ingot.rewards.build import check_rewards

ALL = tuple(step.verb for step in STEPS)


READS: dict[str, tuple[str, ...]] = {
    "held out": ("data", "train", "checkpoint", "evaluate"),
    "sources": ("data", "objective", "output", "name"),
    "model": ("model", "objective", "data"),
    "tokenizer": ("model", "objective", "data", "tokenizer"),
    "cleaning": ("data", "launch", "pipeline"),
    "prepared": ("model", "objective", "data", "tokenizer", "output", "name"),
    "training": ("model", "objective", "data", "train", "parallel", "launch", "pipeline"),
    "rewards": ("objective", "evaluate", "launch", "pipeline"),
    "evaluated": ("evaluate", "objective", "data"),
    "measured": ("evaluate", "objective", "data", "train"),
    "tasks": ("evaluate", "objective", "data", "launch", "pipeline"),
    "gate": ("gate", "evaluate", "objective", "data"),
    "serving": ("serve", "registry", "cloud"),
    "places": ("launch", "cloud", "pipeline", "data", "evaluate", "model", "output", "name"),
}
"""The sections that each check reads; it is skipped if one of them is invalid."""


def findings(
    recipe: Recipe,
    values: Values,
    verbs: Sequence[str] = ALL,
    *,
    submitted: bool = False,
    dry_run: bool = False,
    wrong: Collection[str] = (),
) -> Findings:
    """Run all checks that apply to `verbs`. `submitted`: as a pipeline of Vertex AI, whose steps
    run on machines of their own. `dry_run`: buckets and the hub's data sets are not queried.
    `wrong`: invalid sections that were replaced by defaults.
    """
    found, far, given = Findings(values), FarSources(asked=not dry_run), set(verbs)
    here = not submitted

    def asks(what: str, *of: str) -> bool:
        return bool(given & set(of)) and not set(READS[what]) & set(wrong)

    if asks("held out", *ALL):
        for verb in verbs:
            for message, knob in recipe.missing_held_out(verb):
                found.add(message, knob)
    ingested = "ingest" not in given and read_record(recipe.folder.steps, "ingest")
    if asks("sources", "ingest", "prepare") and not ingested:
        check_sources(recipe, found, far)
    if asks("measured", "train", "evaluate"):
        check_tasks(recipe, given, found)
    if asks("tasks", "evaluate"):
        check_evaluation(recipe, found, far, here=here)
    model = check_model(recipe, found) if asks("model", "prepare", "train") else None
    if asks("tokenizer", "prepare"):
        check_tokenizer_fits(recipe, model, found)
    if asks("cleaning", "prepare") and here:
        _check_cleaning(recipe, found)
    if asks("prepared", "train", "evaluate") and here and "prepare" not in given:
        # Its process would refuse it too, after machines were got and paid for.
        for verb in given & {"train", "evaluate"}:
            found.ask(check_data_is_current, step_named(verb), recipe)
    if asks("training", "train"):
        check_training(recipe, model, found, here=here)
    if asks("rewards", "train", "evaluate") and here:
        _check_rewards(recipe, given, found)
    if asks("evaluated", "evaluate") and recipe.evaluate.model is not None:
        check_evaluated(recipe, recipe.evaluate.model, found)
    if asks("gate", "gate"):
        _check_gate(recipe, found)
    if asks("serving", "serve", "deploy", "register"):
        _check_serving(recipe, found, here=here)
    if asks("places", *ALL, "deploy"):
        if submitted:
            for problem in submission_problems(recipe):
                found.add(problem)
        else:
            _check_places(recipe, verbs, found)
    far.finish(found)
    found.wrong = list(dict.fromkeys(found.wrong))
    return found


def read_checked(
    arguments: Sequence[str], verb: str, verbs: Sequence[str] = ALL, *, submitted: bool = False
) -> tuple[Recipe, Values]:
    """The recipe, and its raw values with the places that set them, not yet checked.

    Raises:
        WrongInput: the recipe violates its own rules; lists other findings too.
    """
    try:
        return read_with_origins(arguments, verb)
    except RecipeErrors as error:
        recipe, wrong = without_errors(error.values)
        if recipe is None:
            raise
        found = findings(recipe, error.values, verbs, submitted=submitted, wrong=wrong)
        raise WrongInput("\n".join([str(error), *found.wrong])) from None


def check(
    recipe: Recipe,
    values: Values,
    verbs: Sequence[str] = ALL,
    *,
    submitted: bool = False,
    dry_run: bool = False,
) -> list[str]:
    """Print what cannot be checked, and refuse what is wrong. In a dry run what the place lacks at
    present is not refused but returned.

    Raises:
        WrongInput: everything that is wrong, one line each.
    """
    found = findings(recipe, values, verbs, submitted=submitted, dry_run=dry_run)
    for line in dict.fromkeys(found.unknown):
        say(f"not checked: {line}")
    allowed = list(dict.fromkeys(found.lacking)) if dry_run else []
    if wrong := [line for line in found.wrong if line not in allowed]:
        raise WrongInput("\n".join(wrong))
    return allowed


def _check_cleaning(recipe: Recipe, found: Findings) -> None:
    """Check what cleaning and the engine need on this machine."""
    engine = recipe.data.engine
    if recipe.data.clean.languages:
        need(found, "py3langid", "data.clean.languages", "pip install 'ingot[languages]'")
    if recipe.at("prepare").launch.kind != "local":
        return
    for number, source in enumerate(recipe.data.clean.against):
        if not SourceSettings(source=source).scheme:
            knob = f"data.clean.contamination.against.{number}"
            whole = partial(find_source, whole=True)
            found.ask(whole, SourceSettings(source=source), knob, at=knob)
    if engine.kind == "spark":
        need(found, "pyspark", "data.engine.kind spark", "pip install 'ingot[spark]'")
        here, oldest = java(), java_wanted()
        if here is None or here.major < oldest:
            has = f", and here is {here.version}" if here else ""
            get = install_command("openjdk-17-jre-headless", "openjdk@17")
            found.add(
                f"data.engine.kind spark needs Java {oldest} or newer{has}; {get}, and set"
                " JAVA_HOME to it if it is not the first"
            )
    if engine.kind == "beam" and engine.python is None:
        need(found, "apache_beam", "data.engine.kind beam", "run `make beam`")


def _check_rewards(recipe: Recipe, verbs: Collection[str], found: Findings) -> None:
    """Check that the rewards of what runs on this machine can work on it; of what runs elsewhere,
    that their keys come along.
    """
    places: list[tuple[str, Any, str]] = [("train", recipe.objective, "objective")]
    places += [
        ("evaluate", task, f"evaluate.tasks.{number}") for number, task in enumerate(recipe.tasks)
    ]
    for verb, place, knob in places:
        rewards = getattr(place, "rewards", None)
        if not rewards or verb not in verbs:
            continue
        if recipe.at(verb).launch.kind == "local":
            found.ask(check_rewards, rewards, at=f"{knob}.rewards")
            continue
        for told in _keys_left_behind(recipe, verb, rewards):
            found.skip(told, f"{knob}.rewards")


def _keys_left_behind(
    recipe: Recipe, verb: str, rewards: Sequence[RewardSettings]
) -> Iterator[str]:
    """Of each key of a server that judges how to hand it on, where nodes elsewhere do not get it
    from here. They may have it by themselves.
    """
    launch = recipe.at(verb).launch
    handed_on = launch.kind in ("ssh", "slurm")
    given = {*launch.environment, *recipe.cloud.secrets, *(os.environ if handed_on else ())}
    for reward in rewards:
        key = getattr(reward, "key_variable", None)
        if key is not None and key not in given:
            way = "export it here" if handed_on else f"set cloud.secrets={{{key}: secret:NAME}}"
            yield f"key_variable {key} comes to no node from here; {way}, or have it there"


def _check_gate(recipe: Recipe, found: Findings) -> None:
    """Check that a task produces the gate's metrics."""
    if recipe.gate.override is not None:
        return
    names, sources = [task.name for task in recipe.tasks], _held_out_names(recipe)
    for metric in recipe.gate.metrics(recipe.objective.judged):
        task, slash, _ = metric.partition("/")
        if not slash or is_measured(metric, recipe.tasks, recipe.objective):
            continue
        if is_tail(metric, recipe.tasks, recipe.objective, sources):
            continue
        if task in names:
            own = [one for one in recipe.tasks if one.name == task]
            known = ", ".join(metrics_of(own, recipe.objective))
            found.add(f"gate.metric {metric} is not one of {known}; set gate.metric to one of them")
        elif not recipe.data.holds_out and task in ("loss", "classification"):
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


def _held_out_names(recipe: Recipe) -> list[str]:
    """How metrics call the sources of held-out documents, which they tell apart where there are
    several.
    """
    given = recipe_sources(recipe)
    held_out = given.get("validation", given["train"])
    return source_names(held_out) if len(held_out) > 1 else []


def _check_serving(recipe: Recipe, found: Findings, *, here: bool) -> None:
    """Check the serving engine, here or behind an endpoint."""
    if recipe.registry.kind == "vertex":
        from ingot.registry.vertexai.resources import container_of, machine_resources

        found.ask(container_of, recipe)
        found.ask(machine_resources, recipe)
    elif here and recipe.serve.engine in ("vllm", "triton"):
        module = "vllm" if recipe.serve.engine == "vllm" else "ingot"
        found.ask(python_with_module, recipe.serve.python, module, at="serve.engine")


def _check_places(recipe: Recipe, verbs: Sequence[str], found: Findings) -> None:
    """Check that the place of each step can run it."""
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
    for reason in launcher_of(recipe).can(job):
        found.add(reason, lacking=True)
    if job.run_folder_url:
        for reason in unreachable_inputs(recipe, verb):
            found.add(reason)
