"""Plots as inline SVG that stretches with the page. Text is HTML beside the SVG, so that it does
not stretch with it.

Tooltips use CSS alone. Colours are classes of the page's style sheet.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

from ingot.report.formatting import downsample, rounded, short, ticks

SIDE = 1000.0
"""Length of a plot's side in SVG units."""
MAX_POINTS = 600
MAX_TOOLTIPS = 90
MAX_DOTS = 40
WHOLE = 2.0**51
"""Below this, a number and its halves differ."""
MIN_SHARE = 1 / 2000
"""The narrowest segment that is visible, as a share of its strip."""


@dataclass(frozen=True)
class PlotLine:
    """One curve. `style`: `line`, `faint` (behind the others), `area` (filled down to the axis) or
    `dots` (joined).
    """

    name: str
    colour: str
    xs: Sequence[float]
    ys: Sequence[float]
    style: str = "line"
    in_tooltip: bool = True
    """Whether its value is shown in the tooltip."""
    lost: float | None = None
    """From where on it is no finite number."""

    @property
    def ends(self) -> list[float]:
        """Where it begins and ends, what was lost included."""
        lost = [] if self.lost is None else [self.lost]
        return [*self.xs[:1], *self.xs[-1:], *lost]


@dataclass(frozen=True)
class PlotPanel:
    """Curves over one pair of axes. `floor`: the vertical axis starts at 0."""

    lines: Sequence[PlotLine]
    height: int
    show: Callable[[float], str] = field(default=short)
    """Formats a value."""
    tick: Callable[[float, float], str] = field(default=rounded)
    """Formats a value at the axis; the second argument is the distance between labels."""
    tick_count: int = 5
    floor: bool = False
    title: str = ""


@dataclass(frozen=True)
class StripSegment:
    """A segment of a strip, or a pin at its `low`. `tooltip`: lines of its tooltip, the first as
    its title.
    """

    low: float
    high: float
    colour: str
    tooltip: Sequence[str] = ()


@dataclass(frozen=True)
class _Scale:
    low: float
    high: float

    def at(self, value: float) -> float:
        """The coordinate of a value: 0 at `low`, SIDE at `high`. Computed in halves, so that the
        difference of large numbers does not overflow.
        """
        return SIDE * min(
            max((value / 2 - self.low / 2) / (self.high / 2 - self.low / 2), 0.0), 1.0
        )


def line_chart(
    panels: Sequence[PlotPanel], label: str, unit: str = "step", *, tick_count: int = 6
) -> Markup:
    """Panels stacked over one horizontal axis with about `tick_count` labels; empty where no panel
    has points.
    """
    panels = [panel for panel in panels if any(line.ends for line in panel.lines)]
    if not panels:
        return Markup("")
    ends = [x for panel in panels for line in panel.lines for x in line.ends]
    across = _scale(min(ends), max(ends), room=0.0)
    if min(ends) == max(ends) and abs(ends[0]) < WHOLE:
        across = _Scale(ends[0] - 0.5, ends[0] + 0.5)
    drawn = Markup("").join(_panel(panel, across, unit) for panel in panels)
    axis = _axis(across, unit, tick_count)
    return Markup('<div class="chart" role="img" aria-label="{}">{}{}{}</div>').format(
        label, drawn, axis, _tooltips(panels, across, unit)
    )


def strip(
    segments: Sequence[StripSegment],
    high: float,
    height: int,
    label: str,
    *,
    pins: Sequence[StripSegment] = (),
    unit: str = "",
) -> Markup:
    """Segments in one row from 0 to `high`, `height` pixels high, with `pins` on top, and an axis
    below if there is a `unit`; empty where `high` is 0.

    Segments too narrow to be seen are left out; only the longest have tooltips. Of many pins the
    first are shown, which lie on top.
    """
    if not (math.isfinite(high) and high > 0):
        return Markup("")
    across = _Scale(0.0, high)
    stretches = [segment for segment in segments if segment.high - segment.low > MIN_SHARE * high]
    pins = pins[:MAX_TOOLTIPS]
    drawn = [
        Markup('<rect class="piece {}" x="{}%" width="{}%" height="100%"/>').format(
            segment.colour,
            _percent(across.at(segment.low)),
            _percent(across.at(segment.high) - across.at(segment.low)),
        )
        for segment in stretches
    ]
    for pin in reversed(pins):
        x = _percent(across.at(pin.low))
        line = Markup('<line class="pin {0}" x1="{1}%" x2="{1}%" y1="-6" y2="100%"/>').format(
            pin.colour, x
        )
        drawn.append(
            line + Markup('<circle class="mark {}" cx="{}%" cy="-6" r="5"/>').format(pin.colour, x)
        )
    in_tooltips = [
        *sorted(stretches, key=lambda segment: segment.low - segment.high)[:MAX_TOOLTIPS],
        *pins,
    ]
    probes = Markup('<div class="probes" aria-hidden="true">{}</div>').format(
        Markup("").join(
            _segment_tooltip(segment, across) for segment in in_tooltips if segment.tooltip
        )
    )
    return Markup(
        '<div class="strip{}" role="img" aria-label="{}"><svg width="100%" height="{}"'
        ' aria-hidden="true">{}</svg>{}{}</div>'
    ).format(
        " timed" if unit else "",
        label,
        height,
        Markup("").join(drawn),
        _axis(across, unit, 6) if unit else "",
        probes,
    )


