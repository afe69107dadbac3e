"""Loads a validated recipe from files, environment and command line (recipe files and `key=value`
overrides, in any order); every error names the place of the value.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from ingot.base.environment import check_decoded, holds_secret
from ingot.base.errors import WrongInput
from ingot.base.progress import say
from ingot.config.documents import MERGE, Constructor, compose, dump, typed_value
from ingot.config.knobs import all_knobs, changed_values, free_mappings, nearest_knob
from ingot.config.recipe import Recipe
from ingot.config.shipped import tell_names
from ingot.config.values import (
    MISSING,
    PREFIX,
    KeyPath,
    RecipeInputs,
    Values,
    as_typed,
    dotted,
    explain_errors,
    get,
    one_line,
    own_inputs,
    parse_path,
    set_value,
)

WHOLE = ("run", "submit")
"""Verbs that run all steps."""
STEP_KNOBS = {
    "kind": "launch",
    "image": "image",
    "machine": "machine",
    "nodes": "nodes",
    "processes": "processes",
}
"""The knobs of `launch` that a step of `pipeline.steps` can override, and their names there."""
LEAST = {"name": "unnamed", "data": {"train": [{"source": "builtin:stdlib"}]}}
"""Stand-ins for required sections when the recipe's own cannot be read."""
_OVERRIDE = re.compile(r"^[A-Za-z_][\w.-]*=")


def split_arguments(arguments: Iterable[str]) -> tuple[list[str], list[str]]:
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
    files, overrides = split_arguments(arguments)
    _check_values_given(files)
    if not files:
        raise WrongInput(
            "no recipe is given; name one, such as quickstart (`ingot recipes` lists them)"
        )
    if named := [file for file in files if not (os.path.isfile(file) and Path(file).suffix)]:
        tell_names(named)
    raw = read_values(files, overrides, own_inputs(Path(".env")), verb=verb)
    recipe = checked(raw)
    if verb is not None and "LOCAL_RANK" not in os.environ:
        for name in recipe.launch.environment:
            if name.startswith(PREFIX):
                raise WrongInput(
                    f"launch.environment.{name} would set a knob of some ranks alone; set the knob"
                    " itself"
                )
            if holds_secret(name):
                say(
                    f"warning: launch.environment.{name} looks like a secret, and is written into"
                    " recipe.yaml and the scripts of jobs; remove it, export it, and name it in"
                    " launch.secrets (ssh, Slurm) or in cloud.secrets"
                )
    return recipe, raw


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


def load_recipe(
    files: Sequence[str | Path],
    overrides: Sequence[str] = (),
    *,
    environ: Mapping[str, str] | None = None,
    dotenv: Path | None = Path(".env"),
    verb: str | None = None,
) -> Recipe:
    """Read `files` in order, then `.env`, then `INGOT_*` variables, then `key=value` overrides;
    later ones win. `verb` is the verb to run: for its step, `launch` values from variables and
    overrides also win over those in `pipeline.steps`.

    Raises:
        WrongInput: names the knob, its value and place, and the nearest knob if the name is
            unknown; or, for verbs that run all steps, the step whose own value hides a `launch`
            override.
    """
    inputs = own_inputs(dotenv) if environ is None else RecipeInputs.of(environ, dotenv)
    return checked(read_values(files, overrides, inputs, verb=verb))


class RecipeErrors(WrongInput):
    """Violations of the recipe's own rules, with the raw values that caused them."""

    def __init__(self, error: ValidationError, values: Values) -> None:
        super().__init__(explain_errors(error, values))
        self.values = values


def checked(values: Values) -> Recipe:
    """Validate raw values as a recipe. Raises RecipeErrors, a WrongInput, as `load_recipe` does."""
    try:
        return Recipe.model_validate(values.tree)
    except ValidationError as error:
        raise RecipeErrors(error, values) from None


