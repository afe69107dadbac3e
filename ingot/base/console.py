"""The console on which tables and texts are printed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.segment import Segment

from ingot.base.progress import visible

PLAIN_WIDTH = 140
"""Columns where stdout is not a terminal: enough for paths."""


class _Console(Console):
    """Prints what others wrote with its control characters visible, wherever it stands."""

    def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))


def console(**options: Any) -> Console:
    """A console as wide as the terminal, that prints texts as they are: to rich `[de]` in a path or
    a completion is markup, and `:b:` an emoji. What is to have a style is a `Text`. `options` are
    those of rich.
    """
    made = _Console(**{"highlight": False, "markup": False, "emoji": False, **options})
    if not made.is_terminal and "width" not in options:
        made.width = PLAIN_WIDTH
    return made
