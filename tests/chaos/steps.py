"""Whole steps of `ingot run` as actions: ingest and prepare, a training, and the record by which a
step is known to be done.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ingot.base.markers import problems, read_marker
from ingot.base.reports import VerbOutcome, file_sizes, is_intact, read_record
from ingot.base.runlog import read_lines
from ingot.base.storage import write_atomic
from ingot.checkpoints.store import committed, newest_valid
from ingot.config.models.lineage import read_lineage
from ingot.config.models.weights import hash_model
from ingot.config.recipe import Recipe
from ingot.data.ingest import ingest
from ingot.data.prepare import prepare
from ingot.data.raw import ranges
from ingot.data.raw import store as raw
from ingot.pipeline.incremental import run_step
from ingot.pipeline.steps import step_named
from ingot.train.trainer import train
from tests.chaos.actions import Action, everything
from tests.small import prepared, small_recipe, write_documents

CLOCKS = {
    "t_wall",
    "train/tokens_per_s",
    "train/tokens_per_step",
    "train/examples_per_s",
    "train/mfu",
    "validation/seconds",
    "memory/rank0_gb",
}

# --- raw texts into columns


def data_recipe(folder: Path, workers: int) -> Recipe:
    return small_recipe(folder, data__engine__workers=workers)


def begin_data(folder: Path) -> None:
    write_documents(folder / "text", 40)


def ready_data(folder: Path) -> Callable[[], None]:
    return lambda: make_data(data_recipe(folder, 1))


def ready_data_spread(folder: Path) -> Callable[[], None]:
    """So small parts that several processes share them."""
    raw.GROUP_BYTES, raw.PART_BYTES, ranges.SMALLEST_BYTES = 2_000, 6_000, 3_000
    return lambda: make_data(data_recipe(folder, 2))


def make_data(recipe: Recipe) -> None:
    ingest(recipe)
    prepare(recipe)


def state_data(folder: Path) -> str:
    """`new` where the manifest says that columns are there, which then must be so."""
    columns = data_recipe(folder, 1).folder.columns
    marker = read_marker(columns, "manifest.json")
    if marker is None:
        return "old"
    wrong = problems(columns, marker, checksums=True)
    assert not wrong, f"the manifest vouches for what is not so: {wrong[0]}"
    return "new"


def result_data(folder: Path) -> Mapping[str, Any]:
    files = everything(data_recipe(folder, 1).folder.data)
    # Manifests hold times of source files, which are copied along.
    return {path: digest for path, digest in files.items() if not path.endswith(".lock")}


# --- a training, from its first step to the exported model


def train_recipe(folder: Path) -> Recipe:
    return small_recipe(
        folder, train__steps=6, train__evaluate_every=2, checkpoint__every=2, checkpoint__keep=2
    )


def begin_train(folder: Path) -> None:
    prepared(folder)


def ready_train(folder: Path) -> Callable[[], Any]:
    recipe = train_recipe(folder)
    return lambda: train(recipe)


def state_train(folder: Path) -> str:
    run = train_recipe(folder).folder
    found = newest_valid(run.checkpoints)
    assert found is None or found.step in (2, 4, 6)
    steps = [line["step"] for line in read_lines(run.metrics) if "train/loss" in line]
    assert steps == list(range(1, len(steps) + 1)), f"steps {steps} are logged"
    assert found is None or len(steps) >= found.step, (
        f"checkpoint {found.step} stands, and only {len(steps)} of its steps are logged"
    )
    if not run.model.exists():
        return "old"
    lineage = read_lineage(run.model)
    assert lineage is not None
    assert hash_model(run.model) == lineage["model_hash"]
    return "new"


def result_train(folder: Path) -> Mapping[str, Any]:
    run = train_recipe(folder).folder
    found = newest_valid(run.checkpoints)
    assert found is not None
    return {
        "metrics": [
            json.dumps({key: value for key, value in line.items() if key not in CLOCKS})
            for line in read_lines(run.metrics)
        ],
        "step": found.step,
        "kept": [item.step for item in committed(run.checkpoints)],
        "state": {
            path: digest
            for path, digest in everything(found.folder).items()
            if path.endswith(".distcp")
        },
        "model": everything(run.model),
    }


# --- the record of a step, done once with one recipe and now with another; what it makes is of the
# same size


def record_recipe(folder: Path, seed: int) -> Recipe:
    return small_recipe(folder, seed=seed)


def make_record(folder: Path, seed: int) -> Callable[[], Any]:
    recipe = record_recipe(folder, seed)
    made = recipe.folder.model / "made.txt"

    def do() -> VerbOutcome:
        write_atomic(made, f"made with seed {seed}")
        return VerbOutcome(
            "made", str(made), f"seed {seed}", file_sizes(recipe.folder.root, [made])
        )

    return lambda: run_step(step_named("train"), recipe, do, {})


def begin_record(folder: Path) -> None:
    (folder / "text").mkdir()
    make_record(folder, 1)()


def ready_record(folder: Path) -> Callable[[], Any]:
    return make_record(folder, 2)


def state_record(folder: Path) -> str:
    run = record_recipe(folder, 1).folder
    record = read_record(run.steps, "train")
    made = (run.model / "made.txt").read_text()
    if record is not None and is_intact(run.root, record):
        assert made == f"made with {record.outputs}", (
            f"the record says {record.outputs}, there is what was {made}"
        )
        return "old" if record.outputs == "seed 1" else "new"
    return "old"


def result_record(folder: Path) -> Mapping[str, Any]:
    run = record_recipe(folder, 1).folder
    record = read_record(run.steps, "train")
    assert record is not None
    return {
        "outputs": record.outputs,
        "inputs": record.inputs,
        "made": (run.model / "made.txt").read_text(),
        "files": sorted(everything(folder)),
    }


DATA_SPREAD = Action(
    "ingest and prepare in several processes",
    begin_data,
    ready_data_spread,
    state_data,
    result_data,
)
DATA = Action("ingest and prepare", begin_data, ready_data, state_data, result_data)
TRAIN = Action("training", begin_train, ready_train, state_train, result_train)
RECORD = Action("the record of a step", begin_record, ready_record, state_record, result_record)
