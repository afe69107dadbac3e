"""A loss curve that is drawn while training goes on: `run.train(on_step=ingot.LiveCurve())`. In a
notebook a picture that is replaced, in a terminal one line; elsewhere nothing.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ingot.api.run import StepMetrics

WIDTH, HEIGHT, MARGIN = 640, 220, 24
BARS = "▁▂▃▄▅▆▇█"


class LiveCurve:
    """A callback for `on_step`. `every_s`: seconds between two drawings."""

    def __init__(self, every_s: float = 0.5) -> None:
        self._every_s, self._drawn = every_s, 0.0
        self.points: dict[str, list[tuple[int, float]]] = {"loss": [], "validation loss": []}
        self._display: Any = None

    def __call__(self, step: StepMetrics) -> None:
        for name, value in (("loss", step.loss), ("validation loss", step.validation_loss)):
            if value is not None:
                self.points[name].append((step.step, value))
        if time.monotonic() - self._drawn >= self._every_s:
            self._drawn = time.monotonic()
            self._draw()

    def _draw(self) -> None:
        if _in_notebook():
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
        points = self._finite("loss")
        if not points:
            return ""
        values = [value for _, value in points[-width:]]
        low, high = min(values), max(values)
        scale = (len(BARS) - 1) / (high - low or 1.0)
        bars = "".join(BARS[round((value - low) * scale)] for value in values)
        return f"step {points[-1][0]:,}  loss {bars} {points[-1][1]:.3f}"

    def html(self) -> str:
        """The curves as an inline SVG."""
        curves = {name: points for name in self.points if (points := self._finite(name))}
        every = [point for points in curves.values() for point in points]
        if not every:
            return ""
        steps, values = zip(*every, strict=True)
        left, low = min(steps), min(values)
        across, up = (max(steps) - left or 1), (max(values) - low or 1.0)
        lines = []
        for (name, points), colour in zip(curves.items(), ("#3366cc", "#dc7a16"), strict=False):
            path = " ".join(
                f"{MARGIN + (step - left) / across * (WIDTH - 2 * MARGIN):.1f},"
                f"{HEIGHT - MARGIN - (value - low) / up * (HEIGHT - 2 * MARGIN):.1f}"
                for step, value in points
            )
            lines.append(
                f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2">'
                f"<title>{name}</title></polyline>"
            )
        told = ", ".join(f"{name} {points[-1][1]:.3f}" for name, points in curves.items())
        return (
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img">{"".join(lines)}'
            f'<text x="{MARGIN}" y="16" font-size="13" fill="currentColor">step {max(steps):,}:'
            f" {told}</text></svg>"
        )

    def _finite(self, name: str) -> list[tuple[int, float]]:
        return [(step, value) for step, value in self.points[name] if value == value]


def _in_notebook() -> bool:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None
