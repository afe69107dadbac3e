"""What a recipe names by a path of this machine: nodes that share no disk with it see none of them
but those in the run folder, of which they get a copy.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from ingot.base.listing import find_files
from ingot.base.markers import read_marker
from ingot.base.remote.bucket import open_bucket
from ingot.base.remote.index import NEVER_REPLICATED, read_index
from ingot.config.doors import TEMPLATES
from ingot.config.recipe import Recipe
from ingot.config.sections.rewards import RewardSettings

MANIFEST = "manifest.json"
COLUMNS = "megatron:"
IN_BUCKET = "put it into the bucket and give gs://..."
INSTEAD = {
    "python": "install it in the image and give package.module:name",
    "json_schema": "let each sample's `answer` be its schema",
    "classifier": "let a server of yours judge, with kind http",
    "lm_eval": "choose tasks that lm-evaluation-harness has itself",
    "template": "choose a built-in one, or a tokenizer that brings it",
}
"""What to do instead where no bucket can be read, by the kind of reward or task."""

_HERE = "run `ingot ingest` and `ingot prepare` here first"
OF_COLUMNS = {"ingest": _HERE, "prepare": _HERE, "run": "give the texts as gs://..."}
"""The same for Megatron's columns, which are mapped into memory and so lie on a disk, by verb."""


class LocalInput(NamedTuple):
    """One of them. `instead` says what its reader could be given."""

    what: str
    named: str
    """As the recipe has it."""
    instead: str

    @property
    def is_columns(self) -> bool:
        return self.named.startswith(COLUMNS)

    @property
    def path(self) -> str:
        """Where it lies; of columns, their index."""
        if self.is_columns:
            prefix = self.named.removeprefix(COLUMNS)
            return f"{prefix.removesuffix('.idx').removesuffix('.bin')}.idx"
        return self.named.removeprefix("file://")


def local_inputs(recipe: Recipe, verb: str) -> list[LocalInput]:
    """The files and folders of this machine that `verb` reads beside models and tokenizers
    (`local_folders`); `run` stands for all verbs.
    """
    found, template = list[LocalInput](), recipe.tokenizer.template
    if verb in ("ingest", "run"):
        found += _sources("data source", recipe.sources, of_columns=OF_COLUMNS[verb])
    if verb == "prepare":  # ingest copies no columns
        columns = _ingested_columns(recipe) or [
            source for source in recipe.sources if source.startswith(COLUMNS)
        ]
        found += _sources("data source", columns, of_columns=OF_COLUMNS[verb])
    if verb in ("prepare", "run"):
        found += _sources("data.clean.contamination.against", recipe.data.clean.against)
        if template is not None and template not in TEMPLATES.kinds():
            found.append(LocalInput("tokenizer.template", template, INSTEAD["template"]))
    if verb in ("train", "run"):
        found += _rewards(recipe.objective)
    for task in recipe.tasks:
        if verb in ("evaluate", "run") or (
            verb == "train" and task.name in recipe.train.evaluate_tasks
        ):
            instead = INSTEAD.get(task.kind, IN_BUCKET)
            found += _sources(f"the source of task {task.name}", task.sources, instead)
            found += _rewards(task)
    return list(dict.fromkeys(found))


def _ingested_columns(recipe: Recipe) -> list[str]:
    """The columns that were ingested on this machine: `prepare` looks for them where they were,
    and nodes have the run folder at another place.
    """
    splits = (read_marker(recipe.folder.raw, MANIFEST) or {}).get("splits", {})
    return [
        f"{COLUMNS}{part['path']}"
        for source in (source for split in splits.values() for source in split)
        if source["kind"] == "tokens" and source["source"] in recipe.sources
        for part in source["parts"]
        if find_files(f"{part['path']}.idx")
    ]


def is_sent(recipe: Recipe, path: str) -> bool:
    """Whether a path lies in the run folder, at a place that is copied to nodes."""
    root, asked = recipe.folder.root, Path(os.path.normpath(path))
    if asked.is_absolute() or not asked.is_relative_to(root):
        return False
    parts = asked.relative_to(root).parts
    return parts[:1] != (NEVER_REPLICATED,) and not any(part.startswith(".") for part in parts)


def is_there(recipe: Recipe, path: str, replica: str) -> bool:
    """Whether a path in the run folder exists, here or in its replica."""
    if find_files(path):
        return True
    asked = Path(os.path.normpath(path)).relative_to(recipe.folder.root)
    return any(
        Path(name).is_relative_to(asked) or fnmatch(name, str(asked))
        for name in read_index(open_bucket(replica)).entries
    )


def local_folders(recipe: Recipe) -> dict[str, str]:
    """The models, tokenizers, adapters and checkpoints that the recipe names by a path or address,
    by knob.
    """
    objective, lora = recipe.objective, recipe.model.lora
    named: dict[str, str | None] = {
        "model.source": recipe.model.source,
        "tokenizer.source": recipe.tokenizer.source,
        "evaluate.model": recipe.evaluate.model,
        "objective.teacher": objective.teacher_source,
        "objective.reference": objective.reference_source,
        "model.lora.adapter": getattr(lora, "adapter", None),
        "train.start_from": recipe.train.start_from,
    }
    return {
        knob: value
        for knob, value in named.items()
        if value not in (None, "train", "none") and not value.startswith(("hf:", "preset:"))
    }


def _sources(
    what: str, sources: Iterable[str], instead: str = IN_BUCKET, of_columns: str = IN_BUCKET
) -> Iterator[LocalInput]:
    for source in sources:
        if source.startswith(COLUMNS):
            yield LocalInput(what, source, of_columns)
        elif ":" not in source or source.startswith("file://"):
            yield LocalInput(what, source, instead)


def _rewards(judged: object) -> Iterator[LocalInput]:
    """What the rewards of an objective or a task read, if it has any."""
    rewards: list[RewardSettings] = getattr(judged, "rewards", [])
    for reward in rewards:
        instead = INSTEAD.get(reward.kind, "take another reward")
        for path in reward.files:
            yield LocalInput(f"reward {reward.label}:", path, instead)
