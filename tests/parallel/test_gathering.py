"""What FSDP2 keeps from one forward pass to the next, and when it waits for the gradients that it
reduces.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups

from ingot.config.sections.layout import Parallel, Precision
from ingot.config.sections.training import SGD
from ingot.models.generation.generator import Generator
from ingot.models.generation.request import Request
from ingot.models.native.config import DecoderConfig
from ingot.models.spec import ModelSpec, create_model, materialize_model
from ingot.objectives.cross_entropy import CrossEntropy
from ingot.parallel.apply import (
    WrapSettings,
    apply_wrappers,
    evaluating,
    finish_wrapping,
    make_masters,
)
from ingot.parallel.mesh import running_mesh
from ingot.train.optim.optimizers import make_optimizer
from tests.ranks import run_ranks
from tests.train.stepping import one_step
from tests.train.test_step import CONFIG, ROWS, global_batch, rows_of


def norm_of_a_step(how: WrapSettings, sampled: list[int]) -> float:
    """The norm of the first step's gradient, after answers to the prompt `sampled`, if any."""
    with running_mesh(how.parallel) as mesh:
        spec = ModelSpec("decoder", DecoderConfig.from_hf(CONFIG), None, True)
        model = apply_wrappers(create_model(spec, 0), mesh, how)
        materialize_model(model, spec, 0, mesh.device, filled=True)
        masters = make_masters(model, mesh, how)
        optimizer = make_optimizer(SGD(kind="sgd", lr=1.0), masters)
        module = finish_wrapping(model.train(), mesh)
        if sampled:
            with evaluating(model):
                Generator(model).run([Request(sampled, 2)])  # type: ignore[arg-type]
        share = ROWS // mesh.data.world
        batches = rows_of(global_batch(0), mesh.data.rank * share, share, share // 2)
        step = one_step(module, CrossEntropy(), batches, masters, optimizer, mesh)
        return float(step.grad_norm)


@pytest.mark.drawn
@pytest.mark.parametrize(
    "how",
    [
        WrapSettings(Parallel(replicate=2), compute="bf16"),
        WrapSettings(Parallel(shard=2)),
    ],
    ids=["replicas in bfloat16", "shards"],
)
def test_a_model_that_has_answered_first_is_trained_as_any(how: WrapSettings) -> None:
    """Answers are sampled in inference mode, and training cannot use what is made within."""
    wanted = run_ranks(2, norm_of_a_step, how, [])
    assert run_ranks(2, norm_of_a_step, how, [1, 2, 3]) == wanted


def norm_beside_a_late_stream(how: WrapSettings) -> float:
    """The same where gradients are reduced by another stream, as on a GPU: until torch waits for
    it, whoever reads them finds zeros.
    """
    reduce, finish = groups.foreach_reduce, groups.FSDPParamGroup.finalize_backward
    hidden: list[tuple[torch.Tensor, torch.Tensor]] = []

    def arrive() -> None:
        for gradient, reduced in hidden:
            gradient.copy_(reduced)
        hidden.clear()

    def reduced(parameters: list[Any], *rest: Any, **named: Any) -> Any:
        arrive()  # that stream does one thing after the other
        found = reduce(parameters, *rest, **named)
        for gradient in (parameter.sharded_param.grad for parameter in parameters):
            if gradient is not None:
                here = gradient.to_local()
                hidden.append((here, here.clone()))
                here.zero_()
        return found

    def finished(self: Any) -> None:
        arrive()
        finish(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "foreach_reduce", reduced)
        patch.setattr(groups.FSDPParamGroup, "finalize_backward", finished)
        return norm_of_a_step(how, [])


@pytest.mark.drawn
@pytest.mark.parametrize("master", ["fp32", "stochastic"])
def test_gradients_are_read_once_they_are_there(master: Any) -> None:
    how = WrapSettings(Parallel(shard=2), precision=Precision(master=master), compute="bf16")
    wanted = run_ranks(2, norm_of_a_step, how, [])
    assert run_ranks(2, norm_beside_a_late_stream, how) == wanted
