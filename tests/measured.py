"""Differences that tests measure, kept for `python -m tests.families`, which writes their largest
down; in any other run they are compared with their bounds and forgotten.
"""

from __future__ import annotations

from torch import Tensor

KEPT: dict[str, float] | None = None
"""Of the test that runs: the largest difference of each kind; None where nobody asks."""


def measured(difference: float, kind: str = "") -> float:
    """The difference itself."""
    if KEPT is not None:
        KEPT[kind] = max(KEPT.get(kind, 0.0), difference)
    return difference


def largest(found: Tensor, wanted: Tensor, kind: str = "") -> float:
    """The largest difference of two tensors of one shape; infinite where one is no number."""
    assert found.shape == wanted.shape
    difference = (found - wanted).detach().abs().nan_to_num(float("inf"), float("inf"))
    return measured(float(difference.max()), kind)
