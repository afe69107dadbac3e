"""Numbers that are known within a range, and how well they are known. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Origin = Literal["measured", "learned", "modelled", "guessed"]
"""How a number is known, from best to worst.

measured: on this machine or on this type of device, by this program.
learned: corrected by what trainings on this type of device took (`ingot plan --learn`).
modelled: computed from what is measured or stated by the vendor.
guessed: general knowledge or another program's figures.
"""
ORIGINS: tuple[Origin, ...] = get_args(Origin)
GIB = 2**30


def worst(origins: Iterable[Origin]) -> Origin:
    """The origin of what is computed from several numbers."""
    return max(origins, key=ORIGINS.index, default="measured")


@dataclass(frozen=True)
class Range:
    """A number that is not negative, of which low <= likely <= high. Sums and products keep the
    worst origin.
    """

    low: float
    likely: float
    high: float
    origin: Origin = "modelled"

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.likely <= self.high:
            raise ValueError(f"not a range: {self.low}, {self.likely}, {self.high}")
        if self.origin not in ORIGINS:
            raise ValueError(f"origin {self.origin!r} is none of {', '.join(ORIGINS)}")

    @classmethod
    def exactly(cls, value: float, origin: Origin = "modelled") -> Range:
        return cls(value, value, value, origin)

    @classmethod
    def of(cls, values: Sequence[float], origin: Origin) -> Range:
        """From `[low, likely, high]` of a data file."""
        low, likely, high = map(float, values)
        return cls(low, likely, high, origin)

    def __add__(self, other: Range | float) -> Range:
        if isinstance(other, Range):
            return Range(
                self.low + other.low,
                self.likely + other.likely,
                self.high + other.high,
                worst((self.origin, other.origin)),
            )
        return Range(self.low + other, self.likely + other, self.high + other, self.origin)

    __radd__ = __add__

    def __mul__(self, other: Range | float) -> Range:
        if isinstance(other, Range):
            return Range(
                self.low * other.low,
                self.likely * other.likely,
                self.high * other.high,
                worst((self.origin, other.origin)),
            )
        return Range(self.low * other, self.likely * other, self.high * other, self.origin)

    __rmul__ = __mul__

    def __truediv__(self, other: Range | float) -> Range:
        return self * (other.inverse() if isinstance(other, Range) else 1 / other)

    def __rtruediv__(self, other: float) -> Range:
        return other * self.inverse()

    def inverse(self) -> Range:
        """One over this number, such as the seconds of one token for tokens a second."""
        return Range(1 / self.high, 1 / self.likely, 1 / self.low, self.origin)

    def text(self, show: Callable[[float], str] = "{:.3g}".format) -> str:
        """For people: `0.61 (0.55 to 0.7)`, or `0.61` where there is no range to speak of."""
        likely, low, high = show(self.likely), show(self.low), show(self.high)
        return likely if low == likely == high else f"{likely} ({low} to {high})"


NOTHING = Range.exactly(0, "measured")


def gib(size: float) -> str:
    """A number of bytes in GiB, without the unit: a range has it once, behind both bounds."""
    return f"{size / GIB:,.1f}"


def largest(first: Range, *others: Range) -> Range:
    """The larger of several numbers, bound by bound."""
    every = (first, *others)
    return Range(
        max(one.low for one in every),
        max(one.likely for one in every),
        max(one.high for one in every),
        worst(one.origin for one in every),
    )
