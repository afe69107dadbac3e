"""`ingot adopt`: configuration files of five older projects become a recipe that loads, and a list
of what could not be carried over.

Each project is a table (key -> knob and conversion) in a file of its own, with the little that
several keys mean together.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from ingot.base.errors import WrongInput
from ingot.config.adopt import classifier, llama_env, megatron, t5_pipeline, torchtune
from ingot.config.adopt.read import File, read_file
from ingot.config.adopt.table import Draft, Project, Sheet, apply
from ingot.config.adopt.write import note_lines, recipe_text
from ingot.config.explain import explain
from ingot.config.recipe import Recipe

PROJECTS: tuple[Project, ...] = (
    torchtune.PROJECT,
    t5_pipeline.PROJECT,
    classifier.PROJECT,
    llama_env.PROJECT,
    megatron.PROJECT,
)
ENOUGH = 2
"""Known keys that make files a project's, unless they have fewer keys at all."""
_OURS = re.compile(r"data\.(train|seq_len)|objective\.kind|launch\.kind|train\.\w+")


@dataclass(frozen=True)
class Adopted:
    """A recipe as text, whose head says what the notes say; which project it is from."""

    text: str
    notes: tuple[str, ...]
    project: str


def adopt(paths: Sequence[Path]) -> Adopted:
    """The recipe that configuration files of one older project amount to.

    Raises:
        WrongInput: a file cannot be read or is of none of the projects, the files are of several,
            or a value is not what its key wants.
    """
    if not paths:
        raise WrongInput("no file is given; name the configuration files of one older project")
    files = [read_file(path) for path in paths]
    project = recognise(files)
    draft = Draft()
    sheet = Sheet(project.rows, files, draft)
    apply(sheet, draft)
    project.build(sheet, draft)
    if "validation" not in draft.values.tree["data"]:
        draft.put(
            "data.validation",
            {"fraction": 0.01},
            "held out here, for the loss; choose your own share",
        )
    try:
        Recipe.model_validate(draft.values.tree)
    except ValidationError as error:
        raise WrongInput(explain(error, draft.values)) from None
    return Adopted(
        recipe_text(draft, project, [file.path for file in files]),
        tuple(note_lines(draft)),
        project.title,
    )


def recognise(files: Sequence[File]) -> Project:
    """The project that all files are of. Raises WrongInput naming what was looked for, or which
    file is of which.
    """
    found: list[list[Project]] = []
    for file in files:
        keys = {entry.key for entry in file.entries}
        if "name" in keys and any(_OURS.fullmatch(key) for key in keys):
            raise WrongInput(f"{file.path} is a recipe of ingot already; use it as it is")
        scores = {project.title: project.knows(file) for project in PROJECTS}
        most = max(scores.values())
        only_secrets = bool(file.secrets) and not file.entries  # those of any project
        if most == 0 and not only_secrets:
            raise _none_of_them(file.path)
        found.append([project for project in PROJECTS if scores[project.title] == most])
    common = [project for project in found[0] if all(project in candidates for candidates in found)]
    if not common:
        told = ", ".join(
            f"{file.path} of {' or '.join(project.title for project in candidates)}"
            for file, candidates in zip(files, found, strict=True)
        )
        raise WrongInput(f"the files are of different projects ({told}); adopt each by itself")
    known = sum(common[0].knows(file) for file in files)
    if known < min(ENOUGH, max(1, sum(len(file.entries) for file in files))):
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
