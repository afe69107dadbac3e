"""What stands in for other ranks, for the contents of tensors, and for the kernels of a device that
is not there, while a step is traced.

torch chooses among kernels by device, and cannot differentiate tensors of a device that is not
there. A trace for CUDA therefore runs on the CPU, and what differs is replaced: a fused norm keeps
its input and one number a token, and attention within documents or windows (flex attention,
compiled) keeps what flash attention does. What is compiled keeps no number that can be had again
from others that are kept: of a norm the input in its own type, of a feed-forward its two products
and what they make; and kernels of the head read and write what they are given alone.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import checkpoint
from torch.utils._python_dispatch import _disable_current_modes

from ingot.base.environment import Ranks
from ingot.config.degrees import degrees_of
from ingot.config.recipe import Recipe
from ingot.config.sections.layout import Offload
from ingot.data.batches.loader import Batch
from ingot.models.hf import relative
from ingot.models.native import fused_head, head
from ingot.models.native.attention import AttnFn
from ingot.models.native.decoder import Decoder, FeedForward, RMSNorm
from ingot.models.parameters import local_tensor
from ingot.models.quantized import make_tables
from ingot.models.quantized_experts import ExpertMatrices
from ingot.objectives.protocol import Objective
from ingot.parallel.experts import RankExchange
from ingot.parallel.mesh import Mesh, make_mesh
from ingot.parallel.offload import OffloadedTensor
from ingot.parallel.pipeline import local_stages
from ingot.plan.tracing.meter import Meter
from ingot.plan.tracing.records import DISPATCH, Operator

HOST = torch.device("cpu")
CAST = "hp_tensor_to_float8_dynamic"
"""What converts each operand in torchao's layers."""


class LonelyMesh(Mesh):
    """One real rank: collectives answer as if every other rank had contributed the same values."""

    def agree(self, *numbers: float) -> list[float]:
        return [number * self.world for number in numbers]

    def gather(self, numbers: list[float]) -> list[list[float]]:
        return [numbers] * self.world

    def from_main(self, call: Callable[[], Any]) -> Any:
        return call()


@contextlib.contextmanager
def lonely_mesh(recipe: Recipe, world: int, rank: int) -> Iterator[Mesh]:
    degrees = degrees_of(recipe.parallel, world)
    if world == 1:
        yield make_mesh(Ranks(), HOST, degrees)
        return
    dist.init_process_group("fake", rank=rank, world_size=world)
    try:
        yield _lonely(make_mesh(Ranks(rank, world, 0, 1), HOST, degrees))
    finally:
        dist.destroy_process_group()


def _lonely(mesh: Mesh) -> LonelyMesh:
    values = {field.name: getattr(mesh, field.name) for field in fields(Mesh)}
    parts = {name: _lonely(part) for name, part in mesh.parts.items()}
    return LonelyMesh(**{**values, "parts": parts})


class PlannedBatch(Batch):
    """A batch whose contents can be asked for while tensors have none."""

    @property
    def single_documents(self) -> bool:
        with _disable_current_modes():
            return super().single_documents

    @property
    def text_tokens(self) -> int:
        with _disable_current_modes():
            return super().text_tokens

    def side(self, number: int) -> Batch:
        with _disable_current_modes():
            return super().side(number)


class CountingTargets:
    """An objective that counts its targets on the real batch, since that asks for contents."""

    def __init__(self, objective: Objective) -> None:
        self._objective = objective

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objective, name)

    def targets(self, batch: Batch) -> int:
        with _disable_current_modes():
            return self._objective.targets(batch)


@contextlib.contextmanager
def new_parameters() -> Iterator[None]:
    """Parameters that are allocated are new ones: one on `meta` cannot become a fake one."""
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)