def without_errors(values: Values) -> tuple[Recipe | None, set[str]]:
    """The recipe with invalid sections replaced by their defaults, and the names of those sections;
    no recipe if an error is in no section.
    """
    tree, wrong = dict(values.tree), set[str]()
    for _ in Recipe.model_fields:
        try:
            return Recipe.model_validate(tree), wrong
        except ValidationError as error:
            named = {
                word.partition(".")[0]
                for detail in error.errors(include_url=False)
                for word in (*map(str, detail["loc"][:1]), *re.findall(r"[a-z_.]+", detail["msg"]))
                if detail["loc"] == () or word == str(detail["loc"][0])
            }
        more = {name for name in named if name in tree or name in LEAST} - wrong
        if not more:
            break
        wrong |= more
        tree = {name: value for name, value in tree.items() if name not in more}
        tree |= {name: LEAST[name] for name in more if name in LEAST}
    return None, wrong


def read_values(
    files: Sequence[str | Path],
    overrides: Sequence[str],
    inputs: RecipeInputs,
    *,
    verb: str | None,
) -> Values:
    """The merged raw values, not validated."""
    values = Values()

    def type_in(names: Sequence[str], text: str, where: str) -> None:
        path, value = parse_path(names), _scalar(text, where)
        set_value(values, path, value, where)
        _type_into_steps(values, path, value, where, verb)

    for file in files:
        path = inputs.path(file)
        _merge_file(values, inputs.text(path), path)
    for place, variables in ((f"{inputs.dotenv_file}: ", inputs.dotenv), ("$", inputs.environ)):
        for name in sorted(variables):  # so that INGOT_TRAIN comes before INGOT_TRAIN__STEPS
            type_in(_names(name[len(PREFIX) :]), variables[name], f"{place}{name}")
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise WrongInput(
                f"`{as_typed(override)}` on the command line is neither a recipe file that exists"
                " nor key=value"
            )
        where = f"`{as_typed(override)}` on the command line"
        type_in(key.split("."), text, where)
    return values


def _names(variable: str) -> list[str]:
    """The names that a variable's parts mean: knobs in any case; keys of a mapping as they are if
    they name variables or have a small letter, else in small letters, as most keys are written.
    """
    parts = variable.split("__")
    names = [part.lower() for part in parts]
    for count in range(2, len(parts)):
        path = ".".join(name for name in names[:count] if not name.isdecimal())
        as_is = free_mappings().get(path)
        if as_is is not None:
            keys = [key if as_is or not key.isupper() else key.lower() for key in parts[count:]]
            return names[:count] + keys
    return names


def _type_into_steps(
    values: Values, path: KeyPath, value: Any, where: str, verb: str | None
) -> None:
    """Apply a `launch` override to a step that has its own value in `pipeline.steps`: the step
    `verb` gets the new value; for verbs that run all steps it is an error, since the intended step
    is unknown.
    """
    if path[0] != "launch" or verb is None:
        return
    if len(path) == 1:
        if isinstance(value, dict):
            for key in value:
                _type_into_steps(values, ("launch", key), value[key], where, verb)
        return
    steps, knob = get(values.tree, ("pipeline", "steps")), STEP_KNOBS.get(str(path[1]))
    if knob is None:
        return
    if isinstance(steps, dict):
        for step in steps:
            own = ("pipeline", "steps", step, knob)
            if get(values.tree, own) in (MISSING, None):
                continue
            full = (*own, *path[2:])
            if step == verb:
                set_value(values, full, value, where)
            elif verb in WHOLE and get(values.tree, full) != value:
                raise WrongInput(
                    f"{where} would not reach {step}, whose own {dotted(own)} is set by"
                    f" {values.origin(own)}; give {dotted(full)} after it, too"
                )
    if knob == "nodes" and verb not in WHOLE:  # `Recipe.at` overrides it for some steps
        set_value(values, ("pipeline", "steps", verb, knob), value, where)


def dump_recipe(recipe: Recipe, *, changed: bool = False) -> str:
    """The complete resolved recipe as YAML, or only what differs from the defaults; loading it
    gives the same recipe.
    """
    return dump(changed_values(recipe) if changed else recipe_values(recipe))


def recipe_values(recipe: Recipe) -> dict[str, Any]:
    """The values of the complete resolved recipe; loading them gives the same recipe."""
    values = recipe.model_dump(mode="json")
    if not recipe.trains_tokenizer:
        del values["tokenizer"]["vocab_size"]  # refused beside a tokenizer that is there
    return values


