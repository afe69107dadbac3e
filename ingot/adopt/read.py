"""Reads configuration files of other projects as plain entries: JSON, YAML, NAME=value lines,
command lines. The meaning of keys is not known here.

All values are text, as in the file. Secrets are dropped at once, so nothing made from entries can
contain one.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from yaml.constructor import ConstructorError

from ingot.base.errors import WrongInput
from ingot.config.documents import MERGE, compose
from ingot.config.values import one_line

Form = Literal["mapping", "environment", "flags"]
Given = str | tuple[str, ...]
NULLS = ("", "null", "none", "~")
MOST_BYTES, MOST_ENTRIES, DEEPEST = 1_000_000, 10_000, 20

_VARIABLE = re.compile(r"(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)\s*=(.*)")
_QUOTED = re.compile(r"""(['"])(.*?)\1(?:\s+#.*)?""")
_FLAG = re.compile(r"--?[A-Za-z]")
_COMMENT = re.compile(
    r"""(?<!\S)#[^\n]*|((?:'[^']*'|"(?:\\.|[^"\\])*"|\\[^\r\n]|[^\s'"\\])+)""", re.DOTALL
)
"""A comment of a shell, which ends with its line; or a word, which may hold a `#` (`run#7`)."""
_SECRET = re.compile(
    r"(?i)(^|[-_.])(token|password|passwd|api[-_]?key|secret|secret[-_]key|access[-_]key|credentials?)$"
)
_SPECIAL = re.compile(r"(?i)(pad|eos|bos|unk|sep|cls|mask)_token$")
_TOKEN = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}|\b(?:sk|ghp|github_pat)[-_][A-Za-z0-9_-]{20,}|\bAIza[\w-]{30,}|-----BEGIN"
    r" [A-Z ]*PRIVATE KEY"
)


@dataclass(frozen=True)
class GivenEntry:
    """One key with its value and place (`gcp.env:3`). Nested keys are dotted, mappings in a list
    numbered.
    """

    key: str
    value: Given
    where: str

    @property
    def empty(self) -> bool:
        """Whether the key has no value."""
        return isinstance(self.value, str) and self.value.strip().lower() in NULLS


@dataclass(frozen=True)
class File:
    """The entries of one file. `secrets`: entries whose values were secrets and were dropped."""

    path: str
    form: Form
    entries: tuple[GivenEntry, ...]
    secrets: tuple[GivenEntry, ...] = ()


def read_file(path: Path) -> File:
    """Read one file; its format is detected from its content, not its name.

    Raises:
        WrongInput: there is no such file, it has none of the formats, or it contains a secret in a
            place where none is allowed.
    """
    text = _text(path)
    lines = [
        line.strip()
        for line in text.splitlines()
        if line.strip() and not line.strip().startswith("#")
    ]
    if not lines:
        raise WrongInput(f"{path} is empty; give the configuration of another project")
    form: Form = "mapping"
    if lines[0].startswith("{"):
        entries = _from_json(text, path)
    elif _VARIABLE.match(lines[0]):
        form, entries = "environment", list(_from_environment(text, path))
    elif _FLAG.match(lines[0]):
        form, entries = "flags", list(_from_flags(text, path))
    else:
        found = _from_yaml(
            text,
            path,
            required=not any(_FLAG.match(word) for line in lines for word in line.split()),
        )
        if found is None:
            form, entries = "flags", list(_from_flags(text, path))
        else:
            entries = found
    return _without_secrets(File(str(path), form, tuple(entries)))


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise WrongInput(
                f"{path} has more than {MOST_BYTES:,} bytes and is no configuration; check the path"
            )
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise WrongInput(
            f"{path} does not exist; check the path (flags come in a file too)"
        ) from None
    except IsADirectoryError:
        raise WrongInput(f"{path} is a folder; give the files in it") from None
    except UnicodeDecodeError as error:
        raise WrongInput(f"{path} is not UTF-8 (byte {error.start}); save it as UTF-8") from None
    except (OSError, ValueError) as error:  # ValueError: a path with a null byte
        raise WrongInput(
            f"{path} cannot be read ({getattr(error, 'strerror', None) or error}); check the path"
            " and its permissions"
        ) from None


