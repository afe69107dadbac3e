"""Sharding of weights, gradients and optimizer state over ranks (ZeRO, Rajbhandari et al. 2020)
with torch's FSDP2; gradients are summed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ingot.base.errors import WrongInput
from ingot.models.device import accelerator
from ingot.models.native.decoder import Decoder
from ingot.models.native.experts import Experts
from ingot.models.parameters import is_dtensor
from ingot.parallel.experts import RankExchange

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import Shard

INTEGERS_SINCE = "2.13"
"""The version of torch whose FSDP gives no gradients to weights that can have none."""


def is_fsdp(module: nn.Module) -> TypeGuard[FSDPModule]:
    """Whether FSDP2 shards a module.

    FSDP2 takes a second to import; if nothing has imported it, no module is sharded by it.
    """
    # Another thread may be importing it now; while it does, none is either.
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return kind is not None and isinstance(module, kind)


def shard_weights(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    reshard: bool,
    compute: torch.dtype | None,
    reduce: torch.dtype,
    offload: bool = False,
    experts: DeviceMesh | None = None,
) -> None:
    """Shard a model in place. Each layer is a unit that is gathered when it is used; all remaining
    parameters are one unit, gathered once a step.

    Args:
        mesh: axes `replicate, shard`; with one shard, gradients are only summed over replicas.
        reshard: free a layer's gathered weights after its forward pass and gather them again in
            backward.
        compute: dtype in which weights are gathered; None for their own.
        reduce: dtype in which gradients are summed.
        offload: keep this rank's shards in host memory.
        experts: the mesh of the ranks that hold the same experts, with the same axes; None: all
            ranks do.

    Raises:
        WrongInput: weights are in few bits, and this torch cannot shard them.
    """
    _check_integers(model)
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )

    policy = MixedPrecisionPolicy(
        param_dtype=compute, reduce_dtype=reduce, cast_forward_inputs=False
    )
    waiting = CPUOffloadPolicy(pin_memory=accelerator() is not None) if offload else OffloadPolicy()
    unit = partial(fully_shard, mp_policy=policy, offload_policy=waiting)
    if experts is not None:
        # Units of their own, within that of their layer: their gradients come from the rows of all
        # ranks of the expert axis, and are summed over the others only.
        placement = _expert_placement(experts["shard"].size())
        for mixture in (one for one in model.modules() if isinstance(one, Experts)):
            unit(
                mixture,
                mesh=experts,
                reshard_after_forward=reshard,
                shard_placement_fn=placement,
            )
    whole = partial(unit, mesh=mesh, shard_placement_fn=_placement(mesh["shard"].size()))
    for layer in layers(model):
        whole(layer, reshard_after_forward=reshard)
    # A head tied to the embedding must be in one unit with it; the root's unit is freed last.
    whole(model, reshard_after_forward=False)
    if isinstance(model, Decoder):
        for method in ("hidden", "logits", "project"):
            register_fsdp_forward_method(model, method)
    for module in model.modules():
        if is_fsdp(module):
            # FSDP averages by default; the divide factor alone does not change that on gloo.
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)


def gather_once(model: nn.Module) -> None:
    """Gather each unit once and free it again. FSDP keeps the tensors of the first time, and in
    inference mode, in which answers are sampled, it would make such that no training can use.
    Collective.
    """
    for module in model.modules():
        if is_fsdp(module):
            module.unshard()
            module.reshard()


def _check_integers(model: nn.Module) -> None:
    """Raises WrongInput where weights are in few bits, and this torch cannot shard them."""
    whole = all(parameter.is_floating_point() for parameter in model.parameters())
    if torch.__version__ < INTEGERS_SINCE and not whole:
        raise WrongInput(
            "parallel.shard and parallel.replicate of a model in few bits (model.quantize) need"
            f" torch {INTEGERS_SINCE} or newer, and this is {torch.__version__}; set model.quantize"
            " to null"
        )


def layers(model: nn.Module) -> Iterator[nn.Module]:
    """The repeated layers of a model."""
    for stack in stacks(model):
        yield from stack


def stacks(model: nn.Module) -> list[list[nn.Module]]:
    """The repeated layers, one list for each stack of consecutive layers: the children of the
    outermost `ModuleList`s.
    """
    if isinstance(model, Decoder):
        return [list(model.model.layers.children())]
    found: list[list[nn.Module]] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and module not in inside:
            found.append([child for child in module if any(True for _ in child.parameters())])
            inside.update(module.modules())
    return found


def _placement(shards: int) -> Callable[[nn.Parameter], Shard | None]:
    """Shard rows (dim 0), or columns where tensor parallelism has already split rows unevenly."""
    from torch.distributed.tensor import Shard

    def of(parameter: nn.Parameter) -> Shard | None:
        if (
            is_dtensor(parameter)
            and parameter.placements[0] == Shard(0)
            and parameter.shape[0] % (parameter.device_mesh.size() * shards)
        ):
            return Shard(1) if parameter.ndim > 1 else None
        return None

    return of


def spread_experts(model: Decoder, mesh: DeviceMesh) -> None:
    """Give each rank of `mesh` its share of the experts of a model, or of a pipeline stage of it
    (on `meta`), in place. Raises WrongInput if they do not divide.
    """
    from torch.distributed.tensor import Shard, distribute_tensor

    for module in (one for one in model.modules() if isinstance(one, Experts)):
        if module.count % mesh.size():
            raise WrongInput(
                f"parallel.expert {mesh.size()} does not divide the {module.count} experts of a"
                " layer; lower it"
            )
        for name, parameter in module.named_parameters(recurse=False):
            share = distribute_tensor(parameter, mesh, [Shard(0)], src_data_rank=None)
            module.register_parameter(
                name, nn.Parameter(share, requires_grad=parameter.requires_grad)
            )
        module.exchange = RankExchange(mesh.get_group())


def _expert_placement(shards: int) -> Callable[[nn.Parameter], Shard]:
    """Shard whole experts, or the first side of each that divides."""
    from torch.distributed.tensor import Shard

    def of(parameter: nn.Parameter) -> Shard:
        held = (parameter.to_local() if is_dtensor(parameter) else parameter).shape
        return Shard(next((dim for dim, size in enumerate(held) if size % shards == 0), 0))

    return of