@contextlib.contextmanager
def without_contents(meter: Meter, crowding: float) -> Iterator[None]:
    """Replaces what torch computes from contents, or on tensors that a real run does not make.
    `crowding`: rows that reach this rank's experts, over those that reach them on average.
    """
    with contextlib.ExitStack() as replaced:
        replace = partial(_replaced, replaced)
        make_tables(HOST)
        replace(ExpertMatrices, "sizes", _each_as_many)
        replaced.enter_context(counted_dispatches(lambda: meter.count(DISPATCH)))
        if dist.is_initialized():
            from torch.distributed.pipelining import schedules  # slow to import
            from torch.distributed.tensor._sharding_prop import ShardingPropagator

            propagate = ShardingPropagator._propagate_tensor_meta_non_cached

            def agreed(self: Any, stages: Any, has_backward: bool, p2p_done: bool) -> None:
                for stage in stages:
                    stage._inference_mode = schedules.InferenceMode.STATIC  # type: ignore[attr-defined]

            replace(
                ShardingPropagator, "_propagate_tensor_meta_non_cached", _unseen(meter, propagate)
            )
            if hasattr(schedules._PipelineSchedule, "_warmup_p2p"):  # since torch 2.13
                replace(schedules._PipelineSchedule, "_warmup_p2p", agreed)
            replace(RankExchange, "travelling", _evenly(crowding))
        yield


