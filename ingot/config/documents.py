"""YAML as recipes are written in it: nodes that know their lines, and the values that they hold."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import yaml
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError, SafeConstructor
from yaml.resolver import Resolver

MERGE = "tag:yaml.org,2002:merge"
"""The tag of the key `<<`."""
_DEEPEST = 1000
MOST_REPEATED = 20_000
"""Nodes that the aliases of a document may add to those that stand in it."""
_NOBODYS = range(0xF0000, 0xFFFFE)
"""Letters of nobody's, one of which stands for a `#` that begins no comment."""
_Parser: Any = getattr(yaml, "CSafeLoader", None)
"""libyaml's, ten times as fast as PyYAML's own, where PyYAML was built with it. It recurses on C's
stack, which nothing guards.
"""
_OTHERWISE = re.compile(r"\\|^[ ?:-]*'':|^.{100}", re.MULTILINE)
"""Where PyYAML's own dumper may write something else than libyaml: characters that are escaped, an
empty key and a long one.
"""


_EXPONENT = re.compile(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+\Z")


class Exponent(str):
    """`1e-5`, not quoted: a number, as in YAML 1.2 and in Python, where its place takes numbers; a
    text, as in YAML 1.1, where it takes texts (a commit may be called 7e10).
    """


def with_numbers(value: Any) -> Any:
    """A value of a place that takes both, with numbers for what was written as `Exponent`."""
    if isinstance(value, Exponent):
        return float(value)
    if isinstance(value, dict):
        return {key: with_numbers(item) for key, item in value.items()}
    return [with_numbers(item) for item in value] if isinstance(value, list) else value


class Constructor(SafeConstructor, Resolver):
    """Makes values of nodes; an integer beyond 64 bits, which later code cannot handle, is none."""

    def __init__(self) -> None:
        SafeConstructor.__init__(self)
        Resolver.__init__(self)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        number = super().construct_yaml_int(node)
        if number.bit_length() > 63:
            raise ConstructorError(None, None, "a whole number beyond 64 bits", node.start_mark)
        return number

    def construct_yaml_str(self, node: yaml.ScalarNode) -> str:
        text: str = super().construct_yaml_str(node)
        return Exponent(text) if not node.style and _EXPONENT.fullmatch(text) else text


Constructor.add_constructor("tag:yaml.org,2002:int", Constructor.construct_yaml_int)  # type: ignore[type-var]
Constructor.add_constructor("tag:yaml.org,2002:str", Constructor.construct_yaml_str)  # type: ignore[type-var]


def compose(text: str) -> yaml.Node | None:
    """The node of a document, None of an empty one.

    A text that may be nested deeply (a level takes a bracket or a column) is read by PyYAML's own
    parser, which a depth cannot crash; so is one with an error, for its messages.

    Raises:
        yaml.YAMLError: it is not YAML, or a few lines whose aliases stand for millions.
        RecursionError: it is nested too deeply, or an alias holds itself.
    """
    node = _parsed(text)
    if node is not None:
        _count(node, {})
    return node


def _parsed(text: str) -> yaml.Node | None:
    brackets = text.count("[") + text.count("{")
    columns = max(map(len, text.splitlines()), default=0)
    if _Parser is not None and brackets + columns < _DEEPEST:
        with contextlib.suppress(yaml.YAMLError):
            return yaml.compose(text, Loader=_Parser)
    return yaml.compose(text, Loader=yaml.SafeLoader)


def _count(node: yaml.Node, counts: dict[int, int]) -> int:
    """The nodes that a node stands for with its aliases written out. What has been counted is in
    `counts`, by identity: an alias is the node that it names. Raises ComposerError beyond
    `MOST_REPEATED`.
    """
    if id(node) in counts:
        return counts[id(node)]
    whole = 1
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            whole += _count(key, counts) + _count(value, counts)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            whole += _count(item, counts)
    counts[id(node)] = whole
    if whole - len(counts) > MOST_REPEATED:
        raise ComposerError(None, None, f"aliases that stand for {whole:,} values", node.start_mark)
    return whole


def value_of(text: str) -> Any:
    """The value that a text stands for.

    Raises:
        yaml.YAMLError, ValueError, RecursionError: none; a date such as 2001-99-99 and a number of
            5,000 digits are values for no one.
    """
    node = compose(text)
    return None if node is None else Constructor().construct_document(node)


def typed_value(text: str) -> Any:
    """The value of a text that was typed for one setting, where a `#` is a letter like others:
    only a list, a mapping and a block of several lines have comments. Any other text of several
    lines is itself the value, unless all of it is in quotes: YAML would fold its lines into one.
    Raises as `value_of` does.
    """
    stand_in = _lacking(text)
    letters = text.replace("#", stand_in)
    if len(text.strip().splitlines()) > 1:
        node = _composed(text)
        if isinstance(node, yaml.CollectionNode) or _style(node) in ("|", ">"):
            return value_of(text)
        if not _style(_composed(letters)):
            return text
    return _with_hashes(value_of(letters), stand_in)


def _lacking(text: str) -> str:
    """A letter of nobody's that a text neither has nor spells in hexadecimal digits."""
    small = text.lower()
    return next(chr(one) for one in _NOBODYS if chr(one) not in text and f"{one:x}" not in small)


def _composed(text: str) -> yaml.Node | None:
    """The node of a document; None of an empty one, and of what is no YAML."""
    try:
        return compose(text)
    except yaml.YAMLError:
        return None


def _style(node: yaml.Node | None) -> str | None:
    """What a scalar is written with: quotes, or the sign of a block; nothing if it is plain."""
    return node.style if isinstance(node, yaml.ScalarNode) else None


def _with_hashes(value: Any, stand_in: str) -> Any:
    if isinstance(value, dict):
        return {
            _with_hashes(key, stand_in): _with_hashes(item, stand_in) for key, item in value.items()
        }
    if isinstance(value, list):
        return [_with_hashes(item, stand_in) for item in value]
    if isinstance(value, str) and stand_in in value:
        return value.replace(stand_in, "#")
    return value


def _quoting(kind: Any) -> Any:
    """A dumper that puts quotes around a text that would be read as an `Exponent`."""
    made: Any = type(kind.__name__, (kind,), {})
    made.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+.0123456789"))
    return made


_PlainDumper = _quoting(yaml.SafeDumper)
_Dumper = _quoting(yaml.CSafeDumper) if hasattr(yaml, "CSafeDumper") else None


def dump(values: Any) -> str:
    """Values of JSON as a document, the same bytes whether libyaml is there or not."""
    if _Dumper is not None:
        text = _dump(values, _Dumper)
        if not _OTHERWISE.search(text):
            return text
    return _dump(values, _PlainDumper)


def _dump(values: Any, dumper: Any) -> str:
    text: str = yaml.dump(values, Dumper=dumper, sort_keys=False, allow_unicode=True)
    return text
