"""From a verb's name to its room: the steps, each imported when it is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ingot.base.environment import ranks
from ingot.base.fingerprint import fingerprint
from ingot.base.steprecord import Outcome
from ingot.cli.arguments import read_recipe
from ingot.config.recipe import Recipe
from ingot.pipeline.perform import perform
from ingot.pipeline.steps import step_of


def do_step(verb: str, arguments: list[str], *, again: bool) -> int:
    """Do one step of the recipe, unless nothing changed; its result on stdout, its exit code back."""
    recipe = read_recipe(arguments)
    record = perform(step_of(verb), recipe, lambda: DO[verb](recipe, again), STAMPS, again=again)
    if ranks().is_main:
        print(f"{verb}: {record.result}; see {record.where}")
    return record.exit_code


def do_all(arguments: list[str], *, fresh: bool) -> int:
    from ingot.pipeline.run import run
    from ingot.pipeline.summary import show_summary

    recipe = read_recipe(arguments)
    show_summary(recipe, run(recipe, arguments, STAMPS, fresh=fresh))
    return 0


def _ingest(recipe: Recipe, again: bool) -> Outcome:
    from ingot.data.ingest import ingest

    return ingest(recipe)


def _prepare(recipe: Recipe, again: bool) -> Outcome:
    from ingot.data.prepare import prepare

    return prepare(recipe)


def _train(recipe: Recipe, again: bool) -> Outcome:
    from ingot.train.run import train

    return train(recipe, fresh=again)


def _evaluate(recipe: Recipe, again: bool) -> Outcome:
    from ingot.evaluate.run import evaluate

    return evaluate(recipe)


def _gate(recipe: Recipe, again: bool) -> Outcome:
    from ingot.registry.verbs import gate

    return gate(recipe)


def _register(recipe: Recipe, again: bool) -> Outcome:
    from ingot.registry.verbs import register

    return register(recipe)


def _source_stamps(recipe: Recipe) -> dict[str, Any]:
    """The files behind the sources, many as they may be, in one short fingerprint for each split."""
    from ingot.data.sources import source_stamps

    return {f"what data.{split} reads": {"files": len(stamps), "stamps": fingerprint(stamps)} for split, stamps in source_stamps(recipe).items()}


def _live_stamp(recipe: Recipe) -> dict[str, Any]:
    from ingot.registry.verbs import gate_stamp

    return {"the live model": gate_stamp(recipe)}


DO: dict[str, Callable[[Recipe, bool], Outcome]] = {
    "ingest": _ingest, "prepare": _prepare, "train": _train, "evaluate": _evaluate, "gate": _gate, "register": _register,
}
STAMPS: dict[str, Callable[[Recipe], Any]] = {"ingest": _source_stamps, "gate": _live_stamp}
