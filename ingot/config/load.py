"""From files, environment and command line to a checked recipe; every error says where the value stands."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ingot.base.environment import read_dotenv
from ingot.base.errors import WrongInput
from ingot.config.knobs import knobs, nearest
from ingot.config.recipe import Recipe

PREFIX = "INGOT_"
Path_ = tuple[str | int, ...]


@dataclass
class Values:
    """Raw values as nested mappings, and for each path where it was set last (`recipe.yaml:12`, `$INGOT_SEED`)."""

    tree: dict[str, Any] = field(default_factory=dict)
    origins: dict[Path_, str] = field(default_factory=dict)

    def origin(self, path: Path_) -> str:
        """Where the value at `path`, or the nearest thing around it, was set."""
        for length in range(len(path), -1, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]]
        return "the recipe"


def load_recipe(
    files: Sequence[str | Path], overrides: Sequence[str] = (), *, environ: Mapping[str, str] | None = None, dotenv: Path | None = Path(".env")
) -> Recipe:
    """Read `files` in order, then `.env`, then `INGOT_*` variables, then `key=value` overrides; later ones win.

    Raises:
        WrongInput: names the knob, the value, where it stands, and the nearest knob where the name is unknown.
    """
    values = read_values(files, overrides, environ=os.environ if environ is None else environ, dotenv=dotenv)
    try:
        return Recipe.model_validate(values.tree)
    except ValidationError as error:
        raise WrongInput(_explain(error, values)) from None


def read_values(files: Sequence[str | Path], overrides: Sequence[str], *, environ: Mapping[str, str], dotenv: Path | None) -> Values:
    """The merged raw values, unchecked."""
    values = Values()
    for file in files:
        _merge_file(values, Path(file))
    from_dotenv = read_dotenv(dotenv) if dotenv is not None and dotenv.is_file() else {}
    for name, text in {**from_dotenv, **environ}.items():
        if name.startswith(PREFIX):
            where = f"${name}" if name in environ else f"{dotenv}: {name}"
            _assign(values, tuple(_indices(name[len(PREFIX):].lower().split("__"))), _scalar(text, where), where)
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise WrongInput(f"`{override}` on the command line is neither a recipe file that exists nor key=value")
        where = f"`{override}` on the command line"
        _assign(values, tuple(_indices(key.split("."))), _scalar(text, where), where)
    return values


def dump_recipe(recipe: Recipe) -> str:
    """The whole resolved recipe as YAML; loading it again gives the same recipe."""
    values = recipe.model_dump(mode="json")
    if not recipe.trains_tokenizer:
        del values["tokenizer"]["vocab_size"]
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def _indices(parts: Iterable[str]) -> Iterable[str | int]:
    return (int(part) if part.isdigit() else part for part in parts)


def _scalar(text: str, where: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise WrongInput(f"{where}: the value is not YAML; put quotes around it") from None


def _merge_file(values: Values, path: Path) -> None:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise WrongInput(f"recipe {path} does not exist; check the path") from None
    except IsADirectoryError:
        raise WrongInput(f"recipe {path} is a folder; give the recipe.yaml in it") from None
    except UnicodeDecodeError as error:
        raise WrongInput(f"recipe {path} is not UTF-8 (byte {error.start}); save it as UTF-8") from None
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise WrongInput(f"{path}{line}: not valid YAML ({getattr(error, 'problem', None) or error}); mend that line") from None
    if node is None:
        return
    if not isinstance(node, yaml.MappingNode):
        raise WrongInput(f"{path}:{node.start_mark.line + 1}: a recipe is a mapping of sections, such as `name: my-run`")
    _merge_node(values, (), node, str(path))


def _merge_node(values: Values, path: Path_, node: yaml.Node, file: str) -> None:
    """Mappings merge key by key; everything else replaces."""
    if path:
        values.origins[path] = f"{file}:{node.start_mark.line + 1}"
    if not isinstance(node, yaml.MappingNode):
        _assign(values, path, _construct(node, file), f"{file}:{node.start_mark.line + 1}")
        if isinstance(node, yaml.SequenceNode):
            _note_lines(values, path, node, file)
        return
    seen: set[str] = set()
    if path and not isinstance(_get(values.tree, path), dict):
        _assign(values, path, {}, f"{file}:{node.start_mark.line + 1}")
    for key_node, value_node in node.value:
        key = str(_construct(key_node, file))
        where = f"{file}:{key_node.start_mark.line + 1}"
        if key in seen:
            raise WrongInput(f"{where}: `{key}` stands twice in the same section; keep one")
        seen.add(key)
        _merge_node(values, (*path, key), value_node, file)
        values.origins[(*path, key)] = where


def _note_lines(values: Values, path: Path_, node: yaml.SequenceNode, file: str) -> None:
    for index, item in enumerate(node.value):
        values.origins[(*path, index)] = f"{file}:{item.start_mark.line + 1}"
        if isinstance(item, yaml.MappingNode):
            for key_node, _ in item.value:
                values.origins[(*path, index, key_node.value)] = f"{file}:{key_node.start_mark.line + 1}"


def _construct(node: yaml.Node, file: str) -> Any:
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_object(node, deep=True)
    except yaml.YAMLError as error:
        raise WrongInput(f"{file}:{node.start_mark.line + 1}: not valid YAML ({getattr(error, 'problem', error)}); mend that line") from None
    finally:
        loader.dispose()


def _get(tree: Any, path: Path_) -> Any:
    for part in path:
        if isinstance(tree, dict) and part in tree:
            tree = tree[part]
        elif isinstance(tree, list) and isinstance(part, int) and part < len(tree):
            tree = tree[part]
        else:
            return None
    return tree


def _assign(values: Values, path: Path_, value: Any, where: str) -> None:
    """Set one value, making the sections on the way; an index must exist in its list already."""
    tree: Any = values.tree
    for depth, part in enumerate(path):
        last = depth == len(path) - 1
        if isinstance(tree, list):
            if not isinstance(part, int) or part >= len(tree):
                raise WrongInput(f"{where}: `{_dotted(path[:depth])}` is a list of {len(tree)}; give an index below that")
        elif isinstance(part, int):
            part = str(part)
        if last:
            tree[part] = value
        else:
            inner = tree[part] if isinstance(tree, list) else tree.get(part)
            if not isinstance(inner, dict | list):
                inner = tree[part] = {}
            tree = inner
    for known in [known for known in values.origins if known[: len(path)] == path]:
        del values.origins[known]
    values.origins[path] = where


def _dotted(path: Path_) -> str:
    return ".".join(str(part) for part in path)


def _explain(error: ValidationError, values: Values) -> str:
    """All faults, one line each, each with its place."""
    lines: list[str] = []
    for detail in error.errors(include_url=False):
        line = _explain_one(detail, values)
        if line not in lines:
            lines.append(line)
    return "\n".join(lines)


def _explain_one(detail: ErrorDetails, values: Values) -> str:
    # Pydantic puts the names of union members between the keys: keep what can be followed through the values.
    path: Path_ = ()
    for part in detail["loc"][:-1]:
        if _get(values.tree, (*path, part)) is not None:
            path = (*path, part)
    last = detail["loc"][-1:] if detail["loc"] else ()
    kind, given = detail["type"], detail["input"]
    if kind == "extra_forbidden":
        full = (*path, *last)
        return f"{values.origin(full)}: unknown knob `{_dotted(full)}`; did you mean `{nearest(_dotted(full), _dotted(path))}`?"
    if kind == "missing":
        full = (*path, *last)
        return f"{values.origin(path)}: `{_dotted(full)}` is missing; {_doc(full) or 'give it a value'}"
    full = (*path, *last) if last and _get(values.tree, (*path, *last)) is not None else path
    if kind == "value_error":
        return f"{values.origin(full)}: {detail['msg'].removeprefix('Value error, ')}"
    shown = repr(given) if not isinstance(given, dict) else "a section"
    message = detail["msg"][0].lower() + detail["msg"][1:]
    return f"{values.origin(full)}: `{_dotted(full)}` is {shown[:80]}; {message} (`ingot explain {_dotted(full)}`)"


def _doc(path: Path_) -> str:
    plain = _dotted(tuple(part for part in path if not isinstance(part, int)))
    return next((knob.doc for knob in knobs() if knob.plain == plain), "")
