"""Errors travel between processes as they are; two values that a message calls different are shown
as two different texts.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.base.errors import (
    SHOWN,
    Failed,
    IngotError,
    Stopped,
    WrongInput,
    differing,
)

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


@pytest.mark.parametrize(
    "error",
    [
        WrongInput("no"),
        Failed("full"),
        Stopped("stopped", signum=15, committed=True),
        Stopped("stopped", signum=15, committed=False),
    ],
)
def test_an_error_comes_out_of_another_process_as_it_was(error: IngotError) -> None:
    """A pool of processes hangs on one that cannot be unpickled."""
    error.add_note("in the pool")
    for other in (*(pickle.loads(pickle.dumps(error, n)) for n in range(6)), copy.copy(error)):
        assert (type(other), str(other)) == (type(error), str(error))
        assert (other.exit_code, other.__notes__) == (error.exit_code, error.__notes__)
