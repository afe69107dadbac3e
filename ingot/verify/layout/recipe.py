"""A recipe made so small that many ranks of it train on one CPU: a small model, short rows.

Everything that decides how it can be distributed stays: the kind of model, tied weights, biases,
norms, windows, the ratio of heads to key/value heads, the objective, the adapter. Rows are the
prepared ones, truncated, with ids modulo the small vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ingot.base.environment import Ranks
from ingot.config.degrees import degrees_of
from ingot.config.recipe import Recipe
from ingot.config.sections.layout import MemorySettings, Parallel
from ingot.config.sections.objective import TWO_ROWS
from ingot.config.shape import batch_plan
from ingot.data.batches.rows import Rows
from ingot.data.batches.samples import RowArrays, Samples
from ingot.data.columns.reader import IGNORE, Ids
from ingot.models.spec import ModelSpec
from ingot.parallel.mesh import Mesh
from ingot.train.setup import TrainSetup, make_setup
from ingot.verify.layout.models import VOCABULARY, small_spec, small_teacher
from ingot.verify.layout.modes import Layout, scaled_layout

SEQ_LEN = 48
"""The most tokens in a row; divisible by up to eight ranks with two chunks each."""
BATCH, STEPS = 8, 3


@dataclass(frozen=True)
class SmallRun:
    """A recipe and the small one that is trained in its place in every layout. Picklable."""

    original: Recipe
    """The user's recipe, but for one process."""
    small: Recipe
    model_spec: ModelSpec
    teacher: Path | None
    seq_len: int

    def laid_out(self, layout: Layout, folder: Path) -> SmallRun:
        """The same in another layout, with its output in `folder`. Raises ValueError for a layout
        that the recipe rules out.
        """
        values, parallel = set_knobs(self.small), layout.parallel
        data = degrees_of(parallel, layout.processes).data
        # Several micro-batches, the last one partly empty, except for pipelines, which need full
        # ones.
        size = {1: 5, 2: 3}.get(data, 1)
        if parallel.pipeline > 1:
            size = BATCH // data // max(4, int(parallel.pipeline)) or 1
        values |= {
            "parallel": parallel.model_dump(mode="json"),
            "memory": layout.memory.model_dump(mode="json"),
            "output": str(folder),
            "name": "small",
        }
        values["train"] |= {"micro_batch": size}
        return replace(self, small=Recipe.model_validate(values))

    def with_train(self, **knobs: Any) -> SmallRun:
        """The same with other knobs of `train`."""
        return replace(
            self,
            small=self.small.model_copy(
                update={"train": self.small.train.model_copy(update=knobs)}
            ),
        )

    def setup(self, mesh: Mesh) -> TrainSetup:
        """The training setup of this rank."""
        setup = _setup_of(json.dumps(set_knobs(self.original)))
        rows, held_out = (_small_rows(rows, self.seq_len) for rows in (setup.rows, setup.held_out))
        return replace(
            setup,
            recipe=self.small,
            batch=batch_plan(self.small.train, self.small.parallel, mesh.world),
            model_spec=self.model_spec,
            teacher=self.teacher,
            rows=rows,
            held_out=held_out,
            origin=None,
            begin=0,
            last=STEPS,
            compute="fp32",
        )


