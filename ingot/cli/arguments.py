"""Settings that follow a verb and are of no recipe: `key=value` of the verb itself, of a model
without a recipe, and options that were meant as knobs.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from ingot.base.errors import WrongInput
from ingot.base.runfolder import RunFolder
from ingot.config.documents import typed_value, with_numbers
from ingot.config.knobs import all_knobs
from ingot.config.load import load_recipe, split_arguments
from ingot.config.recipe import Recipe
from ingot.config.shipped import tell_names
from ingot.config.values import as_typed


def with_paths(arguments: Sequence[str]) -> list[str]:
    """The arguments with paths in the place of names of ingot's own recipes, for commands that are
    started with them and need not tell again.
    """
    files, overrides = split_arguments(arguments)
    return [*tell_names(files), *overrides]


def note_other_run(arguments: Sequence[str], recipe: Recipe) -> str | None:
    """What to say where the recipe lies in a run folder and leads to another one, as after that run
    was moved or copied: all of it would be done again there. None where a name was given.
    """
    files, overrides = split_arguments(arguments)
    if any(override.startswith(("name=", "output=")) for override in overrides):
        return None
    for file in map(Path, files):
        run = RunFolder(file.parent)
        is_run = file == run.recipe and run.steps.is_dir()
        if is_run and run.root.resolve() != recipe.folder.root.resolve():
            return (
                f"note: {file} is of the run {recipe.name}: this works in {recipe.folder.root};"
                f" output={run.root.parent} name={run.root.resolve().name} goes on in {run.root}"
            )
    return None


def knob_for_option(option: str, arguments: Sequence[str], own: Collection[str]) -> str | None:
    """The override probably meant by an option such as `--steps 5`: `train.steps=5`; None if no
    knob and none of the verb's `own` settings has that name. The section that is named as the verb
    comes first: `ingot serve --port` means `serve.port`.
    """
    verb = next(iter(arguments), "")
    wanted = option.lstrip("-").replace("-", "_")
    named = {wanted} if wanted in own else {knob.plain for knob in all_knobs()}
    found = sorted(
        (path for path in named if path == wanted or path.endswith(f".{wanted}")),
        key=lambda path: (
            path != wanted,
            not path.startswith(f"{verb}."),
            not path.startswith("train."),
            path.count("."),
            path,
        ),
    )
    if not found:
        return None
    given = next((each for each in arguments if each.partition("=")[0] == option), option)
    _, assigned, value = given.partition("=")
    after = arguments[arguments.index(given) + 1 :] if given in arguments else []
    if not assigned and after and not after[0].startswith("-"):
        value = after[0]
    return as_typed(f"{found[0]}={value or 'VALUE'}")


def settings_without_recipe(overrides: Sequence[str]) -> Recipe:
    """Defaults, environment and overrides for verbs that need no recipe (serving a folder): only
    `serve`, `output` and `registry` apply.
    """
    return load_recipe((), ["name=unnamed", "data.train=[{source: none}]", *overrides])


def values(arguments: Iterable[str], defaults: dict[str, Any], verb: str) -> dict[str, Any]:
    """`key=value` settings of one verb that are not knobs, such as `max_tokens=64`. Values are
    YAML, of the default's type.

    Raises:
        WrongInput: names the nearest key, or the expected type.
    """
    chosen = dict(defaults)
    for argument in arguments:
        key, _, text = argument.partition("=")
        if key not in defaults:
            near = difflib.get_close_matches(key, defaults, n=1, cutoff=0.0)[0]
            raise WrongInput(
                f"`{as_typed(argument)}`: {verb} has no setting `{key}`; did you mean `{near}`?"
            )
        chosen[key] = _typed(argument, text, defaults[key])
    return chosen


def _typed(argument: str, text: str, default: Any) -> Any:
    if isinstance(default, str):
        return text
    try:
        value = with_numbers(typed_value(text))
    except (yaml.YAMLError, ValueError, RecursionError):
        value = None
    wanted = {bool: "true or false", int: "a whole number", float: "a number"}.get(type(default))
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if wanted and type(value) is not type(default):
        raise WrongInput(f"`{as_typed(argument)}`: `{text}` is not {wanted}; give one")
    return value
