"""Applies every wrapper in one order: pipeline stages, float8, tensor parallelism, context
parallelism, expert parallelism, recomputation, activation offload, compilation, then sharding or
data parallelism.

Stages come first: each is then wrapped as a whole model would be. Tensor parallelism changes the
parameters of a layer, so it precedes the rest. Recomputation is inside the compiled region and the
compiled region inside FSDP, so that FSDP's hooks stay outside the graph. The model may be on
`meta`: nothing here reads a weight.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ingot.base.userfolders import cache_folder
from ingot.config.sections.layout import MemorySettings, Parallel, Precision
from ingot.models.device import Compute, kernel_type
from ingot.models.kinds import AnyModel
from ingot.models.native.decoder import Decoder
from ingot.models.native.experts import Router
from ingot.models.native.fused_head import fuse
from ingot.parallel.context import context_attention
from ingot.parallel.float8 import use_float8
from ingot.parallel.masters import Masters
from ingot.parallel.mesh import Mesh
from ingot.parallel.offload import offload_activations
from ingot.parallel.pipeline import Pipeline, local_stages, tied_across_stages
from ingot.parallel.recompute import recompute_layers
from ingot.parallel.shard import gather_once, is_fsdp, layers, shard_weights, spread_experts

CACHE = "TORCHINDUCTOR_CACHE_DIR"


def compile_layers(model: nn.Module) -> None:
    """Compile the layers of a model, or of a pipeline stage, when they are first called; parameter
    names do not change.
    """
    # The routers of a mixture note which experts were chosen. Without this, layers that note
    # something and are recomputed would silently not be compiled.
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    keep_compiled()
    for layer in layers(model):
        layer.compile()


def keep_compiled() -> None:
    """Keep the compiler's cache across reboots, unless the environment already sets its folder:
    torch's default is a temporary one.
    """
    if CACHE not in os.environ:
        os.environ[CACHE] = str(cache_folder() / "compiled")


TYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class WrapSettings:
    """The part of a recipe that determines how a model is wrapped."""

    parallel: Parallel = field(default_factory=Parallel)
    memory: MemorySettings = field(default_factory=MemorySettings)
    precision: Precision = field(default_factory=Precision)
    compute: Compute = "fp32"
    compiled: bool = False


def apply_wrappers(model: AnyModel, mesh: Mesh, how: WrapSettings) -> AnyModel:
    """Distribute the model over the mesh, in place, and return it; with pipeline parallelism, this
    rank's stages. Parameters keep their names.

    What needs the weights is left to `finish_wrapping`.
    """
    if isinstance(model, Decoder) and mesh.pipeline.world > 1:
        model = Pipeline(model, mesh, how.parallel, TYPES[how.compute])
    for part in local_stages(model):
        _wrap(part, mesh, how)
    return model


def _wrap(model: nn.Module, mesh: Mesh, how: WrapSettings) -> None:
    """Wrap a model, or one pipeline stage."""
    spread = mesh.weights
    if how.precision.master == "stochastic":
        cast_weights(model, torch.bfloat16)
    elif isinstance(model, Decoder):
        narrow_frozen(model, TYPES[how.compute])
    if how.precision.float8 != "none":
        use_float8(model, how.precision.float8, tensor=mesh.tensor.world, loud=mesh.is_main)
    if isinstance(model, Decoder):
        if spread is not None and mesh.tensor.world > 1:
            from ingot.parallel.tensor import apply_tensor_parallel  # imports torch's, slow

            apply_tensor_parallel(model, spread["tensor"], sequence=how.parallel.sequence)
        if mesh.context.world > 1:
            model.make_attn_fns = context_attention(
                how.parallel.context_by, mesh.context.group, mesh.context.rank, mesh.context.world
            )
        if mesh.experts is not None:
            spread_experts(model, mesh.experts["expert"])
    recompute_layers(model, how.memory.recompute)
    if how.memory.offload.activations:
        offload_activations(model)
    if how.compiled:
        compile_layers(model)
        if isinstance(model, Decoder) and kernel_type(mesh.device) == "cuda":
            fuse(model.vocabulary_head)
    if spread is not None and _is_sharded(model, mesh, how):
        native = isinstance(model, Decoder)
        shard_weights(
            model,
            spread["replicate", "shard"],
            experts=None if mesh.experts is None else mesh.experts["replicate", "shard"],
            reshard=how.parallel.reshard and how.parallel.schedule != "zero_bubble",
            compute=TYPES[how.compute] if native else None,
            reduce=TYPES[how.precision.reduce],
            offload=how.memory.offload.weights,
        )


def cast_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert all parameters to another dtype, frozen ones included; buffers of a transformers
    model are left as they are.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def narrow_frozen(model: Decoder, dtype: torch.dtype) -> None:
    """Keep frozen weights in the dtype that they are computed in: nothing is ever added to them,
    and a product reads them rounded to it in any case. Routers that were taken out of training
    stay as they are, since checkpoints hold them.
    """
    held = {
        id(parameter)
        for router in model.modules()
        if isinstance(router, Router) and router.is_frozen
        for parameter in router.parameters()
    }
    for parameter in model.parameters():
        is_weight = parameter.is_floating_point()  # matrices in few bits are bytes
        if is_weight and not parameter.requires_grad and id(parameter) not in held:
            parameter.data = parameter.data.to(dtype)


def _is_sharded(model: nn.Module, mesh: Mesh, how: WrapSettings) -> bool:
    """Whether to use FSDP2 (with one shard if there is none): for anything but plain replicas whose
    gradients have the dtype of their weights, which DDP handles.
    """
    narrow = isinstance(model, Decoder) and how.compute != "fp32"
    degrees = mesh.degrees
    if degrees.shard * degrees.tensor * degrees.pipeline * degrees.expert > 1:
        return mesh.replicas.world > 1 or narrow
    return narrow or how.precision.reduce != "fp32" or how.precision.master == "stochastic"


def sums_by_replication(model: nn.Module, mesh: Mesh) -> bool:
    """Whether torch's data parallelism sums the gradients of a wrapped model."""
    return mesh.replicas.world > 1 and not is_fsdp(model) and not isinstance(model, Pipeline)


