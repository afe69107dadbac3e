"""Another project as a table (key -> knob and conversion, or why it is lost); and the draft of the
recipe made from it, with notes.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from ingot.adopt.read import File, Form, Given, GivenEntry
from ingot.base.errors import WrongInput, differing
from ingot.config.values import MISSING, KeyPath, Values, get, one_line, parse_path, set_value

Kind = Literal["missing", "unchecked", "fill", "clash", "changed", "lost", "unknown"]
MOST_REFERENCES = 20
LONGEST = 63  # bits of an integer in a recipe


@dataclass(frozen=True)
class KeyRow:
    """One key of another project.

    With a `knob`, its value is converted by `read` and set there; without one, the key is either
    `lost`, for the given reason, or handled by the project's `build`.
    """

    key: str
    """Dotted where it is nested; `NAME.*` is all that is nested in NAME."""
    knob: str = ""
    read: Callable[[Given], Any] = lambda given: text(given)
    also: tuple[str, ...] = ()
    """Other spellings."""
    default: str | None = None
    """The project's default for the key."""
    changed: str = ""
    """How the knob's meaning differs; noted if the key is given."""
    lost: str = ""
    """Why it cannot be converted."""
    idle: tuple[str, ...] = ()
    """Values, in lower case, that have no effect, so that nothing is lost."""
    null: str = ""
    """What a key that is given without a value means there, if not its default."""


class GivenKeys:
    """The values in the files of one project, by key. Of duplicate keys the last one counts."""

    def __init__(self, rows: Iterable[KeyRow], files: Sequence[File], draft: Draft) -> None:
        self.rows = {row.key: row for row in rows}
        self.files = files
        self.spelt = spellings(self.rows.values())
        self.given: dict[str, GivenEntry] = {}
        for file in files:
            for entry in file.entries:
                key = self.spelt.get(canonical(entry.key))
                every = f"{entry.key.partition('.')[0]}.*"
                if key is None and every in self.spelt:
                    self.given.setdefault(every, entry)
                elif key is None:
                    draft.note(
                        "unknown",
                        entry.key,
                        f"is not known; the nearest key is {nearest(entry.key, self.spelt)}",
                    )
                elif key in self.given and self.given[key].value != entry.value:
                    before = self.given[key]
                    was, now = differing(before.value, entry.value, shown)
                    draft.note(
                        "clash",
                        entry.key,
                        f"{before.where} says {was}, {entry.where} says {now}; the last one is"
                        " taken",
                    )
                    self.given[key] = entry
                else:
                    self.given[key] = entry
            for entry in file.secrets:
                draft.note(
                    "lost",
                    entry.key,
                    "a secret stays out of recipes: keep it in the environment, or in Secret"
                    " Manager (cloud.secrets)",
                )
        self.nulls = {key: entry for key, entry in self.given.items() if entry.empty}
        self.given = {
            key: _resolved(entry, self.given, self.spelt)
            for key, entry in self.given.items()
            if key not in self.nulls
        }

    def has(self, *keys: str) -> bool:
        """Whether one of the keys is given with a value."""
        return any(key in self.given for key in keys)

    def form(self, form: Form) -> bool:
        return any(file.form == form for file in self.files)

    def get(self, key: str) -> Any:
        """The key's value as converted by its row; if it is not given, the default or None.

        Raises:
            WrongInput: the value is invalid for the row.
        """
        row, entry = self.rows[key], self.given.get(key)
        if entry is None and row.default is None:
            return None
        value = entry.value if entry is not None else row.default
        assert value is not None
        try:
            return row.read(value)
        except ValueError as error:
            where = f"{entry.where}: {one_line(entry.key)}" if entry is not None else key
            raise WrongInput(f"{where} is {shown(value)}; it should be {error}") from None

    def name(self, key: str) -> str:
        """The key as spelt in the file, for notes."""
        return self.given[key].key if key in self.given else key

    def where(self, *keys: str) -> str:
        """The place of the first of the keys that is given."""
        return next(
            (self.given[key].where for key in keys if key in self.given), self.files[0].path
        )