def bar_chart(
    rows: Sequence[tuple[str, float, str, str]], interval: tuple[float, float] | None = None
) -> Markup:
    """Horizontal bars from zero: (name, value, formatted value, class). `interval` is drawn on the
    bar of class `own`.
    """
    most = max(
        [value for _, value, _, _ in rows] + ([interval[1]] if interval else []), default=0.0
    )
    if most <= 0 or not math.isfinite(most):
        return Markup("")
    drawn = []
    for name, value, words, colour in rows:
        whisker = Markup("")
        if interval and colour == "own":
            place = (
                _percent(SIDE * interval[0] / most),
                _percent(SIDE * (interval[1] - interval[0]) / most),
            )
            whisker = Markup('<rect class="whisker" x="{}%" width="{}%" height="100%"/>').format(
                *place
            )
        width = _percent(SIDE * max(value, 0.0) / most)
        mark = Markup(
            '<svg width="100%" height="100%" aria-hidden="true"><rect class="track" width="100%"'
            ' height="100%" rx="5"/><rect class="bar" width="{}%" height="100%" rx="5"/>{}</svg>'
        ).format(width, whisker)
        drawn.append(
            Markup(
                '<div class="row {}"><span class="who">{}</span><span class="mark">{}</span><span'
                ' class="much">{}</span></div>'
            ).format(colour, name, mark, words)
        )
    return Markup('<div class="bars">{}</div>').format(Markup("").join(drawn))


def share_bar(share: float) -> Markup:
    """A small bar filled to `share` (0 to 1)."""
    width = _percent(SIDE * min(max(share, 0.0), 1.0))
    return Markup(
        '<svg class="share" width="100%" height="6" aria-hidden="true"><rect class="track"'
        ' width="100%" height="6" rx="3"/><rect class="bar" width="{}%" height="6" rx="3"/></svg>'
    ).format(width)


def _axis(across: _Scale, unit: str, tick_count: int) -> Markup:
    places: list[float] = []
    for wanted in range(tick_count, tick_count + 4):
        if len(places) < 2:
            found = ticks(across.low, across.high, wanted)
            places = [x for x in found if across.low <= x <= across.high]
            places = [x for x in places if unit != "step" or abs(x - round(x)) < 1e-9]
    words = Markup("").join(
        Markup('<span style="left:{}%"{}>{}</span>').format(
            _percent(across.at(x)),
            Markup(' class="end"') if across.at(x) > 0.95 * SIDE else "",
            f"{x:,.10g}",
        )
        for x in places
    )
    return Markup('<div class="across">{}<em>{}</em></div>').format(words, unit)


def _segment_tooltip(segment: StripSegment, across: _Scale) -> Markup:
    left, right = across.at(segment.low), across.at(segment.high)
    title, *more = segment.tooltip
    rows = Markup("").join(
        Markup('<span class="{}">{}</span>').format(segment.colour, line) for line in more
    )
    place = Markup("left:{}%;width:{}%;--at:50%").format(_percent(left), _percent(right - left))
    side = "late" if left + right > SIDE else "early"
    return Markup('<i style="{}" class="{}"><b><u>{}</u>{}</b></i>').format(
        place, side, title, rows
    )


def _panel(panel: PlotPanel, across: _Scale, unit: str) -> Markup:
    ys = [y for line in panel.lines for y in line.ys]
    low = min([0.0, *ys] if panel.floor else ys, default=0.0)
    up = _scale(low, max(ys, default=0.0), room=0.06, from_zero=panel.floor)
    places = [y for y in ticks(up.low, up.high, panel.tick_count) if up.low <= y <= up.high and ys]
    grid = Markup("").join(
        Markup('<path class="grid" d="M0 {0}H1000"/>').format(_number(SIDE - up.at(y)))
        for y in places
    )
    marks = Markup("").join(_marks(line, across, up) for line in panel.lines if len(line.xs))
    apart = places[1] - places[0] if len(places) > 1 else 0.0
    words = Markup("").join(
        Markup('<span style="top:{}%">{}</span>').format(
            _percent(SIDE - up.at(y)), panel.tick(y, apart)
        )
        for y in places
    )
    words += Markup("").join(_lost(line, across, unit) for line in panel.lines)
    title = Markup("<em>{}</em>").format(panel.title) if panel.title else Markup("")
    return Markup(
        '<div class="panel{}" style="height:{}px"><svg viewBox="0 0 1000 1000"'
        ' preserveAspectRatio="none" aria-hidden="true">{}{}</svg>{}{}</div>'
    ).format(" under" if title else "", panel.height, grid, marks, words, title)