def _without_secrets(file: File) -> File:
    """Drop the values of entries whose names mark them as secrets; refuse secrets on a command line
    or under other names.
    """
    kept: list[GivenEntry] = []
    secrets: list[GivenEntry] = []
    for entry in file.entries:
        if _SECRET.search(entry.key) and not _SPECIAL.search(entry.key):
            if file.form == "flags":
                raise WrongInput(
                    f"{entry.where}: {one_line(entry.key)} puts a secret on a command line, where"
                    " everybody on the machine can read it; remove it, and export HF_TOKEN or"
                    " WANDB_API_KEY instead"
                )
            if not entry.empty:
                secrets.append(GivenEntry(entry.key, "", entry.where))
            continue
        if any(
            _TOKEN.search(text)
            for text in (
                entry.key,
                *([entry.value] if isinstance(entry.value, str) else entry.value),
            )
        ):
            raise WrongInput(
                f"{entry.where}: what stands there looks like an access token, which has no place"
                " in a configuration; take it out, and withdraw it if others can read the file"
            )
        kept.append(entry)
    return File(file.path, file.form, tuple(kept), tuple(secrets))


def _from_environment(text: str, path: Path) -> Iterator[GivenEntry]:
    """Errors do not show the line, which might contain a token."""
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        found = _VARIABLE.fullmatch(line)
        if found is None:
            raise WrongInput(f"{path}:{number}: the line is not NAME=value; mend or remove it")
        value = found[2].strip()
        quoted = _QUOTED.fullmatch(value)
        value = quoted[2] if quoted else re.split(r"(?:^|\s)#", value, maxsplit=1)[0].rstrip()
        yield GivenEntry(found[1], value, f"{path}:{number}")


def _from_flags(text: str, path: Path) -> Iterator[GivenEntry]:
    """Words before the first flag (`python train.py`) are ignored; a flag without a value is
    `true`.
    """
    try:
        bare = _COMMENT.sub(lambda found: found[1] or "", text)
        words = shlex.split(re.sub(r"\\\r?\n", " ", bare))
    except ValueError as error:
        raise WrongInput(
            f"{path}: not a command line ({str(error).lower()}); mend the quotes"
        ) from None
    flags: list[tuple[str, list[str]]] = []
    for word in words:
        if _FLAG.match(word):
            flag, equals, value = word.partition("=")
            flags.append((flag, [value] if equals else []))
        elif flags:
            flags[-1][1].append(word)
    if len(flags) > MOST_ENTRIES:
        raise WrongInput(
            f"{path} has more than {MOST_ENTRIES:,} flags and is no command line; check the path"
        )
    for flag, given in flags:
        yield GivenEntry(
            flag, "true" if not given else given[0] if len(given) == 1 else tuple(given), str(path)
        )


def _from_json(text: str, path: Path) -> list[GivenEntry]:
    try:
        tree = json.loads(
            text, parse_int=str, parse_float=str, parse_constant=str, object_pairs_hook=tuple
        )
    except json.JSONDecodeError as error:
        if "\n{" in text.lstrip() or error.msg == "Extra data":
            raise WrongInput(
                f"{path}:{error.lineno}: more than one JSON object; give the one with the"
                " configuration"
            ) from None
        raise WrongInput(
            f"{path}:{error.lineno}: not valid JSON ({error.msg}); mend that line"
        ) from None
    except RecursionError:
        raise WrongInput(f"{path}: nested too deeply for a configuration; check the path") from None
    found: list[GivenEntry] = []
    _flatten_pairs(tree, "", str(path), found)
    return found