@dataclass
class Draft:
    """The recipe under construction: raw values with the place that each comes from, remarks on
    values, and notes.
    """

    values: Values = field(default_factory=Values)
    remarks: dict[KeyPath, str] = field(default_factory=dict)
    notes: dict[Kind, list[str]] = field(default_factory=dict)

    def note(self, kind: Kind, what: str, about: str) -> None:
        line = f"{one_line(what)}: {about}"
        if line not in self.notes.setdefault(kind, []):
            self.notes[kind].append(line)

    def put(self, knob: str, value: Any, remark: str, where: str = "") -> None:
        """Set a knob. The remark says in the recipe where the value comes from."""
        if isinstance(value, int) and value.bit_length() > LONGEST:
            raise WrongInput(
                f"{where or remark}: {knob} would be beyond {LONGEST} bits; lower the numbers that"
                " it comes from"
            )
        path = parse_path(knob.split("."))
        before = get(self.values.tree, path)
        if before is not MISSING and before != value:
            self.note(
                "clash",
                f"{self.remarks[path]} and {remark}",
                f"say {before} and {value} for {knob}; the last one is taken",
            )
        set_value(self.values, path, value, where or remark)
        self.remarks[path] = remark

    def put_from(self, sheet: GivenKeys, key: str, knob: str, *value: Any) -> None:
        """Set a knob from one key: to `value` if given, else to the key's value."""
        self.put(knob, value[0] if value else sheet.get(key), key, sheet.where(key))

    def fixed(self, **knobs: Any) -> None:
        """Set values that were hard-coded in the project; dots in knob names are written as
        `__`.
        """
        for knob, value in knobs.items():
            self.put(knob.replace("__", "."), value, "fixed there")


@dataclass(frozen=True)
class Project:
    """Another project: its keys, a description for recognising it, and code for keys that only
    have a meaning together (`build`, run after the table).
    """

    title: str
    looks: str
    rows: tuple[KeyRow, ...]
    build: Callable[[GivenKeys, Draft], None]

    def knows(self, file: File) -> int:
        """How many keys of a file belong to this project."""
        return len({canonical(entry.key) for entry in file.entries} & spellings(self.rows).keys())


def apply(sheet: GivenKeys, draft: Draft) -> None:
    """Set every knob that the table determines on its own."""
    for key, row in sheet.rows.items():
        entry = sheet.given.get(key)
        if key in sheet.nulls and row.default is not None:
            meant = f" ({row.null} there)" if row.null else ""
            about = f"has no value{meant}; {row.default}, its default there, stands for it"
            draft.note("fill", sheet.nulls[key].key, about)
        if row.knob and (entry is not None or row.default is not None):
            value = sheet.get(key)
            if value is not None:
                draft.put(
                    row.knob,
                    value,
                    sheet.name(key) if entry else f"{key}, its default there",
                    sheet.where(key),
                )
        if entry is None or (isinstance(entry.value, str) and entry.value.lower() in row.idle):
            continue
        if row.lost:
            draft.note("lost", entry.key, row.lost)
        elif row.changed:
            draft.note("changed", entry.key, row.changed)


def canonical(key: str) -> str:
    """The single spelling of a long flag used in tables: `--num_classes` becomes
    `--num-classes`.
    """
    return f"--{key[2:].replace('_', '-').lower()}" if key.startswith("--") else key


def spellings(rows: Iterable[KeyRow]) -> dict[str, str]:
    """Every spelling of every key -> the key."""
    return {name: row.key for row in rows for name in (row.key, *row.also)}


def _resolved(
    entry: GivenEntry, given: Mapping[str, GivenEntry], spelt: Mapping[str, str]
) -> GivenEntry:
    """Replace `${KEY}` in a value by the value of KEY in the same files, if it has one."""
    if not isinstance(entry.value, str) or not 0 < entry.value.count("${") <= MOST_REFERENCES:
        return entry

    def value_of(found: re.Match[str]) -> str:
        other = given.get(spelt.get(found[1], ""))
        return (
            other.value
            if other is not None and isinstance(other.value, str) and len(other.value) < 1000
            else found[0]
        )

    return replace(entry, value=re.sub(r"\$\{([\w.]+)\}", value_of, entry.value))


def nearest(key: str, known: Iterable[str]) -> str:
    folded = {name.lower().lstrip("-"): name for name in known}
    return folded[
        difflib.get_close_matches(key.lower().lstrip("-")[:100], folded, n=1, cutoff=0.0)[0]
    ]


