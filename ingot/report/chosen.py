"""The knobs of a run's recipe, flat, and those of them that somebody chose."""

from __future__ import annotations

import json
import re
from typing import Any

from pydantic import ValidationError

from ingot.base.lazy import lazy_import
from ingot.report.run_view import RunView

recipes = lazy_import("ingot.config.recipe")  # all sections, which only a run's knobs need


def non_default_knobs(view: RunView) -> list[tuple[str, str]]:
    """Knobs that differ from their defaults, by dotted path; sources are always included."""
    sources = view.knob("data.train")
    try:
        plain = recipes.Recipe.model_validate(
            {
                "name": view.name,
                "data": {"train": [{"source": source["source"]} for source in sources]},
            }
        )
    except (ValidationError, TypeError, KeyError):
        return []
    defaults = flatten(plain.model_dump(mode="json"))
    is_source = re.compile(r"data\.(train|validation)\.\d+\.source").fullmatch
    return [
        (path, value)
        for path, value in flatten(view.recipe).items()
        if is_source(path) or defaults.get(path) != value
    ]


def flatten(value: Any, path: str = "") -> dict[str, str]:
    """Dotted path -> value as text for each leaf; a list without sections is a leaf."""
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
        leaves |= flatten(item, f"{path}.{key}" if path else str(key))
    if not leaves and path:
        return {
            path: (
                value
                if isinstance(value, str)
                else json.dumps(value, default=str, ensure_ascii=False)
            )
        }
    return leaves