def finish_wrapping(model: nn.Module, mesh: Mesh) -> nn.Module:
    """The module to call in training; `model` still owns the parameters. Called once the weights
    exist, since DDP broadcasts and checks them, and FSDP gathers them.
    """
    gather_once(model)
    if not sums_by_replication(model, mesh):
        return model
    return DistributedDataParallel(
        model, process_group=mesh.replicas.group, gradient_as_bucket_view=True
    )


def compute_weights_dtype(model: AnyModel, how: WrapSettings) -> torch.dtype | None:
    """The dtype for weights that this rank holds whole, so that they are not cast for each product;
    None leaves them unchanged.
    """
    sharded = any(is_fsdp(part) for part in local_stages(model))
    if (
        sharded
        or how.precision.master == "stochastic"
        or not isinstance(model, Decoder)
        or how.compute == "fp32"
    ):
        return None
    return TYPES[how.compute]


def weights_device(mesh: Mesh, how: WrapSettings) -> torch.device:
    """The device on which a wrapped model is allocated."""
    return torch.device("cpu") if how.memory.offload.weights else mesh.device


def make_masters(model: AnyModel, mesh: Mesh, how: WrapSettings) -> Masters:
    """The masters that the optimizer updates in place of the model's weights. The model must
    already be allocated.
    """
    return Masters(
        model,
        mesh,
        shared=tied_across_stages(model),
        working=compute_weights_dtype(model, how),
        stochastic=how.precision.master == "stochastic",
        on_host=how.memory.offload.optimizer,
    )


def sum_factor(module: nn.Module, mesh: Mesh) -> float:
    """The factor that turns the gradients left by the wrapper into sums over all ranks.

    The step needs sums: a mean of means is wrong where ranks hold different numbers of targets. DDP
    leaves averages; multiplying back is exact for powers of two. A communication hook that sums
    instead would run Python in the backend's threads.
    """
    return float(mesh.replicas.world) if isinstance(module, DistributedDataParallel) else 1.0


def last_micro_batch(
    module: nn.Module, mesh: Mesh, is_last: bool, *, read: bool
) -> AbstractContextManager[None]:
    """Reduce gradients over replicas with the last micro-batch only; earlier ones accumulate
    locally. `read`: the gradients of an earlier one are read, too, once its backward has ended.

    With sharded weights, each micro-batch's gradients are reduce-scattered at once, since whole
    gradients would not fit in memory.
    """
    if is_fsdp(module):
        module.set_requires_gradient_sync(is_last or mesh.degrees.shard > 1)
        module.set_requires_all_reduce(is_last or mesh.degrees.replicate == 1)
        # Only at the end of a last backward does the device wait for what another stream reduces.
        module.set_is_last_backward(is_last or read)
    if isinstance(module, DistributedDataParallel) and not is_last:
        return module.no_sync()
    return contextlib.nullcontext()


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside the block."""
    was_training = model.training
    model.eval()
    for part in local_stages(model):
        if is_fsdp(part):
            # Generation by transformers calls inner modules, for which FSDP would not gather the
            # root's own weights.
            part.unshard()
    try:
        yield
    finally:
        model.train(was_training)
        for module in model.modules():
            if is_fsdp(module):
                # Otherwise the gathered copies would be taken for the next step's weights.
                module.reshard()