def _lost(line: PlotLine, across: _Scale, unit: str) -> Markup:
    """A mark where a line ceases to be finite."""
    if line.lost is None:
        return Markup("")
    at = across.at(line.lost)
    return Markup('<b class="{} {}" style="left:{}%"><u>not finite from {} {}</u></b>').format(
        line.colour, "late" if at > SIDE / 2 else "early", _percent(at), unit, f"{line.lost:,.10g}"
    )


def _marks(line: PlotLine, across: _Scale, up: _Scale) -> Markup:
    xs, ys = downsample(line.xs, line.ys, MAX_POINTS)
    points = [
        (_number(across.at(x)), _number(SIDE - up.at(y))) for x, y in zip(xs, ys, strict=True)
    ]
    path = "M" + "L".join(f"{x} {y}" for x, y in points)
    drawn = Markup('<path class="{} {}" d="{}"/>').format(
        line.style if line.style != "dots" else "line", line.colour, path
    )
    if line.style == "area":
        filled = f"{path}L{points[-1][0]} 1000L{points[0][0]} 1000Z"
        drawn = Markup('<path class="filled {}" d="{}"/>').format(line.colour, filled) + Markup(
            '<path class="line {}" d="{}"/>'
        ).format(line.colour, path)
    if (line.style == "dots" and len(points) <= MAX_DOTS) or len(points) == 1:
        # A line of zero length with round caps is a dot that stretching does not distort.
        drawn += Markup('<path class="dots {}" d="{}"/>').format(
            line.colour, "".join(f"M{x} {y}h0" for x, y in points)
        )
    return drawn


def _tooltips(panels: Sequence[PlotPanel], across: _Scale, unit: str) -> Markup:
    """Tooltips: invisible columns side by side; the one under the pointer shows its values."""
    in_tooltips = [
        (panel, line)
        for panel in panels
        for line in panel.lines
        if line.in_tooltip and len(line.xs)
    ]
    if not in_tooltips:
        return Markup("")
    places, _ = downsample(in_tooltips[0][1].xs, in_tooltips[0][1].ys, MAX_TOOLTIPS)
    stops = [across.at(x) for x in places]
    drawn = []
    for index, x in enumerate(places):
        left = (stops[index - 1] + stops[index]) / 2 if index else 0.0
        right = (stops[index] + stops[index + 1]) / 2 if index + 1 < len(stops) else SIDE
        hair = 100 * (stops[index] - left) / max(right - left, 1e-9)
        rows = Markup("").join(
            _tooltip_value(panel, line, x, across) for panel, line in in_tooltips
        )
        drawn.append(
            Markup(
                '<i style="left:{}%;width:{}%;--at:{}%" class="{}"><b><u>{} {}</u>{}</b></i>'
            ).format(
                _percent(left),
                _percent(right - left),
                _number(hair),
                "late" if stops[index] > SIDE / 2 else "early",
                unit,
                f"{x:,.10g}",
                rows,
            )
        )
    return Markup('<div class="probes" aria-hidden="true">{}</div>').format(Markup("").join(drawn))


def _tooltip_value(panel: PlotPanel, line: PlotLine, x: float, across: _Scale) -> Markup:
    """The value of `line` nearest to `x`, unless it is too far away."""
    near = bisect_left(line.xs, x)
    nearest = min(
        (index for index in (near - 1, near) if 0 <= index < len(line.xs)),
        key=lambda index: abs(line.xs[index] - x),
    )
    if abs(across.at(line.xs[nearest]) - across.at(x)) > SIDE / 12:
        return Markup("")
    return Markup('<span class="{}">{} <strong>{}</strong></span>').format(
        line.colour, line.name, panel.show(line.ys[nearest])
    )


def _scale(low: float, high: float, room: float, *, from_zero: bool = False) -> _Scale:
    """A scale with `room` (a share) above and below, never of zero length."""
    most = sys.float_info.max
    if high / 2 - low / 2 <= 0:
        apart = max(abs(low) * 0.1, 1e-300) if low else 1.0
        return _Scale(
            0.0 if from_zero and low > 0 else max(low - apart, -most), min(high + apart, most)
        )
    apart = (high / 2 - low / 2) * 2 * room if room else 0.0
    return _Scale(low if from_zero else max(low - apart, -most), min(high + apart, most))


def _number(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")


def _percent(value: float) -> str:
    """A coordinate as a percentage of SIDE."""
    return f"{100 * value / SIDE:.2f}".rstrip("0").rstrip(".")
