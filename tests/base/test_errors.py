"""Two values that a message calls different are shown as two different texts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.base.errors import SHOWN, differing

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=6,
)


@given(values, values)
def test_the_shown_parts_differ(one: Any, other: Any) -> None:
    if one != other:
        for ways in ((), (lambda value: "same",), (lambda value: str(value)[:3],)):
            left, right = differing(one, other, *ways)
            assert left != right
            assert max(len(left), len(right)) <= SHOWN + len("......")


@pytest.mark.parametrize(
    ("one", "other", "shown"),
    [
        (0.1234564, 0.1234561, ("0.1234564", "0.1234561")),
        (1.0, 2.0, ("1", "2")),
        ("1", 1, ("'1'", "1")),
        (["a, b"], ["a", "b"], ("['a, b']", "['a', 'b']")),
        ("x" * 300, "x" * 300 + "y", ("..." + "x" * 50, "..." + "x" * 50 + "y")),
    ],
)
def test_the_shortest_way_that_tells_them_apart(one: Any, other: Any, shown: Any) -> None:
    def short(value: Any) -> str:
        if isinstance(value, float):
            return f"{value:.6g}"
        return ", ".join(value) if isinstance(value, list) else str(value)

    assert differing(one, other, short) == shown