def _flatten_pairs(
    pairs: tuple[tuple[str, Any], ...],
    prefix: str,
    where: str,
    found: list[GivenEntry],
    depth: int = 0,
) -> None:
    """JSON objects are passed as tuples of pairs, so that duplicate keys are detected."""
    _check_size(found, depth, where)
    for key, value in pairs:
        name = f"{prefix}{key}"
        if isinstance(value, tuple) and value:
            _flatten_pairs(value, f"{name}.", where, found, depth + 1)
        elif isinstance(value, list) and value and all(isinstance(item, tuple) for item in value):
            for number, item in enumerate(value):
                _flatten_pairs(item, f"{name}.{number}.", where, found, depth + 1)
        elif isinstance(value, list):
            found.append(
                GivenEntry(
                    name, tuple(item if isinstance(item, str) else "{...}" for item in value), where
                )
            )
        else:
            found.append(
                GivenEntry(
                    name,
                    (
                        value
                        if isinstance(value, str)
                        else {True: "true", False: "false"}.get(value, "")
                        if value != ()
                        else ""
                    ),
                    where,
                )
            )


def _from_yaml(text: str, path: Path, *, required: bool) -> list[GivenEntry] | None:
    """None if it is not a mapping, unless `required`, which makes that an error."""
    try:
        node = compose(text)
        if isinstance(node, yaml.MappingNode):
            found: list[GivenEntry] = []
            _flatten_node(node, "", path, found)
            return found
    except yaml.YAMLError as error:
        if required:
            mark = getattr(error, "problem_mark", None)
            line = f":{mark.line + 1}" if mark else ""
            raise WrongInput(
                f"{path}{line}: not valid YAML"
                f" ({getattr(error, 'problem', None) or 'odd characters'}); mend that line"
            ) from None
    except (RecursionError, ValueError):
        raise WrongInput(f"{path}: nested too deeply for a configuration; check the path") from None
    if required:
        raise WrongInput(
            f"{path} is no configuration of another project: neither JSON, YAML, NAME=value lines"
            " nor a command line; check the path"
        )
    return None


def _flatten_node(
    node: yaml.MappingNode, prefix: str, path: Path, found: list[GivenEntry], depth: int = 0
) -> None:
    _check_size(found, depth, str(path))
    for key, value in _items(node):
        where = f"{path}:{key.start_mark.line + 1}"
        name = f"{prefix}{_name(key)}"
        if isinstance(value, yaml.MappingNode) and value.value:
            _flatten_node(value, f"{name}.", path, found, depth + 1)
        elif isinstance(value, yaml.SequenceNode) and _are_mappings(value.value):
            for number, item in enumerate(value.value):
                _flatten_node(item, f"{name}.{number}.", path, found, depth + 1)
        elif isinstance(value, yaml.SequenceNode):
            found.append(
                GivenEntry(
                    name,
                    tuple(
                        item.value if isinstance(item, yaml.ScalarNode) else "{...}"
                        for item in value.value
                    ),
                    where,
                )
            )
        else:
            found.append(
                GivenEntry(name, value.value if isinstance(value, yaml.ScalarNode) else "", where)
            )


def _items(node: yaml.MappingNode) -> list[tuple[yaml.Node, yaml.Node]]:
    """The keys of a mapping with their values; before its own, what `<<: *base` adds to them. They
    take the place of the mapping's, since many may be based on it.
    """
    own: list[tuple[yaml.Node, yaml.Node]] = []
    merged: dict[str, tuple[yaml.Node, yaml.Node]] = {}
    for key, value in node.value:
        if key.tag != MERGE:
            own.append((key, value))
            continue
        for base in reversed(value.value if isinstance(value, yaml.SequenceNode) else [value]):
            if not isinstance(base, yaml.MappingNode):
                raise ConstructorError(None, None, "<< is for mappings", base.start_mark)
            merged |= {_name(pair[0]): pair for pair in _items(base)}
    given = {_name(key) for key, _ in own}
    items = [pair for name, pair in merged.items() if name not in given] + own
    node.value = items
    return items


def _name(key: yaml.Node) -> str:
    return str(key.value) if isinstance(key, yaml.ScalarNode) else "?"


def _are_mappings(items: list[yaml.Node]) -> bool:
    return bool(items) and all(isinstance(item, yaml.MappingNode) for item in items)


def _check_size(found: list[GivenEntry], depth: int, where: str) -> None:
    if depth > DEEPEST or len(found) > MOST_ENTRIES:
        raise WrongInput(
            f"{where}: nested too deeply, or too long, for a configuration; check the path"
        )
