"""Further metrics of an objective: what a micro-batch does not have of one counts as 0, and names
that could be added up with others are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ingot.base.errors import WrongInput
from ingot.config.sections.training import SGD
from ingot.data.batches.loader import Batch
from ingot.evaluate.validation import _means
from ingot.models.native.config import DecoderConfig
from ingot.models.native.decoder import Decoder
from ingot.models.native.head import IGNORE
from ingot.models.parameters import init_weights
from ingot.objectives.cross_entropy import CrossEntropy
from ingot.objectives.forward import PipelinedBatches
from ingot.objectives.protocol import AllSum
from ingot.parallel.masters import Masters
from ingot.parallel.mesh import running_mesh
from ingot.train.optim.optimizers import make_optimizer
from ingot.train.step import StepContext, StepControl, run_steps
from tests.ranks import run_ranks
from tests.train.test_step import CONFIG, ROWS, Watching, global_batch, rows_of

HALF = ROWS // 2
LOWER, UPPER = global_batch(0).labels.split(HALF)
WANTED = sorted({*LOWER.unique().tolist()} & {*UPPER.unique().tolist()} - {IGNORE})
"""Labels that are counted, each as a metric of its own: both halves of the rows have them."""
RARE = WANTED[1]


class Counting(CrossEntropy):
    """Counts some labels; one that a micro-batch does not have is left out if `sparse`."""

    def __init__(self, *, sparse: bool) -> None:
        self._sparse = sparse

    def reduce(
        self, values: Tensor, batch: Batch, all_sum: AllSum
    ) -> tuple[Tensor, dict[str, Tensor]]:
        # The last label first, as a dictionary may come in any order.
        counts = {f"is_{label}": (batch.labels == label).sum() for label in reversed(WANTED)}
        return values.sum(), {n: c.float() for n, c in counts.items() if c or not self._sparse}


def counted(steps: Sequence[Batch], micro_batch: int, *, sparse: bool) -> list[dict[str, float]]:
    """The metrics of each step."""
    with running_mesh() as mesh:
        model = Decoder(DecoderConfig.from_hf(CONFIG))
        init_weights(model, 0)
        masters, watching = Masters(model, mesh), Watching()
        optimizer = make_optimizer(SGD(kind="sgd", lr=0.1), masters)
        share = ROWS // mesh.world
        control = StepControl(
            lambda number: rows_of(steps[number], mesh.rank * share, share, micro_batch)
        )
        objective = Counting(sparse=sparse)
        context = StepContext(model, objective, masters, optimizer, mesh, control, hooks=[watching])
        run_steps(context, 0, len(steps))
    return [
        {name: float(value) for name, value in info.outcome.metrics.items()}
        for info in watching.told
    ]


def without(label: int, rows: slice) -> Batch:
    """A batch whose rows do not have a label."""
    batch = global_batch(0)
    labels = batch.labels.clone()
    labels[rows] = torch.where(labels[rows] == label, 60, labels[rows])
    return replace(batch, labels=labels)


def test_a_metric_that_some_micro_batches_lack_is_that_of_all_of_them() -> None:
    steps = [global_batch(0), without(RARE, slice(None))]
    whole, *split = (
        counted(steps, micro_batch, sparse=sparse)
        for micro_batch, sparse in ((ROWS, False), (1, False), (1, True))
    )
    assert all(metrics == whole for metrics in split)
    assert whole[0][f"is_{RARE}"] > 0 == whole[1][f"is_{RARE}"]


def test_a_metric_that_a_later_step_brings_is_refused() -> None:
    steps = [without(RARE, slice(None)), global_batch(0)]
    with pytest.raises(WrongInput, match=f"step 2 is the first with the metric is_{RARE}; "):
        counted(steps, 1, sparse=True)


def test_stages_of_a_pipeline_add_up_the_same_way() -> None:
    """What the last stage makes of its micro-batches, one after the other."""
    with running_mesh() as mesh:
        batches = rows_of(global_batch(0), 0, ROWS, 1)
        found = []
        for sparse in (False, True):
            objective = Counting(sparse=sparse)
            work = PipelinedBatches(objective, batches, "fp32", mesh.device, None)
            for number, batch in enumerate(batches):
                work.loss(torch.zeros(batch.labels.shape), number)
            found.append(work.sums()[1])
    assert found[0] == found[1]


def differing_ranks() -> tuple[str, list[dict[str, float]]]:
    refused = ""
    try:
        counted([without(RARE, slice(HALF))], 1, sparse=True)
    except WrongInput as error:
        refused = str(error)
    return refused, counted([global_batch(0)], 1, sparse=True)


def test_ranks_with_different_metrics_are_refused_together() -> None:
    alone = counted([global_batch(0)], ROWS, sparse=False)
    for refused, agreed in run_ranks(2, differing_ranks):
        assert refused.startswith("ranks have different metrics in step 1 (is_")
        assert agreed == alone


def means_of_ranks() -> tuple[str, dict[str, float]]:
    with running_mesh() as mesh:
        own = {"loss": 3.0} | ({} if mesh.is_main else {"margin": 1.0})
        try:
            _means(own, 2.0, mesh)
            refused = ""
        except WrongInput as error:
            refused = str(error)
        # In another order on each rank: they are added up by name.
        values = [("loss", 3.0), ("margin", 1.0)]
        return refused, _means(dict(values if mesh.is_main else reversed(values)), 2.0, mesh)


def test_means_over_validation_rows_are_of_metrics_that_all_ranks_have() -> None:
    for refused, means in run_ranks(2, means_of_ranks):
        assert refused.startswith("ranks have different metrics of the validation rows, loss")
        assert means == {"loss": 1.5, "margin": 0.5}
