"""What the command line writes: results of verbs as JSON, one object on stdout, the same form for
all (docs/JSON.md); and the help of `ingot` itself.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import PurePath
from typing import Any

from typer.core import TyperGroup

SCHEMA = 1


def print_json(verb: str, /, **content: Any) -> None:
    """Print `content` with the schema's number and the verb; messages stay on stderr. What JSON has
    no number for (NaN, infinity) is null, and what stdout's encoding lacks is escaped.
    """
    told = {"schema": SCHEMA, "verb": verb, **plain(content)}
    is_unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    print(json.dumps(told, indent=1, ensure_ascii=not is_unicode, allow_nan=False))


def plain(value: Any) -> Any:
    """`value` in what JSON has: text, numbers, lists, mappings."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, PurePath):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    return value


LONGEST_SENTENCE = 300
"""Characters of what a verb is said to do: its first sentence."""


class Overview(TyperGroup):
    """A group of verbs whose help is plain text, a sentence for each, by panel: the import of rich,
    which draws the help of a verb, takes longer than all the rest.
    """

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
                        (name, verb.get_short_help_str(LONGEST_SENTENCE))
                        for name, verb in verbs
                        if getattr(verb, "rich_help_panel", None) == panel
                    ]
                )
