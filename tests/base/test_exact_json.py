"""JSON by orjson is that of the standard library, byte for byte and value for value."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ingot.base.exact_json import compact_json, parse_json

TEXTS = [
    '{"a":[1,-0,null,true,"b"],"a":[2]}',
    "[123456789012345678901, -9223372036854775809, 18446744073709551615]",
    "[1.0, -0.0, 1e16, 1E5, 0.1, 1e400, NaN]",
    '["\\ud800", "\\ud83d\\ude00", "\\u2028"]',
    f'"{"".join(map(chr, range(0x80, 0x300)))}"',
]
VALUES: list[Any] = [
    {"b": 1, "a": {"\x7f": '\x00\x1f\n"\\/é\u2028🔥'}, "🔥": None, "\uffff": 2, "A": True},
    {"floats": [1e16, 1e-7, 0.1, -0.0, 5.0]},
    {"large": 2**70, "exact": 2**64 - 1, "less": -(2**63) - 1},
    {"half": "\ud800"},
    {1: "a number as a key", "x": ("a", "tuple")},
]


@pytest.mark.parametrize("text", TEXTS)
def test_values_are_those_of_the_standard_library(text: str) -> None:
    assert repr(parse_json(text)) == repr(json.loads(text))


@pytest.mark.parametrize("value", VALUES)
def test_texts_are_those_of_the_standard_library(value: Any) -> None:
    options: dict[str, Any] = {"ensure_ascii": False, "separators": (",", ":")}
    assert compact_json(value) == json.dumps(value, **options)
    if all(isinstance(key, str) for key in value):
        assert compact_json(value, sort_keys=True) == json.dumps(value, sort_keys=True, **options)


@pytest.mark.parametrize("text", ["", "[1", '{"a": }', "[1] 2"])
def test_what_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="column"):
        parse_json(text)


@pytest.mark.parametrize(
    ("value", "error"), [(float("nan"), ValueError), ({1, 2}, TypeError), (b"a", TypeError)]
)
def test_what_json_cannot_hold_is_refused(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        compact_json([value])
