"""The objective on held-out rows where no rank has the whole model: the numbers of one process,
between steps of training.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ingot.config.recipe import Recipe
from ingot.config.sections.layout import Parallel
from ingot.config.sections.training import SGD
from ingot.data.rows import open_rows
from ingot.evaluate.held_out import held_out_objective
from ingot.models.native.config import DecoderConfig
from ingot.models.spec import Blueprint, draft_model, fill_model
from ingot.objectives.cross_entropy import CrossEntropy
from ingot.parallel.apply import Wrapping, apply_wrappers, evaluating, finish_wrapping, make_masters
from ingot.parallel.mesh import running_mesh
from ingot.train.optim import make_optimizer
from ingot.train.step import train_step
from tests import tolerances
from tests.parallel.wrapped_run import MODEL
from tests.ranks import run_ranks
from tests.small import small_recipe
from tests.train.test_step import global_batch, rows_of


def judged(recipe: Recipe, axes: dict[str, Any], count: int) -> list[float]:
    """The loss on held-out rows before and after a step of training."""
    parallel, config = Parallel(**axes), {**MODEL, "vocab_size": 320}
    with running_mesh(parallel) as mesh:
        drawing, how = (
            Blueprint("decoder", DecoderConfig.from_hf(config), None, True),
            Wrapping(parallel),
        )
        model = apply_wrappers(draft_model(drawing, 0), mesh, how)
        fill_model(model, drawing, 0, mesh.device, filled=True)
        masters = make_masters(model, mesh, how)
        module, optimizer = (
            finish_wrapping(model.train(), mesh),
            make_optimizer(SGD(kind="sgd", lr=1.0), masters),
        )
        rows = open_rows(
            recipe.folder.columns,
            "validation",
            recipe.data.seq_len,
            pack=recipe.pack_held_out,
            pad_last=True,
        )
        whole, share, losses = global_batch(0), 8 // mesh.data.world, []
        for _ in range(2):
            with evaluating(model):
                losses.append(
                    held_out_objective(model, CrossEntropy(), rows, count, 2, "fp32", mesh)["loss"]
                )
            batches = rows_of(whole, mesh.data.rank * share, share, 2)
            targets = CrossEntropy().targets(whole)
            train_step(
                module,
                CrossEntropy(),
                batches,
                masters,
                optimizer,
                targets=targets,
                clip_norm=None,
                compute="fp32",
                mesh=mesh,
            )
        return losses


def judged_in(recipe: Recipe, layouts: list[dict[str, Any]], count: int) -> list[list[float]]:
    with running_mesh():
        return [judged(recipe, axes, count) for axes in layouts]


LOOPED = {"pipeline": 2, "virtual": 2}
ZERO_BUBBLE = {**LOOPED, "schedule": "zero_bubble"}


@pytest.mark.parametrize(
    ("world", "layouts"),
    [
        (2, [{"pipeline": 2}, LOOPED, ZERO_BUBBLE]),
        (
            4,
            [
                {"pipeline": 4},
                {**ZERO_BUBBLE, "shard": 2, "reshard": False},
                *({"pipeline": 2, axis: 2} for axis in ("shard", "tensor", "context")),
            ],
        ),
    ],
)
def test_evaluation_goes_through_the_same_stages(
    world: int, layouts: list[dict[str, Any]], root: Path
) -> None:
    """Of a few rows, which do not fill the pipeline, and of more than go through it at once."""
    recipe = small_recipe(root)
    for count in (5, 19) if world == 2 else (5,):
        before, after = judged(recipe, {}, count)
        assert abs(before - after) > 100 * tolerances.SPLIT_LOSS
        for losses in run_ranks(world, judged_in, recipe, layouts, count):
            assert losses == [pytest.approx([before, after], rel=tolerances.SPLIT_LOSS)] * len(
                layouts
            )
