"""Converts the files of another project to the text of a recipe: detects the project, writes its
knobs in the order of `ingot show knobs` with their origins, and notes at the top.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import yaml
from pydantic import ValidationError

from ingot.adopt import (
    axolotl,
    classifier,
    llama_env,
    llamafactory,
    masking,
    megatron,
    t5_pipeline,
    torchtune,
    trl,
)
from ingot.adopt.read import File, read_file
from ingot.adopt.table import Draft, GivenKeys, Kind, Project, apply
from ingot.base.errors import WrongInput
from ingot.config.knobs import all_knobs
from ingot.config.recipe import Recipe
from ingot.config.values import Findings, KeyPath, Values, dotted, explain_errors

PROJECTS: tuple[Project, ...] = (
    axolotl.PROJECT,
    llamafactory.PROJECT,
    trl.PROJECT,
    torchtune.PROJECT,
    t5_pipeline.PROJECT,
    classifier.PROJECT,
    llama_env.PROJECT,
    megatron.PROJECT,
    masking.PROJECT,
)
ENOUGH = 2
"""Number of known keys that identifies a project; fewer suffice if the files have fewer keys."""
LEAST_SHARE = 0.2
"""Of the keys that are given; names such as `epochs` and `batch_size` say nothing on their own."""
_OURS = re.compile(r"data\.(train|seq_len)|objective\.kind|launch\.kind|train\.\w+")


@dataclass(frozen=True)
class Adopted:
    """The text of a recipe, with the notes in its header; and the project that it was converted
    from.
    """

    text: str
    notes: tuple[str, ...]
    project: str


def adopt(
    paths: Sequence[Path], check: Callable[[Recipe, Values], Findings] | None = None
) -> Adopted:
    """Convert configuration files of one project to a recipe. What `check` finds is noted at
    the top.

    Raises:
        WrongInput: a file cannot be read or belongs to none of the projects, the files belong to
            several, or a value is invalid for its key.
    """
    if not paths:
        raise WrongInput("no file is given; name the configuration files of one project")
    files = [read_file(path) for path in paths]
    project = recognise(files)
    draft = Draft()
    sheet = GivenKeys(project.rows, files, draft)
    apply(sheet, draft)
    project.build(sheet, draft)
    if "validation" not in draft.values.tree["data"]:
        draft.put(
            "data.validation",
            {"fraction": 0.01},
            "held out here, for the loss; choose your own share",
        )
        draft.note(
            "changed",
            "data.validation",
            "a hundredth of the documents is held out for the loss, and not trained",
        )
    _leave_pickles(draft)
    try:
        recipe = Recipe.model_validate(draft.values.tree)
    except ValidationError as error:
        raise WrongInput(explain_errors(error, draft.values)) from None
    found = Findings(draft.values) if check is None else check(recipe, draft.values)
    draft.notes |= {"missing": found.wrong, "unchecked": found.unknown}
    return Adopted(
        recipe_text(draft, project, [file.path for file in files]),
        tuple(note_lines(draft)),
        project.title,
    )


def _leave_pickles(draft: Draft) -> None:
    """A pickled data frame may run code and is never read; note which format to convert it to."""
    data, evaluation = draft.values.tree["data"], draft.values.tree.get("evaluate", {})
    listed = [data["train"], data["validation"], evaluation.get("tasks")]
    for item in (item for items in listed if isinstance(items, list) for item in items):
        path = PurePath(str(item.get("source", "")))
        if path.suffix.lower() not in PICKLED:
            continue
        old, item["source"] = item["source"], item["source"][: -len(path.suffix)] + ".parquet"
        code = f"import pandas; pandas.read_pickle({old!r}).to_parquet({item['source']!r})"
        draft.note(
            "fill",
            old,
            "a pickled data frame can run code, and is never read; where you trust it, make"
            f" {item['source']} of it: python -c {shlex.quote(code)}",
        )


def recognise(files: Sequence[File]) -> Project:
    """The project that all files belong to. Raises WrongInput naming what was looked for, or the
    project of each file.
    """
    found: list[list[Project]] = []
    for file in files:
        keys = {entry.key for entry in file.entries}
        if "name" in keys and any(_OURS.fullmatch(key) for key in keys):
            raise WrongInput(f"{file.path} is a recipe of ingot already; use it as it is")
        scores = {project.title: project.knows(file) for project in PROJECTS}
        most = max(scores.values())
        only_secrets = bool(file.secrets) and not file.entries  # may belong to any project
        if most == 0 and not only_secrets:
            raise _none_of_them(file.path)
        found.append([project for project in PROJECTS if scores[project.title] == most])
    common = [project for project in found[0] if all(project in candidates for candidates in found)]
    if not common:
        names = ", ".join(
            f"{file.path} of {' or '.join(project.title for project in candidates)}"
            for file, candidates in zip(files, found, strict=True)
        )
        raise WrongInput(f"the files are of different projects ({names}); adopt each by itself")
    known = sum(common[0].knows(file) for file in files)
    given = sum(len(file.entries) for file in files)
    if known < min(ENOUGH, max(1, given)) or known < given * LEAST_SHARE:
        raise _none_of_them(files[0].path)
    if len(common) > 1:
        raise WrongInput(
            f"{files[0].path} could be of {' or '.join(project.title for project in common)}; give"
            " more of its configuration"
        )
    return common[0]


def _none_of_them(path: str) -> WrongInput:
    looked_for = "; ".join(project.looks for project in PROJECTS)
    return WrongInput(
        f"{path} is the configuration of none of the projects that are known. Looked for:"
        f" {looked_for}. Check the path"
    )


PICKLED = (".pickle", ".pkl", ".pck", ".p")
HEADS: dict[Kind, str] = {
    "missing": "Missing or wrong, found by the check that `ingot run` begins with",
    "unchecked": "Not checked from here",
    "fill": "To fill in or to check",
    "clash": "Contradictions",
    "changed": "Changed in meaning",
    "lost": "Not carried over",
    "unknown": "Unknown keys",
}
WIDEST, REMARKS_AT = 150, 44


class _Dumper(yaml.SafeDumper):
    """Writes texts with line breaks on one line in double quotes, and no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(
    str,
    lambda dumper, value: dumper.represent_scalar(
        "tag:yaml.org,2002:str", value, style='"' if not value.isprintable() else None
    ),
)


def recipe_text(draft: Draft, project: Project, files: Sequence[str]) -> str:
    """The complete recipe, with its notes as comments."""
    first = (
        f"Adopted from {', '.join(files)}: {project.title}. The remark beside each knob says which"
        " of its keys it is from."
    )
    notes = note_lines(draft)
    head = [first, *([""] if notes else []), *notes]
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


def _lines(draft: Draft, path: KeyPath, value: Any, order: dict[str, int]) -> Iterator[str]:
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
    """A value as one line."""
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