@contextlib.contextmanager
def counted_dispatches(count: Callable[[], None]) -> Iterator[None]:
    """Inside the block `count` is called for each operator that the modes of selective
    recomputation are asked about.
    """

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def dispatch(mode: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
            if func.namespace != "prim":  # only tensors without contents are asked for their device
                count()
            return call(mode, func, *args, **kwargs)

        return dispatch

    with contextlib.ExitStack() as replaced:
        for mode in (checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode):
            _replaced(replaced, mode, "__torch_dispatch__", counted(mode.__torch_dispatch__))
        yield


def _evenly(crowding: float) -> Callable[..., tuple[list[int], list[int]]]:
    """In place of `RankExchange.travelling`: routers choose the experts of each rank equally often,
    or `crowding` times as often those of this one.
    """

    def travelling(
        exchange: RankExchange, here: Tensor, there: Tensor, rows: int
    ) -> tuple[list[int], list[int]]:
        torch.stack((here, there)).sum(-1)
        each, more = divmod(rows, len(here))
        sent = [each + (rank < more) for rank in range(len(here))]
        return sent, [round(crowding * size) for size in sent]

    return travelling


def _each_as_many(stack: ExpertMatrices, counts: Tensor, rows: int) -> list[int]:
    """In place of `ExpertMatrices.sizes`: all experts have equally many rows."""
    each, more = divmod(rows, len(counts))
    return [each + (expert < more) for expert in range(len(counts))]


def _unseen(meter: Meter, call: Callable[..., Any]) -> Callable[..., Any]:
    """The same call, of which the meter sees nothing."""

    def unseen(*args: Any, **kwargs: Any) -> Any:
        meter.is_paused, before = True, meter.is_paused
        try:
            return call(*args, **kwargs)
        finally:
            meter.is_paused = before

    return unseen


@contextlib.contextmanager
def _apart_from_host(meter: Meter, offload: Offload) -> Iterator[None]:
    """Inside the block the device's memory is another one than the host's: activations that are
    offloaded are not seen, weights are copied to the device before they are gathered, and their
    gradients are not seen once they are summed.
    """
    with contextlib.ExitStack() as replaced:
        replace = partial(_replaced, replaced)
        replace(OffloadedTensor, "__init__", _unseen(meter, OffloadedTensor.__init__))
        if offload.weights:
            from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group

            inputs = vars(_fsdp_param.FSDPParam)["all_gather_inputs"]
            reduce = _fsdp_param_group.FSDPParamGroup.post_backward

            def on_device(self: Any) -> list[Tensor]:
                return [one.clone() for one in inputs.fget(self)]

            def reduced(self: Any, *unused: Any) -> None:
                reduce(self, *unused)
                gradients = (one.sharded_param.grad for one in self.fsdp_params)
                meter.move_to_host(map(_local, gradients))

            replace(_fsdp_param.FSDPParam, "all_gather_inputs", property(on_device))
            replace(_fsdp_param_group.FSDPParamGroup, "post_backward", reduced)
        yield


def _local(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else local_tensor(tensor)


def _replaced(until: contextlib.ExitStack, owner: object, name: str, value: object) -> None:
    until.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


@contextlib.contextmanager
def as_on_cuda(model: nn.Module, mesh: Mesh, meter: Meter, recipe: Recipe) -> Iterator[None]:
    """Replace what a CUDA device computes with other kernels, in the model for good, and inside the
    block the pieces into which a CPU cuts the logits of a chunk, its attention with relative
    positions, and what it offloads.
    """
    compiled = recipe.train.compile
    norm = _compiled_norm if compiled else _fused_norm
    for stage in local_stages(model):
        if isinstance(stage, Decoder) and mesh.context.world == 1:
            stage.make_attn_fns = _flash_attn_fns
    for module in model.modules():
        if isinstance(module, RMSNorm) and "forward" not in vars(module):
            module.forward = partial(norm, module)  # type: ignore[method-assign]
        if compiled and isinstance(module, FeedForward):
            module.forward = partial(_compiled_gate, module)  # type: ignore[method-assign]
    with contextlib.ExitStack() as replaced:
        _replaced(replaced, head, "PIECE_LOGITS", head.CHUNK_LOGITS)
        _replaced(replaced, fused_head, "fused_kernels", lambda: (_likelihood, _of_logits))
        float8 = sys.modules.get("torchao.float8.float8_linear")
        if compiled and float8 is not None:
            cast = _cast_at_once(meter, getattr(float8, CAST))
            _replaced(replaced, float8, CAST, cast)
        _replaced(replaced, relative, "is_for_blocks", lambda *given: False)
        replaced.enter_context(_apart_from_host(meter, recipe.memory.offload))
        yield


def _cast_at_once(meter: Meter, call: Callable[..., Any]) -> Callable[..., Any]:
    """A conversion to float8, compiled: each number is read for the scale and to be converted."""

    def cast(tensor: Tensor, *args: Any, **named: Any) -> Any:
        before = meter.operators.copy()
        made = call(tensor, *args, **named)
        meter.operators = before
        meter.count(Operator("memory", "bfloat16", 0, (2 + 2 + 1) * tensor.numel()))
        return made

    return cast


def _flash_attn_fns(
    positions: Tensor, segments: Tensor | None, windows: Iterable[int | None]
) -> dict[int | None, AttnFn]:
    return dict.fromkeys(windows, _flash_attend)


def _flash_attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
    """q `[B, H, T, E]`, k and v `[B, K, T, E]`, sinks `[H]` -> `[B, H, T, E]`."""
    shared = q.shape[1] != k.shape[1]
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared)
    if sinks is None:
        return out
    # The kernel leaves the logs of its sums: as many numbers as the first channel.
    return out * (out[..., 0].float() - sinks.float()[:, None]).sigmoid()[..., None].to(out.dtype)


def _likelihood(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Reads logits `[N, V]` and makes three numbers a token."""
    highest = logits.amax(-1).float()
    return highest, highest.neg(), highest.neg()


def _of_logits(logits: Tensor, *others: Tensor) -> Tensor:
    """Reads logits `[N, V]` and writes as many numbers."""
    return logits.neg()


def _fused_norm(norm: RMSNorm, x: Tensor) -> Tensor:
    made: Tensor = _FusedNorm.apply(x.float(), norm.weight.float())  # type: ignore[no-untyped-call]
    return made.to(x.dtype)


def _compiled_norm(norm: RMSNorm, x: Tensor) -> Tensor:
    made: Tensor = _CompiledNorm.apply(x, norm.weight)  # type: ignore[no-untyped-call]
    return made


class _CompiledNorm(torch.autograd.Function):
    """Reads its input, and in backward the gradient, too; writes as much."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, torch.empty_like(x[..., 0], dtype=torch.float32))
        return x.neg()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return x + gradient, torch.empty_like(weight)


def _compiled_gate(part: FeedForward, x: Tensor) -> Tensor:
    made: Tensor = part.down_proj(_CompiledGate.apply(part.gate_proj(x), part.up_proj(x)))  # type: ignore[no-untyped-call]
    return made


class _CompiledGate(torch.autograd.Function):
    """The activation of one product times the other, read once, also in backward."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return gate * up

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return gradient * up, gradient * gate


class _FusedNorm(torch.autograd.Function):
    """Allocates what `aten::_fused_rms_norm` and its backward allocate."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, torch.empty_like(x[..., 0]))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)
