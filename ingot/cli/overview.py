"""The help of `ingot` itself: its verbs in a sentence each, by panel. Written without rich, whose
import takes longer than all the rest; the help of a verb is drawn with it.
"""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

LONGEST = 300
"""Characters of what a verb is said to do: its first sentence."""


class Overview(TyperGroup):
    """A group of verbs whose help is plain text."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        # Past TyperGroup's own, which draws with rich.
        super(TyperGroup, self).format_help(ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        verbs = [(name, verb) for name, verb in self.commands.items() if not verb.hidden]
        panels = dict.fromkeys(getattr(verb, "rich_help_panel", None) for _, verb in verbs)
        for panel in panels:
            with formatter.section(panel or "Commands"):
                formatter.write_dl(
                    [
                        (name, verb.get_short_help_str(LONGEST))
                        for name, verb in verbs
                        if getattr(verb, "rich_help_panel", None) == panel
                    ]
                )