def _scalar(text: str, where: str) -> Any:
    check_decoded(text, f"{where}: the value")
    try:
        return typed_value(text)
    except (
        yaml.YAMLError,
        ValueError,
        RecursionError,
    ):  # ValueError: a date such as 2001-99-99, a number of 5000 digits
        raise WrongInput(f"{where}: the value is not YAML; put quotes around it") from None


def _merge_file(values: Values, text: str, path: Path) -> None:
    try:
        _merge_text(values, text, path)
    except RecursionError:
        raise WrongInput(
            f"{path}: nested too deeply, or an alias that holds itself; write it out flat"
        ) from None


def _merge_text(values: Values, text: str, path: Path) -> None:
    try:
        node = compose(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise WrongInput(
            f"{path}{line}: not valid YAML ({getattr(error, 'problem', None) or error}); mend that"
            " line"
        ) from None
    if node is None:
        return
    if not isinstance(node, yaml.MappingNode):
        raise WrongInput(
            f"{path}:{node.start_mark.line + 1}: a recipe is a mapping of sections; start with a"
            " line such as `name: my-run`"
        )
    values.origins[()] = str(path)
    _merge_node(values, (), node, str(path))


def _merge_node(values: Values, path: KeyPath, node: yaml.Node, file: str) -> None:
    """Mappings are merged key by key; everything else is replaced."""
    if path:
        values.origins[path] = f"{file}:{node.start_mark.line + 1}"
    if not isinstance(node, yaml.MappingNode):
        set_value(values, path, _construct(node, file), f"{file}:{node.start_mark.line + 1}")
        if isinstance(node, yaml.SequenceNode):
            _note_lines(values, path, node, file)
        return
    if path and not isinstance(get(values.tree, path), dict):
        set_value(values, path, {}, f"{file}:{node.start_mark.line + 1}")
    for key, (key_node, value_node) in _items(node, file).items():
        _merge_node(values, (*path, key), value_node, file)
        values.origins[(*path, key)] = f"{file}:{key_node.start_mark.line + 1}"


def _items(node: yaml.MappingNode, file: str) -> dict[str, tuple[yaml.Node, yaml.Node]]:
    """Keys with their nodes; supports `<<: *anchor`. YAML itself would silently use the last of two
    equal keys.
    """
    seen: set[str] = set()
    for key_node, _ in node.value:
        key = str(_construct(key_node, file)) if key_node.tag != MERGE else "<<"
        if key in seen:
            raise WrongInput(
                f"{file}:{key_node.start_mark.line + 1}: `{one_line(key)}` stands twice in the same"
                " section; keep one"
            )
        seen.add(key)
    _with_constructor(lambda constructor: constructor.flatten_mapping(node), node, file)
    return {
        str(_construct(key_node, file)): (key_node, value_node)
        for key_node, value_node in node.value
    }


def _note_lines(values: Values, path: KeyPath, node: yaml.Node, file: str) -> None:
    """Record the lines of everything inside a list."""
    inner: Iterable[tuple[str | int, yaml.Node, yaml.Node]] = ()
    if isinstance(node, yaml.SequenceNode):
        inner = [(index, item, item) for index, item in enumerate(node.value)]
    elif isinstance(node, yaml.MappingNode):
        inner = [(key, *nodes) for key, nodes in _items(node, file).items()]
    for part, place, item in inner:
        values.origins[(*path, part)] = f"{file}:{place.start_mark.line + 1}"
        _note_lines(values, (*path, part), item, file)


def _construct(node: yaml.Node, file: str) -> Any:
    return _with_constructor(lambda made: made.construct_object(node, deep=True), node, file)


def _with_constructor(call: Callable[[Constructor], Any], node: yaml.Node, file: str) -> Any:
    try:
        return call(Constructor())
    except (
        yaml.YAMLError,
        ValueError,
    ) as error:  # ValueError: a date such as 2001-99-99, a number of 5000 digits
        raise WrongInput(
            f"{file}:{node.start_mark.line + 1}: not valid YAML"
            f" ({getattr(error, 'problem', error)}); mend that line"
        ) from None
