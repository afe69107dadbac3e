"""What sets knobs: files, `.env`, variables and the command line; raw values, each with the place
that set it; and validation errors as one line per error, with its place.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ingot.base.environment import LOADED_VARIABLE, RESOLVED_VARIABLE, holds_secret, read_dotenv
from ingot.base.errors import Failed, WrongInput
from ingot.config.knobs import ELSEWHERE, all_knobs, kinds_of, names_in, nearest_knob
from ingot.config.shipped import resolve, suggestion

PREFIX = "INGOT_"
KeyPath = tuple[str | int, ...]
MISSING = object()
AUTOMATIC = (("parallel",), "auto")
"""The one word that stands for a section, so that a later `parallel.reshard=false` does not replace
it.
"""
T = TypeVar("T")


@dataclass
class RecipeInputs:
    """What sets knobs besides what is typed: variables of the environment, those of the `.env` that
    `dotenv_file` names, and `texts` of files, by absolute path: each is read once. They are as they
    are now; in a verb of a `Run`, as they were when `ingot.load` read them. Files change in
    between, and what was loaded is what is done.
    """

    environ: dict[str, str] = field(default_factory=dict)
    dotenv: dict[str, str] = field(default_factory=dict)
    dotenv_file: str = ""
    texts: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, environ: Mapping[str, str], dotenv: Path | None) -> RecipeInputs:
        """What there is now. Raises WrongInput for a `.env` that cannot be read."""
        found = dotenv is not None and dotenv.is_file()
        return cls(
            {name: value for name, value in environ.items() if name.startswith(PREFIX)},
            read_dotenv(dotenv, PREFIX) if dotenv is not None and found else {},
            str(dotenv or ""),
        )

    def path(self, given: str | Path) -> Path:
        """The file that a recipe argument means."""
        known = os.path.isfile(given) or os.path.abspath(given) in self.texts
        return Path(given) if known else resolve(given)[0]

    def text(self, path: Path) -> str:
        """What a recipe file says. Raises WrongInput if it cannot be read."""
        place = os.path.abspath(path)
        if place not in self.texts:
            self.texts[place] = _read(path)
        return self.texts[place]

    def changed(self, here: Path) -> list[str]:
        """The files and variables that say otherwise by now; `here`: the folder of the `.env`."""
        found = [place for place, text in self.texts.items() if _read_if_possible(place) != text]
        if not self.dotenv_file:
            return found
        try:
            now = RecipeInputs.of(os.environ, here / self.dotenv_file)
        except WrongInput:
            return [*found, self.dotenv_file]
        found += [self.dotenv_file] if now.dotenv != self.dotenv else []
        differing = dict(now.environ.items() ^ self.environ.items())
        return [*found, *(f"${name}" for name in sorted(differing))]

    def write(self, file: IO[str]) -> None:
        """Write them down for a process that is to read its recipe from them."""
        json.dump(asdict(self), file)
        file.flush()


def own_inputs(dotenv: Path | None) -> RecipeInputs:
    """What sets knobs of this process: neither variables nor `.env` where its recipe is resolved.

    Raises:
        Failed: what `ingot.load` read is gone.
        WrongInput: the `.env` cannot be read.
    """
    if RESOLVED_VARIABLE in os.environ:
        return RecipeInputs()
    loaded = os.environ.get(LOADED_VARIABLE)
    if loaded is None:
        return RecipeInputs.of(os.environ, dotenv)
    try:
        return RecipeInputs(**json.loads(Path(loaded).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise Failed(
            f"{loaded}, which holds the recipe as it was loaded, cannot be read ({error}); call the"
            " method again"
        ) from None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise WrongInput(f"recipe {path} does not exist; {suggestion(path)}") from None
    except IsADirectoryError:
        raise WrongInput(f"recipe {path} is a folder; give the recipe.yaml in it") from None
    except UnicodeDecodeError as error:
        raise WrongInput(
            f"recipe {path} is not UTF-8 (byte {error.start}); save it as UTF-8"
        ) from None
    except OSError as error:
        raise WrongInput(
            f"recipe {path} cannot be read ({error.strerror}); check the path and its permissions"
        ) from None


def _read_if_possible(place: str) -> str | None:
    try:
        return Path(place).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None


@dataclass
class Values:
    """Raw values as nested mappings, and for each path the place that set it last
    (`recipe.yaml:12`, `$INGOT_SEED`).
    """

    tree: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, str] = field(default_factory=dict)

    def origin(self, path: KeyPath) -> str:
        """The place that set the value at `path`, or the nearest enclosing section."""
        for length in range(len(path), -1, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]]
        return "the recipe"


def parse_path(names: Iterable[str]) -> KeyPath:
    """Short runs of digits become list indices."""
    return tuple(int(name) if re.fullmatch("[0-9]{1,9}", name) else name for name in names)


def _instead(path: KeyPath, rest: KeyPath, value: Any) -> str:
    """How to replace the list by the section that has this knob; empty if none has it."""
    if dotted((*path, *rest)) not in {knob.path for knob in all_knobs()}:
        return ""
    return f", or the section in its place: `{dotted(path)}={{{dotted(rest)}: {value}}}`"


def get(tree: Any, path: KeyPath) -> Any:
    """The value at `path`, or MISSING."""
    for part in path:
        if isinstance(tree, dict):
            tree = tree.get(part, MISSING)
        elif isinstance(tree, list) and isinstance(part, int) and part < len(tree):
            tree = tree[part]
        else:
            return MISSING
    return tree


def set_value(values: Values, path: KeyPath, value: Any, where: str) -> None:
    """Set one value, creating missing sections; a list index must already exist."""
    tree: Any = values.tree
    above: KeyPath = ()
    before: Any = tree
    for part in path:
        key: Any = part if isinstance(tree, list) else str(part)
        if isinstance(tree, list) and not (isinstance(part, int) and part < len(tree)):
            raise WrongInput(
                f"{where}: `{dotted(above)}` is a list of {len(tree)}; give an index below that"
                + _instead(above, path[len(above) :], value)
            )
        above = (*above, key)
        before = tree[key] if isinstance(tree, list) else tree.get(key)
        if len(above) == len(path):
            tree[key] = {"degrees": value} if (above, value) == AUTOMATIC else value
            break
        inner = before
        if not isinstance(inner, dict | list):
            inner = tree[key] = {}
            values.origins[above] = where
        tree = inner
    path = above
    if isinstance(before, dict | list):
        for known in [known for known in values.origins if known[: len(path)] == path]:
            del values.origins[known]
    values.origins.pop(path, None)
    values.origins[path] = where


def dotted(path: KeyPath) -> str:
    return one_line(".".join(str(part) for part in path))


def one_line(text: str) -> str:
    """User input shortened for an error message, without line breaks."""
    text = text if len(text) <= 120 else f"{text[:117]}..."
    return text.replace("\n", "\\n")


def as_typed(setting: str) -> str:
    """`key=value` as typed, for an error message; the value is left out if the key, or one inside
    the value, is a secret's.
    """
    key, equals, _ = setting.partition("=")
    words = re.findall(r"\w+", setting)
    return f"{one_line(key)}=..." if equals and _is_secret(words) else one_line(setting)


def _is_secret(names: Iterable[str | int]) -> bool:
    """Whether values under one of these names may be secrets."""
    return any(
        name in ("secrets", "environment") or holds_secret(name)
        for name in names
        if isinstance(name, str)
    )


_WANTED = {
    "model_type": "be a section, that is a mapping of knobs",
    "invalid-json-value": "be text, a number, a list or a mapping",
}


def explain_errors(error: ValidationError, values: Values) -> str:
    """All validation errors, one line each, with their places."""
    lines: dict[tuple[str, str], list[str]] = {}
    for detail in error.errors(include_url=False):
        head, wanted, tail = _explain_one(detail, values)
        ways = lines.setdefault((head, tail), [])
        if wanted not in ways:
            ways.append(wanted)  # a knob of several types is reported once, with all accepted types
    return "\n".join(head + ", or ".join(ways) + tail for (head, tail), ways in lines.items())


def _explain_one(detail: ErrorDetails, values: Values) -> tuple[str, str, str]:
    """The problem with its place, what the value should be, and where to read more; the last two
    are '' if the first is complete.
    """
    # Pydantic inserts names of union members between the keys: keep only the parts that exist in
    # the values.
    path: KeyPath = ()
    for part in detail["loc"][:-1]:
        if get(values.tree, (*path, part)) is not MISSING:
            path = (*path, part)
    full = (*path, *detail["loc"][-1:])
    match detail["type"]:
        case "extra_forbidden":
            return f"{values.origin(full)}: {_unknown_knob(path, full, values)}", "", ""
        case "missing":
            meaning = _knob(full)[1].rstrip(".")
            return f"{values.origin(path)}: `{dotted(full)}` is missing; add it ({meaning})", "", ""
    full = full if get(values.tree, full) is not MISSING else path
    if detail["type"] == "value_error":
        rule = detail["msg"].removeprefix("Value error, ")
        return _explain_rule(rule, full, values), "", ""
    return _explain_value(detail, full, values)


def _unknown_knob(path: KeyPath, full: KeyPath, values: Values) -> str:
    if kinds := kinds_of(_plain(full)):
        return (
            f"`{dotted(full)}` is for kind {' and '.join(kinds)} only; remove it, or set"
            f" `{dotted((*path, 'kind'))}`"
        )
    wrong, nearest = str(full[-1]), nearest_knob(dotted(full), dotted(path))
    kind = (get(values.tree, path) or {}).get("kind")
    own = names_in(_plain(path), kind)
    if wrong.lower() in ELSEWHERE:
        pass
    elif near := difflib.get_close_matches(wrong, own, n=1):
        nearest = dotted((*path, near[0]))
    elif kind and wrong != nearest.rpartition(".")[2]:
        return f"unknown knob `{dotted(full)}`; kind {kind} has {', '.join(own[1:])}"
    return f"unknown knob `{dotted(full)}`; did you mean `{nearest}`?"


def _explain_value(detail: ErrorDetails, full: KeyPath, values: Values) -> tuple[str, str, str]:
    """A value that its knob does not take."""
    kind, given = detail["type"], detail["input"]
    if kind == "unknown_kind":
        full, given = (*full, "kind"), detail["ctx"]["kind"]
        wanted = f"be {detail['ctx']['expected']}"
    elif kind == "union_tag_invalid":
        full, given = (*full, "kind"), detail["ctx"]["tag"]
        wanted = f"be one of {detail['ctx']['expected_tags']}"
    elif kind == "unknown_name":
        wanted = f"be {detail['ctx']['expected']}"
    elif kind == "string_type" and isinstance(given, int | float):
        wanted = "be text: put quotes around it"
    else:
        wanted = _WANTED.get(kind) or re.sub(
            r"^.*? should |, unable to .*| after validation", "", detail["msg"]
        )
    name = _knob(full)[0]
    see = f" (see `ingot explain {name}`)" if name else ""
    shown = "not such a value" if _is_secret(full) and _shown(given) != "null" else _shown(given)
    if given is None and re.match(r"`[^`=]+=`", values.origin(full)):
        shown = "empty"
    return f"{values.origin(full)}: `{dotted(full)}` is {shown}; it should ", wanted, see


def _explain_rule(message: str, path: KeyPath, values: Values) -> str:
    """Rules of sections name their knobs; rules of single knobs begin with their verb."""
    if path and not isinstance(get(values.tree, path), dict):
        return f"{values.origin(path)}: `{dotted(path)}` {message}"
    return "\n".join(located(each, values, path) for each in message.split("\n"))


def located(message: str, values: Values, path: KeyPath) -> str:
    """The message, preceded by the place that set the first knob it names, else the place of
    `path`.
    """
    words = [message.split(" ")[0], *re.findall(r"[a-z_]+(?:\.[a-z0-9_]+)+", message)]
    named = [parse_path(word.split(".")) for word in words]
    own = [values.origins[knob] for knob in named if knob in values.origins]
    return f"{own[0] if own else values.origin(path)}: {message}"


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "a section"
    if isinstance(value, bool | None):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value)[:80]


def _knob(path: KeyPath) -> tuple[str, str]:
    """Name and docstring of the knob at `path`, or of the nearest enclosing one; ('', '') at the
    root.
    """
    known = {knob.plain: knob.doc for knob in all_knobs()}
    name = _plain(path)
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name, known.get(name, "")


def _plain(path: KeyPath) -> str:
    """A knob's name without list indices."""
    return dotted(tuple(part for part in path if not isinstance(part, int)))


