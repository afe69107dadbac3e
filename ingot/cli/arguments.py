"""Parses what follows a verb: recipe files and `key=value` overrides, in any order."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from ingot.base.environment import holds_secret
from ingot.base.errors import WrongInput
from ingot.base.progress import say
from ingot.config.knobs import all_knobs, nearest_knob
from ingot.config.load import checked, load_recipe, read_values
from ingot.config.recipe import Recipe
from ingot.config.values import Values, as_typed

_OVERRIDE = re.compile(r"^[A-Za-z_][\w.]*=")


def split(arguments: Iterable[str]) -> tuple[list[str], list[str]]:
    """Split arguments into recipe files and overrides. `name=value` is an override, unless a file
    of that name exists.
    """
    files: list[str] = []
    overrides: list[str] = []
    for argument in arguments:
        (overrides if _OVERRIDE.match(argument) and not os.path.isfile(argument) else files).append(
            argument
        )
    return files, overrides


def read_recipe(arguments: Sequence[str], verb: str | None = None) -> Recipe:
    """The recipe, for `verb` if given (see `load_recipe`). Raises WrongInput if there is no recipe
    file among the arguments, or if they are invalid.
    """
    return read_with_origins(arguments, verb)[0]


def read_with_origins(arguments: Sequence[str], verb: str | None = None) -> tuple[Recipe, Values]:
    """The recipe, and its raw values with the places that set them. Raises as `read_recipe`."""
    files, overrides = split(arguments)
    _check_values_given(files)
    if not files:
        raise WrongInput("no recipe is given; name one, such as recipes/quickstart.yaml")
    raw = read_values(files, overrides, environ=os.environ, dotenv=Path(".env"), verb=verb)
    recipe = checked(raw)
    if verb is not None and "LOCAL_RANK" not in os.environ:
        for name in recipe.launch.environment:
            if holds_secret(name):
                say(
                    f"warning: launch.environment.{name} looks like a secret, and is written into"
                    " recipe.yaml and the scripts of jobs; remove it, export it, and name it in"
                    " launch.secrets (ssh, Slurm) or in cloud.secrets"
                )
    return recipe, raw


def knob_for_option(option: str, arguments: Sequence[str], own: Collection[str] = ()) -> str | None:
    """The override probably meant by an option such as `--steps 5`: `train.steps=5`; None if no
    knob and none of the verb's `own` settings has that name.
    """
    wanted = option.lstrip("-").replace("-", "_")
    named = {wanted} if wanted in own else {knob.plain for knob in all_knobs()}
    found = sorted(
        (path for path in named if path == wanted or path.endswith(f".{wanted}")),
        key=lambda path: (path != wanted, not path.startswith("train."), path.count("."), path),
    )
    if not found:
        return None
    given = next((each for each in arguments if each.partition("=")[0] == option), option)
    _, assigned, value = given.partition("=")
    after = arguments[arguments.index(given) + 1 :] if given in arguments else []
    if not assigned and after and not after[0].startswith("-"):
        value = after[0]
    return as_typed(f"{found[0]}={value or 'VALUE'}")


def _check_values_given(files: Sequence[str]) -> None:
    """Raises WrongInput for a knob's name among the recipe files: its value is missing."""
    for name in files:
        if re.fullmatch(r"[a-z_]+(\.[a-z0-9_]+)*", name) and not os.path.exists(name):
            known = {knob.plain for knob in all_knobs()}
            if name in known:
                raise WrongInput(f"`{name}` has no value; write `{name}=VALUE`")
            if name.partition(".")[0] in {path.partition(".")[0] for path in known if "." in path}:
                near = nearest_knob(name, name.rpartition(".")[0])
                if Path(name).suffix not in (".yaml", ".yml", ".json"):
                    raise WrongInput(
                        f"`{name}` is no recipe and no knob; did you mean `{near}=VALUE`?"
                    )


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
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = None
    wanted = {bool: "true or false", int: "a whole number", float: "a number"}.get(type(default))
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if wanted and type(value) is not type(default):
        raise WrongInput(f"`{as_typed(argument)}`: `{text}` is not {wanted}; give one")
    return value
