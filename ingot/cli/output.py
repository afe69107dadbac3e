"""Results of verbs as JSON: one object on stdout, the same form for all (docs/JSON.md)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import PurePath
from typing import Annotated, Any

import typer

SCHEMA = 1

AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


def print_json(verb: str, /, **content: Any) -> None:
    """Print `content` with the schema's number and the verb; messages stay on stderr. What JSON has
    no number for (NaN, infinity) is null.
    """
    told = {"schema": SCHEMA, "verb": verb, **plain(content)}
    print(json.dumps(told, indent=1, ensure_ascii=False, allow_nan=False))


def plain(value: Any) -> Any:
    """`value` in what JSON has: text, numbers, lists, mappings."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, PurePath):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    return value
