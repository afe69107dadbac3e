"""A loss curve that is drawn while training goes on: `run.train(on_step=ingot.LiveCurve())`. In a
notebook a picture that is replaced, in a terminal one line; elsewhere nothing.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from ingot.api.run import StepMetrics
from ingot.api.verb import in_notebook
from ingot.report.formatting import rounded, short

WIDTH, HEIGHT, MARGIN = 640, 220, 44
COLOURS = {"loss": "#3366cc", "validation loss": "#dc7a16"}
BARS = "▁▂▃▄▅▆▇█"


class LiveCurve:
    """A callback for `on_step`. `every_s`: seconds between two drawings. Steps that a training
    rolled back over are no part of the curve.
    """

    def __init__(self, every_s: float = 0.5) -> None:
        self._every_s, self._drawn = every_s, 0.0
        self.points: dict[str, list[tuple[int, float]]] = {name: [] for name in COLOURS}
        self._display: Any = None

    def __call__(self, step: StepMetrics) -> None:
        for name, value in (("loss", step.loss), ("validation loss", step.validation_loss)):
            points = self.points[name]
            while points and points[-1][0] > step.step - (value is not None):
                points.pop()
            if value is not None:
                points.append((step.step, value))
        if time.monotonic() - self._drawn >= self._every_s:
            self._drawn = time.monotonic()
            self._draw()

    def close(self) -> None:
        """Draw the last steps, which may have come within `every_s` of those drawn before."""
        self._draw()

    def _draw(self) -> None:
        if in_notebook():
            from IPython.display import HTML, display

            if self._display is None:
                self._display = display(HTML(self.html()), display_id=True)
            else:
                self._display.update(HTML(self.html()))
        elif sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[K{self.text()}")
            sys.stderr.flush()

    def text(self, width: int = 40) -> str:
        """The last losses as a line of bars, with the last value."""
        if not self.points["loss"]:
            return ""
        (step, last), values = self.points["loss"][-1], [one for _, one in self._finite("loss")]
        values = values[-width:]
        low, high = min(values, default=0.0), max(values, default=0.0)
        scale = (len(BARS) - 1) / (high - low or 1.0)
        bars = "".join(BARS[round((value - low) * scale)] for value in values)
        return f"step {step:,}  loss {bars} {short(last)}"

    def html(self) -> str:
        """The curves as an inline SVG."""
        curves = {name: points for name in self.points if (points := self._finite(name))}
        steps = [step for points in self.points.values() for step, _ in points]
        values = [value for points in curves.values() for _, value in points]
        if not steps:
            return ""
        left, right = min(steps), max(steps)
        low, high = min(values, default=0.0), max(values, default=0.0)
        across, up = (right - left or 1), (high - low or 1.0)
        lines = []
        for name, points in curves.items():
            places = [
                (
                    f"{MARGIN + (step - left) / across * (WIDTH - 2 * MARGIN):.1f}",
                    f"{HEIGHT - MARGIN - (value - low) / up * (HEIGHT - 2 * MARGIN):.1f}",
                )
                for step, value in points
            ]
            path, (x, y), colour = " ".join(map(",".join, places)), places[-1], COLOURS[name]
            lines.append(
                f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2">'
                f'<title>{name}</title></polyline><circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>'
            )
        told = "".join(
            f' <tspan fill="{COLOURS[name]}">{name} {short(points[-1][1])}</tspan>'
            for name, points in self.points.items()
            if points
        )
        bottom = HEIGHT - MARGIN
        axes = (
            (MARGIN - 4, MARGIN + 4, "end", rounded(high, high - low)),
            (MARGIN - 4, bottom, "end", rounded(low, high - low)),
            (MARGIN, HEIGHT - 6, "start", f"step {left:,}"),
            (WIDTH - MARGIN, HEIGHT - 6, "end", f"{right:,}"),
        )
        lines += [
            f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="11" fill="currentColor">'
            f"{text}</text>"
            for x, y, anchor, text in axes
        ]
        return (
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img">{"".join(lines)}'
            f'<text x="{MARGIN}" y="16" font-size="13" fill="currentColor">step {right:,}:'
            f"{told}</text></svg>"
        )

    def _finite(self, name: str) -> list[tuple[int, float]]:
        return [(step, value) for step, value in self.points[name] if value == value]
