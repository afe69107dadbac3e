"""The adopted recipe as text: knobs in the order of `ingot show knobs`, beside each where it is
from, and notes at the top.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import yaml

from ingot.config.adopt.table import Draft, Kind, Project
from ingot.config.knobs import all_knobs
from ingot.config.values import Path_, dotted

HEADS: dict[Kind, str] = {
    "fill": "To fill in or to check",
    "clash": "Contradictions",
    "changed": "Changed in meaning",
    "lost": "Not carried over",
    "unknown": "Unknown keys",
}
WIDEST, REMARKS_AT = 150, 44


class _Dumper(yaml.SafeDumper):
    """Texts with line breaks stay on one line, in double quotes; nothing is written as an alias."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(
    str,
    lambda dumper, value: dumper.represent_scalar(
        "tag:yaml.org,2002:str", value, style='"' if not value.isprintable() else None
    ),
)


def recipe_text(draft: Draft, project: Project, files: Sequence[str]) -> str:
    """The whole recipe, with its notes as comments."""
    first = (
        f"Adopted from {', '.join(files)}: {project.title}. The remark beside each knob says which"
        " of its keys it is from."
    )
    head = [first, *([""] if draft.notes else []), *note_lines(draft)]
    lines = [_comment(line) for line in head]
    order: dict[str, int] = {}
    for number, knob in enumerate(all_knobs()):
        order.setdefault(
            knob.plain, number
        )  # a knob of several kinds stands where the first of them is
    for name in sorted(draft.values.tree, key=lambda name: order.get(name, len(order))):
        lines += [
            *([""] if isinstance(draft.values.tree[name], dict) or name == "name" else []),
            *_lines(draft, (name,), draft.values.tree[name], order),
        ]
    return "\n".join(lines) + "\n"


def note_lines(draft: Draft) -> list[str]:
    """All notes, under a heading for each kind."""
    return [
        line
        for kind, head in HEADS.items()
        if draft.notes.get(kind)
        for line in (f"{head}:", *(f"  {note}" for note in draft.notes[kind]))
    ]


def _lines(draft: Draft, path: Path_, value: Any, order: dict[str, int]) -> Iterator[str]:
    indent = "  " * (len(path) - 1)
    if path not in draft.remarks and isinstance(value, dict):
        yield f"{indent}{_inline(path[-1])}:"
        for key in sorted(value, key=lambda key: order.get(dotted((*path, key)), len(order))):
            yield from _lines(draft, (*path, key), value[key], order)
        return
    line = f"{indent}{_inline(path[-1])}: {_inline(value)}"
    remark = _comment(draft.remarks[path])
    if len(line) + len(remark) + 2 > WIDEST:
        yield f"{indent}{remark}"
        yield line
    else:
        yield f"{line.ljust(REMARKS_AT)}  {remark}"


def _inline(value: Any) -> str:
    """A value on one line."""
    text = yaml.dump(
        value,
        Dumper=_Dumper,
        default_flow_style=True,
        width=math.inf,
        allow_unicode=True,
        sort_keys=False,
    )
    return text.removesuffix("\n").removesuffix("\n...")


def _comment(line: str) -> str:
    spelt = "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in line
    )
    return f"# {spelt}".rstrip()
