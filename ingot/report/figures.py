"""Numbers as people read them, and points as a plot needs them: short, rounded, few enough, nothing lost that the eye would see."""

from __future__ import annotations

import math
from collections.abc import Sequence

_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def count(number: float) -> str:
    """`2.8 M`, `640 k`, `950`; three digits at most."""
    for size, unit in _UNITS:
        if abs(number) >= 0.9995 * size:
            return f"{number / size:.3g} {unit}" if abs(number) < 999.5 * size else f"{number / size:,.0f} {unit}"
    return f"{number:.0f}"


def short(number: float, digits: int = 4) -> str:
    """`digits` significant digits, without an exponent where that is readable."""
    if number == 0 or not math.isfinite(number):
        return f"{number:g}"
    size = math.floor(math.log10(abs(number)))
    if size < -4 or size >= 7:
        return f"{number:.{max(digits - 2, 1)}g}"
    return f"{number:,.{max(digits - 1 - size, 0)}f}"


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers within [low, high], about `wanted` of them, 1, 2 or 5 times a power of ten apart."""
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return [low] if math.isfinite(low) else []
    rough = (high - low) / max(wanted, 1)
    power = 10.0 ** math.floor(math.log10(rough)) if rough > 0 else 0.0
    if power == 0.0:  # closer together than numbers can tell
        return [low]
    apart = next((factor * power for factor in (1, 2, 5) if factor * power >= rough), 10 * power)
    first = math.ceil(low / apart - 1e-9)
    return [(first + index) * apart for index in range(math.floor(high / apart + 1e-9) - first + 1)]


def smooth(values: Sequence[float], over: int) -> list[float]:
    """A running mean that forgets with a half-life of about `over` values, not biased towards the first."""
    keep = 1.0 - 1.0 / max(over, 1)
    mean, weight, out = 0.0, 0.0, []
    for value in values:
        mean, weight = keep * mean + (1 - keep) * value, keep * weight + (1 - keep)
        out.append(mean / weight)
    return out


def thin(xs: Sequence[float], ys: Sequence[float], most: int) -> tuple[list[float], list[float]]:
    """At most about `most` points that look like all of them: of each stretch its lowest and highest, and both ends."""
    if len(xs) <= most:
        return list(xs), list(ys)
    stretches = max(most // 2, 1)
    kept = {0, len(xs) - 1}
    for index in range(stretches):
        within = range(index * len(xs) // stretches, (index + 1) * len(xs) // stretches)
        kept |= {min(within, key=ys.__getitem__), max(within, key=ys.__getitem__)}
    order = sorted(kept)
    return [xs[index] for index in order], [ys[index] for index in order]
