"""JSON of records and of stored documents: by orjson where it does what the standard library does,
else by that. orjson rounds integers of more than 64 bits, refuses some values that Python takes,
and writes floats otherwise.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orjson

ROUNDED_FROM = 2.0**63
CONTAINERS = (dict, list, tuple)
EXACT = {str, int, bool, type(None)}


def as_object(value: Any) -> dict[str, Any]:
    """The value if it is a JSON object, else an empty one."""
    return value if isinstance(value, dict) else {}


def read_object(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None if there is no such file, or it holds none."""
    try:
        value = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def parse_json(text: str) -> Any:
    """The value of a JSON text, as `json.loads` gives it.

    Raises:
        ValueError: it is no JSON.
        RecursionError: it is too deep.
    """
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return json.loads(text)
    return json.loads(text) if is_rounded(value) else value


def compact_json(value: Any, *, sort_keys: bool = False) -> str:
    """The value as JSON without white space, as `json.dumps` writes it.

    Raises:
        TypeError: something in it is no JSON value.
        ValueError: a number in it is not finite.
        RecursionError: it is too deep.
    """
    if _is_plain(value):
        try:
            return orjson.dumps(value, option=orjson.OPT_SORT_KEYS if sort_keys else None).decode()
        except orjson.JSONEncodeError:
            pass  # half a surrogate pair, a large integer
    return json.dumps(
        value, sort_keys=sort_keys, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )


def is_rounded(value: Any) -> bool:
    """Whether orjson may have read an integer as a float."""
    kind = type(value)
    if kind not in CONTAINERS:
        return kind is float and abs(value) >= ROUNDED_FROM
    items = value.values() if kind is dict else value
    return not EXACT.issuperset(map(type, items)) and any(map(is_rounded, items))


def _is_plain(value: Any) -> bool:
    """Whether a value is made of lists, dicts, texts and integers alone."""
    kind = type(value)
    if kind not in CONTAINERS:
        return kind in EXACT
    items = value.values() if kind is dict else value
    return EXACT.issuperset(map(type, items)) or all(map(_is_plain, items))
