"""How many examples a property is tried on: some in `make test`, many in `make test-all`."""

from __future__ import annotations

import os

EXHAUSTIVE = bool(os.environ.get("TEST_EXHAUSTIVE"))


def examples(few: int, many: int) -> int:
    """Hypothesis draws others in each run, so `few` of them add up over the runs."""
    return many if EXHAUSTIVE else few
