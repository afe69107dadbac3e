"""A recipe as a reader wants it: what was chosen, apart from what was left at its default; and the
whole of it, in colour.
"""

from __future__ import annotations

import json
import re
from typing import Any

from markupsafe import Markup
from pydantic import ValidationError

from ingot.config.recipe import Recipe
from ingot.report.reading import RunView

_KEY = re.compile(r"^(\s*(?:- )*)([^\s:#'\"\[{][^:]*)(:)(?=\s|$)(.*)$")


def chosen(view: RunView) -> list[tuple[str, str]]:
    """Dotted knobs that differ from their defaults, with their values; sources are always among
    them.
    """
    sources = view.knob("data.train")
    try:
        plain = Recipe.model_validate(
            {
                "name": view.name,
                "data": {"train": [{"source": source["source"]} for source in sources]},
            }
        )
    except (ValidationError, TypeError, KeyError):
        return []
    defaults = flat(plain.model_dump(mode="json"))
    is_source = re.compile(r"data\.(train|validation)\.\d+\.source").fullmatch
    return [
        (path, value)
        for path, value in flat(view.recipe).items()
        if is_source(path) or defaults.get(path) != value
    ]


def flat(value: Any, path: str = "") -> dict[str, str]:
    """Dotted path -> value as text, for every leaf; a list without sections is a leaf."""
    inner = (
        value.items()
        if isinstance(value, dict)
        else (
            enumerate(value)
            if isinstance(value, list) and any(isinstance(v, dict) for v in value)
            else ()
        )
    )
    leaves: dict[str, str] = {}
    for key, item in inner:
        leaves |= flat(item, f"{path}.{key}" if path else str(key))
    if not leaves and path:
        return {
            path: (
                value
                if isinstance(value, str)
                else json.dumps(value, default=str, ensure_ascii=False)
            )
        }
    return leaves


def highlighted(text: str) -> Markup:
    """YAML with its keys and comments marked."""
    lines = []
    for line in text.splitlines():
        if line.lstrip().startswith("#"):
            lines.append(Markup('<span class="comment">{}</span>').format(line))
        elif match := _KEY.match(line):
            lines.append(Markup('{}<span class="key">{}</span>{}{}').format(*match.groups()))
        else:
            lines.append(Markup("{}").format(line))
    return Markup("\n").join(lines)