@dataclass
class Findings:
    """Results of checks: `wrong` and `unknown` are lines that begin with a place in the recipe.
    `lacking`: those lines of `wrong` that the place where it is to run gives as reasons, which may
    hold at present alone.
    """

    values: Values
    wrong: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    lacking: list[str] = field(default_factory=list)

    def add(self, message: str, knob: str = "", *, lacking: bool = False) -> None:
        """Add an error; `knob` if the message does not name it by its full path."""
        lines = [self._placed(line, knob) for line in message.split("\n")]
        self.wrong += lines
        self.lacking += lines if lacking else []

    def ask(self, check: Callable[..., T], *given: Any, at: str = "") -> T | None:
        """Return the result of `check`; if it raises, record the error and return None."""
        try:
            return check(*given)
        except WrongInput as error:
            self.add(str(error), at)
        except Failed as error:
            self.skip(str(error), at)
        return None

    def skip(self, message: str, knob: str = "") -> None:
        """Record that something could not be checked."""
        self.unknown.append(self._placed(" ".join(message.split()), knob))

    def _placed(self, message: str, knob: str) -> str:
        path = parse_path(knob.split(".")) if knob else ()
        if any(isinstance(part, int) for part in path):  # message texts do not name list items
            return f"{self.values.origin(path)}: {message}"
        return located(message, self.values, path)
