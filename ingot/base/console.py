"""The console on which tables and texts are printed."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import Any

from rich.console import Console
from rich.segment import Segment
from rich.text import Span, Text

from ingot.base.progress import CONTROL, visible

PLAIN_WIDTH = 140
"""Columns where stdout is not a terminal: enough for paths."""


class _Console(Console):
    """Prints what others wrote with its control characters visible, wherever it stands. Texts are
    made so before they are laid out: rich takes these characters to be without width, and crops
    what grows later.
    """

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(visible(text), **options)

    def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
        laid_out = _shown(renderable) if isinstance(renderable, Text) else renderable
        for segment in super().render(laid_out, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))


def _shown(text: Text) -> Text:
    """The text with its control characters visible, each in the styles that it had."""
    if not CONTROL.search(text.plain):
        return text
    starts = [0, *accumulate(len(visible(character)) for character in text.plain)]
    made = text.blank_copy(visible(text.plain))
    made.spans = [Span(starts[start], starts[end], style) for start, end, style in text.spans]
    return made


def console(**options: Any) -> Console:
    """A console as wide as the terminal, that prints texts as they are: to rich `[de]` in a path or
    a completion is markup, and `:b:` an emoji. What is to have a style is a `Text`. `options` are
    those of rich.
    """
    made = _Console(**{"highlight": False, "markup": False, "emoji": False, **options})
    if not made.is_terminal and "width" not in options:
        made.width = PLAIN_WIDTH
    return made
