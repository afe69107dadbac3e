"""Numbers that may not be known, and sums and products of them. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ingot.plan.ranges import Range


@dataclass(frozen=True)
class Unknown:
    """In place of a number: what would tell it. `wrong`: it never will, for what the recipe asks
    for cannot be had.
    """

    needs: str
    wrong: bool = False


Estimate = Range | Unknown


def ends(one: Range) -> tuple[float, float, float]:
    return one.low, one.likely, one.high


def mapped(one: Range, change: Callable[[float], float]) -> Range:
    """The range of a number that grows with this one."""
    return Range(change(one.low), change(one.likely), change(one.high), one.origin)


def times(one: Estimate, other: Estimate) -> Estimate:
    if isinstance(one, Unknown):
        return one
    return other if isinstance(other, Unknown) else one * other


def plus(one: Estimate, other: Estimate) -> Estimate:
    if isinstance(one, Unknown):
        return one
    return other if isinstance(other, Unknown) else one + other


def over(one: Estimate, other: Estimate) -> Estimate:
    if isinstance(one, Unknown):
        return one
    return other if isinstance(other, Unknown) else one / other
