"""Schedules of a pipeline by torch's own: GPipe (Huang et al. 2019), 1F1B and its interleaved form
(Narayanan et al. 2021), and zero bubble (Qi et al. 2023), whose backward pass computes gradients of
activations first and those of weights where a gap is left.

The loss is a sum, and nothing is scaled. Where weights are sharded, torch keeps a stage's gradients
whole until the last micro-batch is done. `torch.distributed.pipelining` takes seconds to import, so
only a model that is cut imports this file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from ingot.config.sections.layout import Parallel, PipelineSchedule
from ingot.models.native.decoder import Decoder
from ingot.parallel.mesh import Mesh

Schedule = PipelineScheduleSingle | PipelineScheduleMulti


class PipelineWork(Protocol):
    """The micro-batches of a step, all of one shape, and what is computed of them; the same on each
    rank of a pipeline.
    """

    @property
    def shape(self) -> tuple[int, int, int]:
        """Their number, and of each its rows and tokens a row, as the model is given them."""
        ...

    def values(self, stage: Decoder, number: int, hidden: Tensor | None) -> Tensor:
        """What a stage makes of micro-batch `number` from the hidden states of the one before; None
        for the first.
        """
        ...

    def loss(self, values: Tensor, number: int) -> Tensor:
        """The sum that is differentiated, from what the last stage made."""
        ...


class NumberedStage(PipelineStage):
    """A stage that looks up its micro-batch."""

    work: PipelineWork
    hidden: torch.dtype

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Tensor:
        assert isinstance(self.submod, Decoder)
        out = self.work.values(
            self.submod, int(kwargs["number"]), None if self.is_first else args[0]
        )
        return out if self.is_last else out.to(self.hidden).contiguous()

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)
        if isinstance(self.submod, FSDPModule):
            # FSDP adds up in the type that it sums in when backward has gone through a layer, which
            # was before these gradients came.
            for state in fully_shard.state(self.submod)._state_ctx.all_states:  # type: ignore[attr-defined]
                for parameter in (
                    parameter
                    for group in state._fsdp_param_groups
                    for parameter in group.fsdp_params
                ):
                    parameter.accumulate_unsharded_grad_if_needed()
                    parameter.to_accumulated_grad_if_needed()


def make_schedule(
    modules: Sequence[Decoder],
    mesh: Mesh,
    parallel: Parallel,
    hidden_type: torch.dtype,
    shape: tuple[int, int, int],
) -> tuple[Schedule, list[NumberedStage]]:
    """The schedule of this rank's stages `modules` for `Work.shape` micro-batches, and the stages
    as it runs them.

    A schedule keeps buffers for what arrives, so there is one for each shape, and for evaluation.
    """
    count, rows, tokens = shape
    kind = resolved_schedule(parallel, count)
    make = _schedule_class(kind)
    degree = mesh.pipeline.world
    cut = mesh.tensor.world if parallel.sequence else 1
    number = torch.empty(1, dtype=torch.int64, device="meta")
    hidden = torch.empty(
        rows,
        tokens // cut,
        modules[0].config.hidden_size,
        dtype=hidden_type,
        device="meta",
        requires_grad=True,
    )
    values = torch.empty(rows, tokens, device="meta", requires_grad=True)
    stages = []
    for place, module in enumerate(modules):
        first, last = module.stage
        stage = NumberedStage(
            module,
            mesh.pipeline.rank + place * degree,
            degree * parallel.virtual,
            mesh.device,
            input_args=number if first else hidden,
            output_args=values if last else hidden,
            group=mesh.pipeline.group,
        )
        stage.hidden = hidden_type
        stages.append(stage)

    def loss(values: Tensor, number: Tensor) -> Tensor:
        return stages[-1].work.loss(values, int(number))

    settings: dict[str, Any] = {"loss_fn": loss, "scale_grads": False}
    of = stages[0] if kind in ("gpipe", "1f1b") else list(stages)
    return make(of, count, **settings), stages


def _schedule_class(kind: str) -> Callable[..., Schedule]:
    """torch's class of a schedule, looked up when it is asked for. Raises ValueError for an unknown
    one.
    """
    match kind:
        case "gpipe":
            return ScheduleGPipe
        case "1f1b":
            return Schedule1F1B
        case "interleaved":
            return ScheduleInterleaved1F1B
        case "zero_bubble":
            return ScheduleInterleavedZeroBubble
    raise ValueError(f"parallel.schedule {kind!r} is not gpipe, 1f1b, interleaved or zero_bubble")


def resolved_schedule(parallel: Parallel, count: int) -> PipelineSchedule:
    """The schedule of a step of `count` micro-batches. With fewer than stages 1F1B is all warm-up,
    which is GPipe.
    """
    kind = parallel.schedule
    if kind == "auto":
        kind = "1f1b" if parallel.virtual == 1 else "interleaved"
    return "gpipe" if kind == "1f1b" and count < parallel.pipeline else kind
