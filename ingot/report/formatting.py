"""Formats numbers and times for people, and prepares series for plots: axis ticks, smoothing,
downsampling.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from array import array
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path

# Characters of the longest path of a table that fits 80 columns beside its other columns.
WHOLE_PATH = 40
SORTED_AT_ONCE = 10_000
_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def count(number: float) -> str:
    """A number with a unit and at most three digits: `2.8 M`, `640 k`, `950`."""
    for size, unit in _UNITS:
        if abs(number) >= 0.9995 * size:
            return (
                f"{number / size:.3g} {unit}"
                if abs(number) < 999.5 * size
                else f"{number / size:,.0f} {unit}"
            )
    return f"{number:.0f}"


def short(number: float, digits: int = 4) -> str:
    """A number with `digits` significant digits, without an exponent where that stays readable."""
    if number == 0 or not math.isfinite(number):
        return f"{number:g}"
    size = math.floor(math.log10(abs(number)))
    if size < -4 or size >= 7:
        return f"{number:.{max(digits - 2, 1)}g}"
    return f"{number:,.{max(digits - 1 - size, 0)}f}"


def percent(share: float) -> str:
    """A share as a percentage: `93.1 %`."""
    return f"{100 * share:.1f} %"


def timestamp(seconds: float | None) -> str:
    """Seconds since the epoch as a local date and time; empty for None or an invalid time."""
    try:
        return (
            "" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
        )
    except (OverflowError, ValueError, OSError):
        return ""


def moment(when: float | str | None) -> str:
    """A timestamp with its zone, of seconds since the epoch or of a time in ISO 8601."""
    try:
        seconds = datetime.fromisoformat(when).timestamp() if isinstance(when, str) else when
    except ValueError:
        return str(when)
    told = timestamp(seconds)
    return f"{told} {time.strftime('%Z', time.localtime(seconds))}" if told else ""


def ticks(low: float, high: float, wanted: int) -> list[float]:
    """About `wanted` round numbers within [low, high], spaced 1, 2 or 5 times a power of ten."""
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return [low] if math.isfinite(low) else []
    rough = high / max(wanted, 1) - low / max(wanted, 1)
    power = 10.0 ** math.floor(math.log10(rough)) if rough > 0 else 0.0
    if power == 0.0:  # the range is below floating-point resolution
        return [low]
    apart = next((factor * power for factor in (1, 2, 5) if factor * power >= rough), 10 * power)
    first = math.ceil(low / apart - 1e-9)
    return [(first + index) * apart for index in range(math.floor(high / apart + 1e-9) - first + 1)]


def rounded(number: float, apart: float) -> str:
    """An axis label, with only as many decimals as labels spaced `apart` need; small ones with an
    exponent, since a long one is cut at its sign.
    """
    if number == 0:
        return "0"
    if 0 < apart < 0.99e-4 and abs(number) < 0.01:
        size, step = (math.floor(math.log10(abs(one)) + 1e-9) for one in (number, apart))
        return f"{number:.{max(size - step, 0) + 1}g}".replace("e-0", "e-")
    decimals = min(max(-math.floor(math.log10(apart) + 1e-9), 0), 10) if apart > 0 else 3
    return f"{number:.{decimals}f}" if abs(number) < 1e5 else f"{number:.3g}"


def smooth(values: Sequence[float], reach: int) -> array[float]:
    """The mean of each value and its neighbours up to `reach` away. Near the ends the window
    shrinks but stays on both sides, so that the curve does not lag.
    """
    sums = array("d", itertools.accumulate(values, initial=0.0))
    out = array("d")
    for index in range(len(values)):
        near = min(reach, max(index, reach // 4), max(len(values) - 1 - index, reach // 4))
        first, last = max(index - near, 0), min(index + near + 1, len(values))
        out.append((sums[last] - sums[first]) / (last - first))
    return out


def downsample(
    xs: Sequence[float], ys: Sequence[float], most: int
) -> tuple[list[float], list[float]]:
    """About `most` points that plot like all of them: the minimum and maximum of each interval, and
    both ends.
    """
    if len(xs) <= most:
        return list(xs), list(ys)
    intervals = max(most // 2, 1)
    kept = {0, len(xs) - 1}
    for index in range(intervals):
        within = range(index * len(xs) // intervals, (index + 1) * len(xs) // intervals)
        kept |= {min(within, key=ys.__getitem__), max(within, key=ys.__getitem__)}
    order = sorted(kept)
    return [xs[index] for index in order], [ys[index] for index in order]


def median(values: Sequence[float]) -> float:
    """The upper median. Of many values it is narrowed down before they are sorted: to sort a
    million in one call would stop every other thread for a second, that which trains too.
    """
    place = len(values) // 2
    while len(values) > SORTED_AT_ONCE:
        split = median(values[:: len(values) // 1000])
        below = [value for value in values if value < split]
        above = [value for value in values if value > split]
        same = len(values) - len(below) - len(above)
        if len(below) <= place < len(below) + same:
            return split
        values, place = (below, place) if place < len(below) else (above, place - len(below) - same)
    return sorted(values)[place]


def keeps_paths_whole(paths: Iterable[str], width: int = 80) -> bool:
    """Whether a column of `paths` stays unbroken in a terminal of `width` characters and leaves the
    other columns room to be read; longer ones are folded.
    """
    return width >= 80 and max(map(len, paths), default=0) <= WHOLE_PATH


def paths_of_run(paths: Sequence[str], root: Path) -> tuple[list[str], bool]:
    """The paths of a run's table as they are where they stay whole, else as seen from the run
    folder; and whether that was needed.
    """
    if keeps_paths_whole(paths):
        return list(paths), False
    return [path if "://" in path else os.path.relpath(path, root) for path in paths], True