def make_small(recipe: Recipe, folder: Path) -> SmallRun:
    """Make a recipe small, with layers and heads enough for its own layout; a small teacher is
    written into `folder`. Raises WrongInput if recipe, prepared data and model do not fit together.
    """
    own = scaled_layout(recipe).parallel
    asked = recipe.model_copy(update={"parallel": Parallel(), "memory": MemorySettings()})
    setup = _setup_of(json.dumps(set_knobs(asked)))
    seq_len = min(SEQ_LEN, recipe.data.seq_len // 16 * 16 or recipe.data.seq_len)
    teacher = (
        None if setup.teacher is None else small_teacher(setup.teacher, folder / "teacher", seq_len)
    )
    return SmallRun(
        asked,
        _small_recipe(asked, seq_len, teacher),
        small_spec(setup.model_spec, seq_len, own),
        teacher,
        seq_len,
    )


@cache
def _setup_of(recipe: str) -> TrainSetup:
    """The setup of the recipe, made once per process, since reading a large tokenizer takes a
    second.
    """
    return make_setup(Recipe.model_validate_json(recipe), Mesh(Ranks(), torch.device("cpu")))


def set_knobs(recipe: Recipe) -> dict[str, Any]:
    """The knobs that were set explicitly: whether one was set decides whether some recipes are
    valid.
    """
    values: dict[str, Any] = recipe.model_dump(mode="json", exclude_unset=True)
    return {**{section: {} for section in ("train", "precision", "checkpoint", "data")}, **values}


def _small_recipe(recipe: Recipe, seq_len: int, teacher: Path | None) -> Recipe:
    """The small recipe: float32, plain SGD (Adam would hide a wrong scale), no dropout."""
    values = set_knobs(recipe)
    values["train"] |= {
        "steps": STEPS,
        "epochs": None,
        "tokens": None,
        "global_batch": BATCH,
        "micro_batch": BATCH,
        "optimizer": {"kind": "sgd", "lr": 1.0},
        "clip_norm": None,
        "early_stop": None,
        "evaluate_every": None,
        "evaluate_tasks": [],
        "sample_every": None,
        "start_from": None,
        "reset_optimizer": False,
        "start_step": None,
        "compile": False,
        "profile": None,
    }
    values["precision"] |= {"compute": "fp32", "master": "fp32", "reduce": "fp32", "float8": "none"}
    values["checkpoint"] |= {"best": None}
    values["data"] |= {"seq_len": seq_len}
    if (lora := recipe.model.lora) is not None:
        values["model"]["lora"] |= {"rank": min(lora.rank, 4), "dropout": 0.0, "adapter": None}
    if recipe.objective.needs_teacher:
        values["objective"] |= {"teacher": str(teacher)}
    if recipe.objective.needs_reference:
        values["objective"] |= {"reference": None}
    return Recipe.model_validate(values)


def _small_rows(rows: Rows | Samples, seq_len: int) -> Rows | Samples:
    return SmallSamples(rows, seq_len) if isinstance(rows, Samples) else SmallRows(rows, seq_len)


class SmallRows(Rows):
    """Rows truncated to the part where their targets begin. Every other row of a single document is
    split into two, so that there are documents to isolate.
    """

    def __init__(self, whole: Rows, seq_len: int) -> None:
        vars(self).update(vars(whole))
        self._whole, self.seq_len = whole, seq_len

    def batch(self, ids: Sequence[int], out: Ids | None = None) -> RowArrays:
        tokens, labels, positions, segments = cut_short(self._whole.batch(ids), self.seq_len)
        middle = self.seq_len // 2
        for place, row in enumerate(ids):
            if row % 2 and segments[place].min() == segments[place].max() and middle:
                segments[place, middle:] += 1
                positions[place, middle:] -= positions[place, middle]
                labels[place, middle - 1] = IGNORE
        made = RowArrays(*(np.empty((4, len(ids), self.seq_len), np.int64) if out is None else out))
        for target, values in zip(
            made, (folded(tokens), folded(labels), positions, segments), strict=True
        ):
            target[:] = values
        return made


class SmallSamples(Samples):
    """Samples truncated: preferences to where the answers begin, others to their beginning."""

    def __init__(self, whole: Samples, seq_len: int) -> None:
        vars(self).update(vars(whole))
        self._whole, self.seq_len = whole, seq_len

    def fields(
        self, ids: Sequence[int], count: int | None = None, places: Sequence[int] | None = None
    ) -> RowArrays:
        made = self._whole.fields(ids, count, places)
        if self.kind in TWO_ROWS:
            tokens, labels, positions, segments = cut_short(made, self.seq_len)
            return RowArrays(folded(tokens), folded(labels), positions, segments)
        labels = made.labels if made.labels.ndim == 1 else folded(made.labels[:, : self.seq_len])
        tokens, positions, segments = (
            values[:, : self.seq_len] for values in (made.tokens, made.positions, made.segments)
        )
        return RowArrays(folded(tokens), labels, positions, segments)


def cut_short(fields: RowArrays, seq_len: int) -> tuple[Ids, Ids, Ids, Ids]:
    """The `seq_len` positions of rows `[R, S]` that begin shortly before each row's first
    target.
    """
    length = fields.tokens.shape[1]
    first = (fields.labels != IGNORE).argmax(axis=1) - seq_len // 4
    chosen = first.clip(0, max(0, length - seq_len))[:, None] + np.arange(min(seq_len, length))
    tokens, labels, positions, segments = (
        np.take_along_axis(values, chosen, axis=1) for values in fields
    )
    return tokens, labels, positions, segments


def folded(ids: Ids) -> Ids:
    """Ids modulo the small vocabulary; -100 stays."""
    return np.where(ids < 0, ids, ids % VOCABULARY)
