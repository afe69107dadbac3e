"""Numbers as people read them, and points as a plot needs them: short, rounded, few enough, nothing
lost that the eye would see.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence

_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def count(number: float) -> str:
    """`2.8 M`, `640 k`, `950`; three digits at most."""
    for size, unit in _UNITS:
        if abs(number) >= 0.9995 * size:
            return (
                f"{number / size:.3g} {unit}"
                if abs(number) < 999.5 * size
                else f"{number / size:,.0f} {unit}"
            )
    return f"{number:.0f}"


def short(number: float, digits: int = 4) -> str:
    """`digits` significant digits, without an exponent where that is readable."""
    if number == 0 or not math.isfinite(number):
        return f"{number:g}"
    size = math.floor(math.log10(abs(number)))
    if size < -4 or size >= 7:
        return f"{number:.{max(digits - 2, 1)}g}"
    return f"{number:,.{max(digits - 1 - size, 0)}f}"


def percent(share: float) -> str:
    """`93.1 %`."""
    return f"{100 * share:.1f} %"


def timestamp(seconds: float | None) -> str:
    """Seconds since the epoch as a local date and time; empty where that is none."""
    try:
        return (
            "" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
        )
    except (OverflowError, ValueError, OSError):
        return ""


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers within [low, high], about `wanted` of them, 1, 2 or 5 times a power of ten
    apart.
    """
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return [low] if math.isfinite(low) else []
    rough = high / max(wanted, 1) - low / max(wanted, 1)
    power = 10.0 ** math.floor(math.log10(rough)) if rough > 0 else 0.0
    if power == 0.0:  # closer together than numbers can tell
        return [low]
    apart = next((factor * power for factor in (1, 2, 5) if factor * power >= rough), 10 * power)
    first = math.ceil(low / apart - 1e-9)
    return [(first + index) * apart for index in range(math.floor(high / apart + 1e-9) - first + 1)]


def rounded(number: float, apart: float) -> str:
    """As a label of an axis whose labels stand `apart`: no more decimals than tell them apart."""
    if number == 0:
        return "0"
    decimals = min(max(-math.floor(math.log10(apart) + 1e-9), 0), 10) if apart > 0 else 3
    return f"{number:.{decimals}f}" if abs(number) < 1e5 else f"{number:.3g}"


def smooth(values: Sequence[float], reach: int) -> list[float]:
    """The mean of each value and its neighbours up to `reach` away, fewer but on both sides near
    the ends, so that it lags behind nothing.
    """
    sums = [0.0, *itertools.accumulate(values)]
    out = []
    for index in range(len(values)):
        near = min(reach, max(index, reach // 4), max(len(values) - 1 - index, reach // 4))
        first, last = max(index - near, 0), min(index + near + 1, len(values))
        out.append((sums[last] - sums[first]) / (last - first))
    return out


def downsample(
    xs: Sequence[float], ys: Sequence[float], most: int
) -> tuple[list[float], list[float]]:
    """At most about `most` points that look like all of them: of each stretch its lowest and
    highest, and both ends.
    """
    if len(xs) <= most:
        return list(xs), list(ys)
    stretches = max(most // 2, 1)
    kept = {0, len(xs) - 1}
    for index in range(stretches):
        within = range(index * len(xs) // stretches, (index + 1) * len(xs) // stretches)
        kept |= {min(within, key=ys.__getitem__), max(within, key=ys.__getitem__)}
    order = sorted(kept)
    return [xs[index] for index in order], [ys[index] for index in order]


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
