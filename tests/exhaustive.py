"""Whether this is `make test-all`, and how many examples a property is tried on by that."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import TypeVar

EXHAUSTIVE = bool(os.environ.get("TEST_EXHAUSTIVE"))
_Case = TypeVar("_Case")


def some_calls(seed: str) -> range:
    """Numbers of the calls of an action that it is killed at: all, or every third from a start that
    the commit draws.
    """
    first = random.Random(f"{os.environ['TEST_DRAW']} {seed}").randint(1, 3)
    return range(1, 100) if EXHAUSTIVE else range(first, 100, 3)


def some_of(cases: Sequence[_Case], count: int, seed: str) -> list[_Case]:
    """All of the cases of one test, or so many of them as the commit draws."""
    if EXHAUSTIVE:
        return list(cases)
    return random.Random(f"{os.environ['TEST_DRAW']} {seed}").sample(cases, count)


def examples(few: int, many: int) -> int:
    """Hypothesis draws others in each run, so `few` of them add up over the runs."""
    return many if EXHAUSTIVE else few
