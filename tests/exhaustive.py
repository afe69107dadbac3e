"""Whether this is `make test-all`, and how many examples a property is tried on by that."""

from __future__ import annotations

import os

EXHAUSTIVE = bool(os.environ.get("TEST_EXHAUSTIVE"))


def examples(few: int, many: int) -> int:
    """Hypothesis draws others in each run, so `few` of them add up over the runs."""
    return many if EXHAUSTIVE else few
