"""The recipes that the project ships, made short."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ingot.config.load import load_recipe
from ingot.config.recipe import Recipe
from tests.house.source import PROJECT


def shipped(file: str, root: Path, few: Mapping[str, Any], **knobs: Any) -> Recipe:
    """A recipe of the project, its runs in `root/runs`, with the knobs `few` and then a few more
    changed, `__` for dots.
    """
    values = {
        **few,
        "output": str(root / "runs"),
        **{key.replace("__", "."): value for key, value in knobs.items()},
    }
    return load_recipe(
        [PROJECT / "recipes" / file],
        [f"{key}={value}" for key, value in values.items()],
        environ={},
        dotenv=None,
    )
