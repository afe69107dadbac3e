"""The console on which tables and texts are printed."""

from __future__ import annotations

from typing import Any

from rich.console import Console

PLAIN_WIDTH = 140
"""Columns where stdout is not a terminal: enough for paths."""


def console(**options: Any) -> Console:
    """A console as wide as the terminal, that prints texts as they are: to rich `[de]` in a path or
    a completion is markup, and `:b:` an emoji. What is to have a style is a `Text`. `options` are
    those of rich.
    """
    made = Console(**{"highlight": False, "markup": False, "emoji": False, **options})
    if not made.is_terminal and "width" not in options:
        made.width = PLAIN_WIDTH
    return made
