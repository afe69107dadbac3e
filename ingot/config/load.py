"""From files, environment and command line to a checked recipe; every error says where the value stands."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ingot.base.environment import read_dotenv
from ingot.base.errors import WrongInput
from ingot.config.knobs import all_knobs, nearest
from ingot.config.recipe import Recipe

PREFIX = "INGOT_"
Path_ = tuple[str | int, ...]
_MERGE = "tag:yaml.org,2002:merge"
_NOTHING = object()
_WANTED = {"model_type": "be a section, that is a mapping of knobs", "invalid-json-value": "be text, a number, a list or a mapping"}


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
    for place, variables in ((f"{dotenv}: ", from_dotenv), ("$", environ)):
        for name in sorted(variables):  # so that INGOT_TRAIN comes before INGOT_TRAIN__STEPS
            if name.startswith(PREFIX):
                where = f"{place}{name}"
                _assign(values, _parts(name[len(PREFIX):].lower().split("__")), _scalar(variables[name], where), where)
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise WrongInput(f"`{_one_line(override)}` on the command line is neither a recipe file that exists nor key=value")
        where = f"`{_one_line(override)}` on the command line"
        _assign(values, _parts(key.split(".")), _scalar(text, where), where)
    return values


def dump_recipe(recipe: Recipe) -> str:
    """The whole resolved recipe as YAML; loading it again gives the same recipe."""
    values = recipe.model_dump(mode="json")
    if not recipe.trains_tokenizer:
        del values["tokenizer"]["vocab_size"]
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def _parts(names: Iterable[str]) -> Path_:
    """Short runs of digits are indices into lists."""
    return tuple(int(name) if re.fullmatch("[0-9]{1,9}", name) else name for name in names)


def _scalar(text: str, where: str) -> Any:
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):  # ValueError: a date such as 2001-99-99, a number of 5000 digits
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
    except OSError as error:
        raise WrongInput(f"recipe {path} cannot be read ({error.strerror}); check the path and its permissions") from None
    try:
        _merge_text(values, text, path)
    except RecursionError:
        raise WrongInput(f"{path}: nested too deeply, or an alias that holds itself; write it out flat") from None


def _merge_text(values: Values, text: str, path: Path) -> None:
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise WrongInput(f"{path}{line}: not valid YAML ({getattr(error, 'problem', None) or error}); mend that line") from None
    if node is None:
        return
    if not isinstance(node, yaml.MappingNode):
        raise WrongInput(f"{path}:{node.start_mark.line + 1}: a recipe is a mapping of sections; start with a line such as `name: my-run`")
    values.origins[()] = str(path)
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
    if path and not isinstance(_get(values.tree, path), dict):
        _assign(values, path, {}, f"{file}:{node.start_mark.line + 1}")
    for key, (key_node, value_node) in _items(node, file).items():
        _merge_node(values, (*path, key), value_node, file)
        values.origins[(*path, key)] = f"{file}:{key_node.start_mark.line + 1}"


def _items(node: yaml.MappingNode, file: str) -> dict[str, tuple[yaml.Node, yaml.Node]]:
    """Keys with their nodes; `<<: *anchor` is understood. YAML would take the last of two equal keys in silence."""
    seen: set[str] = set()
    for key_node, _ in node.value:
        key = str(_construct(key_node, file)) if key_node.tag != _MERGE else "<<"
        if key in seen:
            raise WrongInput(f"{file}:{key_node.start_mark.line + 1}: `{_one_line(key)}` stands twice in the same section; keep one")
        seen.add(key)
    _with_loader(lambda loader: loader.flatten_mapping(node), node, file)
    return {str(_construct(key_node, file)): (key_node, value_node) for key_node, value_node in node.value}


def _note_lines(values: Values, path: Path_, node: yaml.Node, file: str) -> None:
    """Lines of everything inside a list."""
    inner: Iterable[tuple[str | int, yaml.Node, yaml.Node]] = ()
    if isinstance(node, yaml.SequenceNode):
        inner = [(index, item, item) for index, item in enumerate(node.value)]
    elif isinstance(node, yaml.MappingNode):
        inner = [(key, *nodes) for key, nodes in _items(node, file).items()]
    for part, place, item in inner:
        values.origins[(*path, part)] = f"{file}:{place.start_mark.line + 1}"
        _note_lines(values, (*path, part), item, file)


def _construct(node: yaml.Node, file: str) -> Any:
    return _with_loader(lambda loader: loader.construct_object(node, deep=True), node, file)


def _with_loader(call: Callable[[yaml.SafeLoader], Any], node: yaml.Node, file: str) -> Any:
    loader = yaml.SafeLoader("")
    try:
        return call(loader)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date such as 2001-99-99, a number of 5000 digits
        raise WrongInput(f"{file}:{node.start_mark.line + 1}: not valid YAML ({getattr(error, 'problem', error)}); mend that line") from None
    finally:
        loader.dispose()


def _get(tree: Any, path: Path_) -> Any:
    """The value at `path`, or _NOTHING."""
    for part in path:
        if isinstance(tree, dict):
            tree = tree.get(part, _NOTHING)
        elif isinstance(tree, list) and isinstance(part, int) and part < len(tree):
            tree = tree[part]
        else:
            return _NOTHING
    return tree


def _assign(values: Values, path: Path_, value: Any, where: str) -> None:
    """Set one value, making the sections on the way; an index must exist in its list already."""
    tree: Any = values.tree
    for depth, part in enumerate(path):
        key: Any = part
        if isinstance(tree, list):
            if not isinstance(part, int) or part >= len(tree):
                raise WrongInput(f"{where}: `{_dotted(path[:depth])}` is a list of {len(tree)}; give an index below that")
        else:
            key = str(part)
        if depth == len(path) - 1:
            tree[key] = value
            break
        inner = tree[key] if isinstance(tree, list) else tree.get(key)
        if not isinstance(inner, dict | list):
            inner = tree[key] = {}
            values.origins[path[: depth + 1]] = where
        tree = inner
    for known in [known for known in values.origins if known[: len(path)] == path]:
        del values.origins[known]
    values.origins[path] = where


def _explain(error: ValidationError, values: Values) -> str:
    """All faults, one line each, each with its place."""
    lines: dict[tuple[str, str], list[str]] = {}
    for detail in error.errors(include_url=False):
        head, wanted, tail = _explain_one(detail, values)
        told = lines.setdefault((head, tail), [])
        if wanted not in told:
            told.append(wanted)  # a knob of several types is told once, with all that it could be
    return "\n".join(head + ", or ".join(told) + tail for (head, tail), told in lines.items())


def _explain_one(detail: ErrorDetails, values: Values) -> tuple[str, str, str]:
    """What is wrong where, what it should be, and where to read on; the last two '' where the first says all."""
    # Pydantic puts the names of union members between the keys: keep what can be followed through the values.
    path: Path_ = ()
    for part in detail["loc"][:-1]:
        if _get(values.tree, (*path, part)) is not _NOTHING:
            path = (*path, part)
    last = detail["loc"][-1:] if detail["loc"] else ()
    kind, given, message = detail["type"], detail["input"], detail["msg"]
    full = (*path, *last)
    if kind == "extra_forbidden":
        return f"{values.origin(full)}: unknown knob `{_dotted(full)}`; did you mean `{nearest(_dotted(full), _dotted(path))}`?", "", ""
    if kind == "missing":
        return f"{values.origin(path)}: `{_dotted(full)}` is missing; add it ({_knob(full)[1].rstrip('.')})", "", ""
    full = full if _get(values.tree, full) is not _NOTHING else path
    if kind == "value_error":
        return _explain_rule(message.removeprefix("Value error, "), full, values), "", ""
    if kind == "union_tag_invalid":
        full, given = (*full, "kind"), detail["ctx"]["tag"]
        wanted = f"be one of {detail['ctx']['expected_tags']}"
    elif kind == "string_type" and isinstance(given, int | float):
        wanted = "be text: put quotes around it"
    else:
        wanted = _WANTED.get(kind) or re.sub(r"^.*? should |, unable to .*| after validation", "", message)
    name = _knob(full)[0]
    see = f" (see `ingot explain {name}`)" if name else ""
    return f"{values.origin(full)}: `{_dotted(full)}` is {_shown(given)}; it should ", wanted, see


def _explain_rule(message: str, path: Path_, values: Values) -> str:
    """A rule of a section names its knobs itself; a rule of one knob starts with its verb."""
    if path and not isinstance(_get(values.tree, path), dict):
        return f"{values.origin(path)}: `{_dotted(path)}` {message}"
    named = (tuple(word.split(".")) for word in re.findall(r"[a-z_]+(?:\.[a-z_]+)*", message))
    where = next((values.origins[path] for path in named if path in values.origins), values.origin(path))
    return f"{where}: {message}"


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "a section"
    if isinstance(value, bool | None):
        return {None: "null", True: "true", False: "false"}[value]
    try:
        return repr(value)[:80]
    except ValueError:  # a number of 5000 digits
        return "a number"


def _knob(path: Path_) -> tuple[str, str]:
    """Name and text of the knob at `path`, or of the nearest one around it; ('', '') at the root."""
    known = {knob.plain: knob.doc for knob in all_knobs()}
    parts = [part for part in path if not isinstance(part, int)]
    while parts and _dotted(tuple(parts)) not in known:
        parts.pop()
    name = _dotted(tuple(parts))
    return name, known.get(name, "")


def _dotted(path: Path_) -> str:
    return _one_line(".".join(str(part) for part in path))


def _one_line(text: str) -> str:
    """What a person wrote, short enough for an error and without line breaks."""
    text = text if len(text) <= 120 else f"{text[:117]}..."
    return text.replace("\n", "\\n")
