"""Steps through a pipeline, as objectives and optimizer see them: metrics, heads in chunks, values
that are not finite, stages that stay as they are.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ingot.config.sections.layout import Parallel
from ingot.config.sections.lora import Lora
from ingot.config.sections.objective import DistillSettings
from ingot.config.sections.training import SGD
from ingot.data.batches.loader import Batch
from ingot.models.adapters.lora import add_lora
from ingot.models.native import head
from ingot.models.native.config import DecoderConfig
from ingot.models.native.decoder import Decoder
from ingot.models.parameters import init_weights, local_tensor
from ingot.models.spec import ModelSpec, create_model, materialize_model
from ingot.objectives.cross_entropy import CrossEntropy
from ingot.objectives.distill import Distill
from ingot.objectives.protocol import AllSum, ObjectiveInputs
from ingot.parallel.apply import WrapSettings, apply_wrappers, finish_wrapping, make_masters
from ingot.parallel.masters import Masters
from ingot.parallel.mesh import Mesh, running_mesh
from ingot.train.optim.optimizers import make_optimizer
from tests import tolerances
from tests.parallel.wrapped_run import MODEL
from tests.ranks import run_ranks
from tests.train.stepping import one_step
from tests.train.test_step import Poisoned, distance, global_batch, rows_of

Weights = dict[str, Tensor]


class Telling(CrossEntropy):
    """Tells how many tokens are hard, too."""

    def reduce(
        self, values: Tensor, batch: Batch, all_sum: AllSum
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return values.sum(), {"hard": (values.detach() > 4.0).float().sum()}


def built(mesh: Mesh, parallel: Parallel, lora: Lora | None = None) -> tuple[nn.Module, Masters]:
    model_spec, how = (
        ModelSpec("decoder", DecoderConfig.from_hf(MODEL), None, True),
        WrapSettings(parallel),
    )
    model = create_model(model_spec, 0)
    if lora is not None:
        add_lora(model, lora, 0)
    model = apply_wrappers(model, mesh, how)
    materialize_model(model, model_spec, 0, mesh.device, filled=True)
    masters = make_masters(model, mesh, how)
    return finish_wrapping(model.train(), mesh), masters


def told(axes: dict[str, Any]) -> tuple[dict[str, float], float, bool, Weights]:
    """The metrics of a step; whether a step that is not finite was skipped, and nothing changed;
    the weights after both. In a process of its own, since the head's chunks are smaller from here
    on.
    """
    parallel = Parallel(**axes)
    head.CHUNK_LOGITS = 7 * 61
    with running_mesh(parallel) as mesh:
        module, masters = built(mesh, parallel)
        optimizer = make_optimizer(SGD(kind="sgd", lr=1.0), masters)
        batches = rows_of(global_batch(0), 0, 8, 2)

        def step(objective: Any) -> Any:
            return one_step(module, objective, batches, masters, optimizer, mesh)

        outcome = step(Telling())
        before = {
            master.name: local_tensor(master.parameter.detach()).clone() for master in masters
        }
        skipped = float(step(Poisoned(float("nan"))).skipped)
        same = all(
            torch.equal(local_tensor(master.parameter.detach()), before[master.name])
            for master in masters
        )
        return (
            {name: float(value) for name, value in outcome.metrics.items()},
            skipped,
            same,
            before,
        )


@pytest.mark.parametrize(
    "axes", [{"pipeline": 2}, {"pipeline": 2, "virtual": 2, "schedule": "zero_bubble"}]
)
def test_metrics_chunks_and_steps_that_are_not_finite(axes: dict[str, Any]) -> None:
    (whole,) = run_ranks(1, told, {})
    assert whole[0]["hard"] > 0.1
    found = run_ranks(2, told, axes)
    for metrics, skipped, same, _ in found:
        assert metrics == pytest.approx(whole[0])
        assert (skipped, same) == (1.0, True)
    assert (
        distance(
            {name: weight for *_, weights in found for name, weight in weights.items()}, whole[3]
        )
        < tolerances.SPLIT_WEIGHTS
    )


def one_layer_trained(axes: dict[str, Any], targets: tuple[str, ...]) -> tuple[float, Weights]:
    parallel = Parallel(**axes)
    with running_mesh(parallel) as mesh:
        module, masters = built(mesh, parallel, Lora(rank=2, targets=targets))
        optimizer = torch.optim.SGD(
            [{"params": [master.tensor for master in masters]}], lr=1.0, fused=True
        )
        batches = rows_of(global_batch(0), 0, 8, 4)
        for _ in range(2):
            outcome = one_step(
                module, CrossEntropy(), batches, masters, optimizer, mesh, clip_norm=1.0
            )
        return float(outcome.grad_norm), {master.name: master.tensor.detach() for master in masters}


@pytest.mark.parametrize("layer", [0, 4])
@pytest.mark.parametrize(
    "axes", [{"pipeline": 2}, {"pipeline": 2, "virtual": 2, "schedule": "zero_bubble"}]
)
def test_a_stage_where_nothing_is_trained(axes: dict[str, Any], layer: int) -> None:
    """Adapters of the first stage alone, or of the last: the other one still hands on what it must,
    and joins in the norm.
    """
    target = (f"model.layers.{layer}.mlp.up_proj",)
    norm, weights = one_layer_trained({}, target)
    found = run_ranks(2, one_layer_trained, axes, target)
    assert [one for one, _ in found] == pytest.approx([norm] * 2, rel=tolerances.SPLIT_LOSS)
    assert sorted(len(mine) for _, mine in found) == [0, 2]
    assert (
        distance({name: weight for _, mine in found for name, weight in mine.items()}, weights)
        < tolerances.SPLIT_WEIGHTS
    )


def distilled(axes: dict[str, Any]) -> tuple[list[float], Weights]:
    """Two steps with a teacher, whose hidden states only the last stage asks for: elsewhere there
    is none.
    """
    parallel = Parallel(**axes)
    with running_mesh(parallel) as mesh:
        module, masters = built(mesh, parallel)
        optimizer = make_optimizer(SGD(kind="sgd", lr=1.0), masters)
        teacher = Decoder(DecoderConfig.from_hf({**MODEL, "num_hidden_layers": 1})).requires_grad_(
            False
        )
        init_weights(teacher, 5)
        if mesh.pipeline.rank != mesh.pipeline.world - 1:
            teacher.hidden = None  # type: ignore[method-assign, assignment]
        settings = DistillSettings(kind="distill", teacher="given")
        objective, losses = Distill(settings, ObjectiveInputs(teacher=teacher)), []
        for number in range(2):
            whole = global_batch(number)
            outcome = one_step(
                module, objective, rows_of(whole, 0, 8, 2), masters, optimizer, mesh, clip_norm=0.5
            )
            losses.append(float(outcome.loss))
        return losses, {master.name: local_tensor(master.parameter.detach()) for master in masters}


def test_distillation() -> None:
    losses, weights = distilled({})
    found = run_ranks(2, distilled, {"pipeline": 2, "virtual": 2})
    assert [one for one, _ in found] == [pytest.approx(losses, rel=tolerances.LOSS_FP32)] * 2
    assert (
        distance({name: weight for _, mine in found for name, weight in mine.items()}, weights)
        < tolerances.SPLIT_WEIGHTS
    )
