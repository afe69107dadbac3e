"""Every wrapper, in one order: the pipeline's cut, tensors, rows, memory, compile, then what
crosses ranks with gradients.

The cut makes a model of each stage, which is then wrapped as a whole one would be. Tensor
parallelism changes what a layer's parameters are, so it comes before the rest. Recomputation is
inside of what is compiled, compilation inside of what gathers weights, so that hooks stay
outside the graph. The model may be on `meta`: nothing here needs a weight.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ingot.config.sections.layout import MemorySettings, Parallel, Precision
from ingot.models.device import Compute
from ingot.models.kinds import AnyModel
from ingot.models.native.decoder import Decoder
from ingot.parallel.context import context_attention
from ingot.parallel.float8 import use_float8
from ingot.parallel.masters import Masters
from ingot.parallel.mesh import Mesh
from ingot.parallel.offload import offload_activations
from ingot.parallel.pipeline import Pipeline, local_stages, tied_across_stages
from ingot.parallel.recompute import recompute_layers
from ingot.parallel.shard import is_fsdp, layers, shard_weights

CACHE = "TORCHINDUCTOR_CACHE_DIR"


def compile_layers(model: nn.Module) -> None:
    """Compile the layers of a model, or of a stage of it, when they are first called; names stay
    what they are.
    """
    keep_compiled()
    for layer in layers(model):
        layer.compile()


def keep_compiled() -> None:
    """Let what is compiled outlive restarts of the machine, unless the environment says where it is
    kept: torch's own place is a temporary one.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    os.environ.setdefault(CACHE, str(base / "ingot" / "compiled"))


TYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class WrapSettings:
    """What of a recipe says how a model is wrapped."""

    parallel: Parallel = field(default_factory=Parallel)
    memory: MemorySettings = field(default_factory=MemorySettings)
    precision: Precision = field(default_factory=Precision)
    compute: Compute = "fp32"
    compiled: bool = False


def apply_wrappers(model: AnyModel, mesh: Mesh, how: WrapSettings) -> AnyModel:
    """Spread the model over the mesh, in place, and return it: of a pipeline this rank's stages.
    Parameters keep their names.

    What can only be done with weights is `finish_wrapping`'s.
    """
    if isinstance(model, Decoder) and mesh.pipeline.world > 1:
        model = Pipeline(model, mesh, how.parallel, TYPES[how.compute])
    for part in local_stages(model):
        _wrap(part, mesh, how)
    return model


def _wrap(model: nn.Module, mesh: Mesh, how: WrapSettings) -> None:
    """What is done to a model, or to a stage of it."""
    spread = mesh.weights
    if how.precision.master == "stochastic":
        cast_weights(model, torch.bfloat16)
    if how.precision.float8 != "none":
        use_float8(model, how.precision.float8, tensor=mesh.tensor.world, loud=mesh.is_main)
    if isinstance(model, Decoder):
        if spread is not None and mesh.tensor.world > 1:
            from ingot.parallel.tensor import apply_tensor_parallel  # and with it torch's own

            apply_tensor_parallel(model, spread["tensor"], sequence=how.parallel.sequence)
        if mesh.context.world > 1:
            model.make_attn_fns = context_attention(
                how.parallel.context_by, mesh.context.group, mesh.context.rank, mesh.context.world
            )
    recompute_layers(model, how.memory.recompute)
    if how.memory.offload.activations:
        offload_activations(model)
    if how.compiled:
        compile_layers(model)
    if spread is not None and _is_sharded(model, mesh, how):
        native = isinstance(model, Decoder)
        shard_weights(
            model,
            spread["replicate", "shard"],
            reshard=how.parallel.reshard and how.parallel.schedule != "zero_bubble",
            compute=TYPES[how.compute] if native else None,
            reduce=TYPES[how.precision.reduce],
            offload=how.memory.offload.weights,
        )


def cast_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Weights in another type, frozen ones too; what a model of transformers computes and keeps
    beside them stays.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def _is_sharded(model: nn.Module, mesh: Mesh, how: WrapSettings) -> bool:
    """Plain copies whose gradients have the type of their weights are DDP's; all else that crosses
    ranks is FSDP's, with one shard if need be.
    """
    narrow = isinstance(model, Decoder) and how.compute != "fp32"
    if mesh.degrees.shard * mesh.degrees.tensor * mesh.degrees.pipeline > 1:
        return mesh.replicas.world > 1 or narrow
    return narrow or how.precision.reduce != "fp32" or how.precision.master == "stochastic"


def finish_wrapping(model: nn.Module, mesh: Mesh) -> nn.Module:
    """The module to call in training; `model` stays the owner of the parameters. DDP looks at the
    weights, so it comes when they are there.
    """
    if mesh.replicas.world == 1 or is_fsdp(model) or isinstance(model, Pipeline):
        return model
    return DistributedDataParallel(
        model, process_group=mesh.replicas.group, gradient_as_bucket_view=True
    )


def compute_weights_dtype(model: AnyModel, mesh: Mesh, how: WrapSettings) -> torch.dtype | None:
    """The type to put weights in that this rank holds whole, so that they need not be turned into
    it for each product; None to leave them.
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
    """Where a wrapped model is given its memory."""
    return torch.device("cpu") if how.memory.offload.weights else mesh.device


def make_masters(model: AnyModel, mesh: Mesh, how: WrapSettings) -> Masters:
    """What the optimizer changes in place of the model's weights, which have their memory
    already.
    """
    return Masters(
        model,
        mesh,
        shared=tied_across_stages(model),
        working=compute_weights_dtype(model, mesh, how),
        stochastic=how.precision.master == "stochastic",
        on_host=how.memory.offload.optimizer,
    )


def sum_factor(module: nn.Module, mesh: Mesh) -> float:
    """What turns the gradients that a wrapper leaves into sums over all ranks.

    The step needs sums (a mean of means is wrong where ranks hold unequal numbers of targets), and
    DDP leaves averages. Multiplying back is exact for powers of two. A hook that sums instead would
    run Python in the threads of the backend.
    """
    return float(mesh.replicas.world) if isinstance(module, DistributedDataParallel) else 1.0


def last_micro_batch(module: nn.Module, mesh: Mesh, is_last: bool) -> AbstractContextManager[None]:
    """Copies of a gradient are summed over ranks with the last micro-batch only; the earlier ones
    add up locally.

    Where weights are sharded, each micro-batch's gradients are brought to their shards at once:
    whole, they would not fit.
    """
    if is_fsdp(module):
        module.set_requires_gradient_sync(is_last or mesh.degrees.shard > 1)
        module.set_requires_all_reduce(is_last or mesh.degrees.replicate == 1)
        module.set_is_last_backward(is_last)
    if isinstance(module, DistributedDataParallel) and not is_last:
        return module.no_sync()
    return contextlib.nullcontext()


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while."""
    was_training = model.training
    model.eval()
    for part in local_stages(model):
        if is_fsdp(part):
            # transformers' generation calls what is inside of the model, whose own weights would
            # not be gathered for that
            part.unshard()
    try:
        yield
    finally:
        model.train(was_training)
        for module in model.modules():
            if is_fsdp(module):
                # what was gathered for this would be taken for the weights of the next step
                module.reshard()
