"""Pipeline schedules, torch's own: GPipe (Huang et al. 2019), 1F1B and its interleaved form
(Narayanan et al. 2021), and zero bubble (Qi et al. 2023), whose backward pass computes gradients of
activations first and those of weights where there is a gap.

The loss is a sum, and gradients are not scaled. With sharded weights torch keeps a stage's
gradients unsharded until the last micro-batch is done. `torch.distributed.pipelining` takes seconds
to import, so this file is imported only for a model with pipeline stages.
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

from ingot.base.errors import WrongInput
from ingot.config.sections.layout import Parallel, PipelineSchedule
from ingot.models.native.decoder import Decoder
from ingot.parallel.mesh import Mesh

Schedule = PipelineScheduleSingle | PipelineScheduleMulti
ZERO_BUBBLE_SINCE = "2.13"
"""The version of torch that takes a backward pass apart which has functions of our own."""


class PipelineWork(Protocol):
    """The micro-batches of a step, all of one shape, and what is computed with them; the same on
    each rank of a pipeline.
    """

    @property
    def shape(self) -> tuple[int, int, int]:
        """Number of micro-batches, rows of each, and tokens per row, as the model receives them."""
        ...

    def values(self, stage: Decoder, number: int, hidden: Tensor | None) -> Tensor:
        """The output of a stage for micro-batch `number`, given the hidden states of the previous
        stage (None for the first).
        """
        ...

    def loss(self, values: Tensor, number: int) -> Tensor:
        """The sum to differentiate, from the output of the last stage."""
        ...


class NumberedStage(PipelineStage):
    """A pipeline stage that is given the number of its micro-batch and looks up the rest in
    `work`.
    """

    work: PipelineWork
    hidden: torch.dtype

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Tensor:
        assert isinstance(self.submod, Decoder)
        out = self.work.values(
            self.submod, _content(kwargs["number"]), None if self.is_first else args[0]
        )
        return out if self.is_last else out.to(self.hidden).contiguous()

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)
        if isinstance(self.submod, FSDPModule):
            # FSDP converts accumulated gradients to its reduce dtype when backward has passed a
            # layer, which was before these weight gradients were computed.
            for state in fully_shard.state(self.submod)._state_ctx.all_states:  # type: ignore[attr-defined]
                for parameter in (
                    parameter
                    for group in _parameter_groups(state)
                    for parameter in group.fsdp_params
                ):
                    parameter.accumulate_unsharded_grad_if_needed()
                    parameter.to_accumulated_grad_if_needed()


def _parameter_groups(state: Any) -> Sequence[Any]:
    """Those that FSDP gathers together; before torch 2.13 there was one at most."""
    if hasattr(state, "_fsdp_param_groups"):
        groups: Sequence[Any] = state._fsdp_param_groups
        return groups
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def make_schedule(
    modules: Sequence[Decoder],
    mesh: Mesh,
    parallel: Parallel,
    hidden_type: torch.dtype,
    shape: tuple[int, int, int],
) -> tuple[Schedule, list[NumberedStage]]:
    """The schedule of this rank's stages `modules` for micro-batches of `PipelineWork.shape`, and
    the stages that it runs.

    A schedule holds receive buffers, so there is one per shape, and another for evaluation.
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
        return stages[-1].work.loss(values, _content(number))

    settings: dict[str, Any] = {"loss_fn": loss, "scale_grads": False}
    of = stages[0] if kind in ("gpipe", "1f1b") else list(stages)
    return make(of, count, **settings), stages


def _content(number: Tensor) -> int:
    """The content of a chunk of `torch.arange`, which is its place there: read from the tensor it
    would not be known in a plan.
    """
    return int(number.storage_offset())


def _schedule_class(kind: str) -> Callable[..., Schedule]:
    """torch's class for a schedule. Raises ValueError for an unknown kind, WrongInput for one that
    this torch cannot run.
    """
    match kind:
        case "gpipe":
            return ScheduleGPipe
        case "1f1b":
            return Schedule1F1B
        case "interleaved":
            return ScheduleInterleaved1F1B
        case "zero_bubble":
            if torch.__version__ < ZERO_BUBBLE_SINCE:
                raise WrongInput(
                    f"parallel.schedule zero_bubble needs torch {ZERO_BUBBLE_SINCE} or newer, and"
                    f" this is {torch.__version__}; set it to interleaved"
                )
            return ScheduleInterleavedZeroBubble
    raise ValueError(f"parallel.schedule {kind!r} is not gpipe, 1f1b, interleaved or zero_bubble")


def resolved_schedule(parallel: Parallel, count: int) -> PipelineSchedule:
    """The schedule of a step of `count` micro-batches. With fewer micro-batches than stages, 1F1B
    is all warm-up, which is GPipe.
    """
    kind = parallel.schedule
    if kind == "auto":
        kind = "1f1b" if parallel.virtual == 1 else "interleaved"
    return "gpipe" if kind == "1f1b" and count < parallel.pipeline else kind