def shown(value: Given) -> str:
    return one_line(repr(value)) if isinstance(value, str) else "a list"


def text(given: Given) -> str:
    if isinstance(given, tuple):
        raise ValueError("one value, not a list")
    return given.strip()


def single(given: Given) -> str:
    """One value, or a list of one."""
    found = (given,) if isinstance(given, str) else given
    if len(found) != 1:
        raise ValueError(f"one of {', '.join(found) or 'them'}, since losses are not added up")
    return text(found[0])


def whole(given: Given) -> int:
    value = number(given)
    if value != int(value) or abs(value) >= 2**53:
        raise ValueError("a whole number")
    return int(value)


def number(given: Given) -> float:
    try:
        value = float(text(given).replace("_", ""))
    except ValueError:
        raise ValueError("a number") from None
    if not math.isfinite(value):
        raise ValueError("a finite number")
    return value


def truth(given: Given) -> bool:
    value = text(given).lower()
    if value in ("true", "yes", "1", "on", "t", "y"):
        return True
    if value in ("false", "no", "0", "off", "f", "n"):
        return False
    raise ValueError("true or false")


def texts(given: Given) -> list[str]:
    """A list, a list in JSON, or words separated by commas."""
    if isinstance(given, tuple):
        return list(given)
    try:
        found = json.loads(given)
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, list):
        if not all(isinstance(item, str) for item in found):
            raise ValueError("a list of texts")
        return found
    return [
        word
        for word in (part.strip().strip("'\"") for part in given.strip().strip("[]()").split(","))
        if word
    ]


def ratio(small: float, large: float) -> float:
    """A quotient, rounded to 12 significant digits to remove floating-point noise."""
    return float(f"{small / large:.12g}")


def run_name(*candidates: str | None) -> str:
    """The first of the candidates that makes a valid run name, with invalid characters replaced."""
    for candidate in candidates:
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", candidate or "")[:100].strip("-._")
        if name:
            return name
    return "adopted"


MOVED = {
    "roberta-base": "FacebookAI/roberta-base",
    "roberta-large": "FacebookAI/roberta-large",
    "xlm-roberta-base": "FacebookAI/xlm-roberta-base",
    "xlm-roberta-large": "FacebookAI/xlm-roberta-large",
    "distilroberta-base": "distilbert/distilroberta-base",
    "bert-base-uncased": "google-bert/bert-base-uncased",
    "bert-base-cased": "google-bert/bert-base-cased",
    "bert-large-uncased": "google-bert/bert-large-uncased",
    "distilbert-base-uncased": "distilbert/distilbert-base-uncased",
    "t5-small": "google-t5/t5-small",
    "t5-base": "google-t5/t5-base",
    "t5-large": "google-t5/t5-large",
    "t5-3b": "google-t5/t5-3b",
    "t5-11b": "google-t5/t5-11b",
    "cnn_dailymail": "abisee/cnn_dailymail",
    "xsum": "EdinburghNLP/xsum",
    "samsum": "Samsung/samsum",
    "ag_news": "fancyzhx/ag_news",
    "hellaswag": "Rowan/hellaswag",
}
"""Old names without an owner, of models and data sets that were moved on the hub."""
OWNERS = {
    "Llama-": "meta-llama",
    "Meta-Llama-": "meta-llama",
    "Qwen": "Qwen",
    "Mistral-": "mistralai",
}
"""The owners of models by prefix of their names."""
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


class HubName(NamedTuple):
    """`source` as in a recipe; `moved`: the given name if the hub now has another one."""

    source: str
    moved: str = ""


def hub_source(name: str) -> HubName:
    """`hf:ORG/NAME` for a name on the hub; a path or an address is unchanged."""
    name = name.removeprefix("hf:")
    if name in MOVED:
        return HubName(f"hf:{MOVED[name]}", name)
    for prefix, owner in OWNERS.items():
        if name.startswith(prefix) and _NAME.fullmatch(name) and "/" not in name:
            return HubName(f"hf:{owner}/{name}", name)
    return HubName(f"hf:{name}" if _NAME.fullmatch(name) else name)
