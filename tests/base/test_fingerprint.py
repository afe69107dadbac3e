from __future__ import annotations

import subprocess
import sys

import pytest

from ingot.base.fingerprint import canonical_json, fingerprint


def test_equal_values_have_equal_fingerprints_whatever_their_order_and_process() -> None:
    value = {"b": [1, 2.5, None, True], "a": {"ü": "x", "y": 1}}
    same = {"a": {"y": 1, "ü": "x"}, "b": [1, 2.5, None, True]}
    assert fingerprint(value) == fingerprint(same)
    code = f"from ingot.base.fingerprint import fingerprint; print(fingerprint({value!r}))"
    assert subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip() == fingerprint(value)
    assert len(fingerprint(value)) == 16


@pytest.mark.parametrize(
    ("one", "other"), [([1, 2], [2, 1]), (1, "1"), ({"a": None}, {}), ("a", "A"), (0.1, 0.2)]
)
def test_other_values_have_other_fingerprints(one: object, other: object) -> None:
    assert fingerprint(one) != fingerprint(other)


def test_nan_has_no_fingerprint() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json({"a": float("nan")})
