"""Raw values as they come from files, variables and the command line, each with the place that set
it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ingot.base.errors import WrongInput

Path_ = tuple[str | int, ...]
NOTHING = object()


@dataclass
class Values:
    """Raw values as nested mappings, and for each path where it was set last (`recipe.yaml:12`,
    `$INGOT_SEED`).
    """

    tree: dict[str, Any] = field(default_factory=dict)
    origins: dict[Path_, str] = field(default_factory=dict)

    def origin(self, path: Path_) -> str:
        """Where the value at `path`, or the nearest thing around it, was set."""
        for length in range(len(path), -1, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]]
        return "the recipe"


def parts(names: Iterable[str]) -> Path_:
    """Short runs of digits are indices into lists."""
    return tuple(int(name) if re.fullmatch("[0-9]{1,9}", name) else name for name in names)


def get(tree: Any, path: Path_) -> Any:
    """The value at `path`, or NOTHING."""
    for part in path:
        if isinstance(tree, dict):
            tree = tree.get(part, NOTHING)
        elif isinstance(tree, list) and isinstance(part, int) and part < len(tree):
            tree = tree[part]
        else:
            return NOTHING
    return tree


def assign(values: Values, path: Path_, value: Any, where: str) -> None:
    """Set one value, making the sections on the way; an index must exist in its list already."""
    tree: Any = values.tree
    above: Path_ = ()
    for part in path:
        key: Any = part if isinstance(tree, list) else str(part)
        if isinstance(tree, list) and not (isinstance(part, int) and part < len(tree)):
            raise WrongInput(
                f"{where}: `{dotted(above)}` is a list of {len(tree)}; give an index below that"
            )
        above = (*above, key)
        if len(above) == len(path):
            tree[key] = value
            break
        inner = tree[key] if isinstance(tree, list) else tree.get(key)
        if not isinstance(inner, dict | list):
            inner = tree[key] = {}
            values.origins[above] = where
        tree = inner
    path = above
    for known in [known for known in values.origins if known[: len(path)] == path]:
        del values.origins[known]
    values.origins[path] = where


def dotted(path: Path_) -> str:
    return one_line(".".join(str(part) for part in path))


def one_line(text: str) -> str:
    """What a person wrote, short enough for an error and without line breaks."""
    text = text if len(text) <= 120 else f"{text[:117]}..."
    return text.replace("\n", "\\n")
