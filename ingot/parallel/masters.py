"""The weights as the optimizer sees them: plain local tensors, however the model's own weights are
sharded over ranks.

Masters are float32; with stochastic rounding they are the model's own bf16 weights, with float32
gradients. A share of them may live in host memory.

Optimizer, clipping and the finite check are therefore the same on one process and in every layout,
and no kernel needs to handle a DTensor. Gradients are *sums* over ranks and micro-batches
throughout; the step divides once.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import get_total_norm

from ingot.models.native.experts import Router
from ingot.models.parameters import is_dtensor, local_tensor, shard_like
from ingot.parallel.mesh import Mesh

HOST = torch.device("cpu")
Axes = tuple[tuple[DeviceMesh, int], ...]
"""The mesh axes along which a parameter is sharded."""


@dataclass(frozen=True)
class Master:
    """One trained parameter and the tensor that the optimizer updates in its place."""

    name: str
    parameter: nn.Parameter
    tensor: nn.Parameter
    """This rank's shard: the parameter itself or a view of its memory; a copy if the parameter has
    another dtype or device.
    """
    counted: bool = True
    """Whether the gradient norm counts it on this rank, and not its tied copy on another stage."""
    cut_along: Axes = ()
    """The mesh axes along which the parameter is sharded."""

    def spread(self, tensor: Tensor) -> Tensor:
        """Wrap a tensor of this rank's shard, such as optimizer state, as a DTensor sharded like
        the parameter.
        """
        return shard_like(self.parameter, tensor)


class Masters:
    """All trained parameters of a model, and routers that were taken out of training, which have no
    gradient: a checkpoint holds them too, so that no rank has to look for them elsewhere.

    Args:
        model: already allocated, initialised and wrapped.
        shared: names of parameters that both ends of a pipeline hold: a tied embedding.
        working: dtype for those of the model's own weights that this rank holds whole; the masters
            stay float32. None leaves them unchanged.
        stochastic: keep no float32 copies; the optimizer rounds its bf16 updates stochastically.
        on_host: share of the trained parameters whose masters, with the optimizer's state and work,
            are on the host.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        shared: Iterable[str] = (),
        working: torch.dtype | None = None,
        *,
        stochastic: bool = False,
        on_host: float = 0.0,
    ) -> None:
        self.mesh, self.model, self.stochastic = mesh, model, stochastic
        self._shared, self._working = frozenset(shared), working
        kept = {
            name: router
            for name, router in model.named_modules()
            if isinstance(router, Router) and (router.is_frozen or router.weight.requires_grad)
        }
        self.buffers: dict[str, Tensor] = {
            f"{name}.{buffer}": value
            for name, router in kept.items()
            for buffer, value in router.named_buffers()
        }
        """What is trained without a gradient: correction biases, whole on each rank."""
        trained = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad or name.removesuffix(".weight") in kept
        }
        self.on_host = _first_share(trained, on_host, self._shared)
        """Names of the parameters whose masters are on the host."""
        self._masters = [
            self._of(name, parameter, exact=not stochastic, on_host=name in self.on_host)
            for name, parameter in trained.items()
        ]
        self.work_in(working)

    def __iter__(self) -> Iterator[Master]:
        return iter(self._masters)

    def _of(self, name: str, parameter: nn.Parameter, *, exact: bool, on_host: bool) -> Master:
        here = local_tensor(parameter.detach())
        dtype = torch.float32 if exact else here.dtype
        if on_host:
            tensor = nn.Parameter(here.to(HOST, dtype, copy=True))
        elif not is_dtensor(parameter) and parameter.dtype == torch.float32 == (
            self._working or torch.float32
        ):
            tensor = parameter
        else:
            tensor = nn.Parameter(here.to(dtype))  # shares memory if the dtype is the same
        if dtype != torch.float32:
            tensor.grad_dtype = torch.float32
        counted = name not in self._shared or self.mesh.ends.is_main
        return Master(name, parameter, tensor, counted, _sharded_axes(parameter))

    def work_in(self, dtype: torch.dtype | None) -> None:
        """Set the dtype of the model's own weights; float32 makes them share the masters'
        memory.
        """
        if dtype is None:
            return
        masters = {id(master.parameter): master.tensor for master in self._masters}
        for parameter in self.model.parameters():
            if not is_dtensor(parameter) and parameter.is_floating_point():
                # A master on the host leaves its parameter where it is.
                kept = masters.get(id(parameter), parameter).data
                parameter.data = kept.to(parameter.device, dtype)

    @property
    def gradients(self) -> list[Tensor]:
        """The gradients after `collect`: local, float32."""
        return [master.tensor.grad for master in self._masters if master.tensor.grad is not None]

    @property
    def read_each(self) -> bool:
        """Whether `accumulate` reads the gradients of each micro-batch."""
        return any(master.parameter.dtype != torch.float32 for master in self._masters)

    def accumulate(self) -> None:
        """After each micro-batch: add the gradients of parameters in a narrower dtype into float32,
        where small contributions are not rounded away.
        """
        for master in self._masters:
            if master.parameter.dtype != torch.float32 and master.parameter.grad is not None:
                _accumulate(master, local_tensor(_full_gradient(master.parameter)))

    def collect(self) -> None:
        """After the last micro-batch: every master has its gradient, summed over all ranks that
        contribute to it.
        """
        for master in self._masters:
            if master.tensor is not master.parameter and master.parameter.grad is not None:
                _accumulate(master, local_tensor(_full_gradient(master.parameter)))
            if master.name in self._shared and self.mesh.ends.world > 1:
                if master.tensor.grad is None:
                    master.tensor.grad = torch.zeros_like(master.tensor, dtype=torch.float32)
                self.mesh.ends.all_sum(master.tensor.grad)

    def norm(self) -> Tensor:
        """Norm of the global gradient over all ranks; each element is counted once."""
        groups: dict[Axes, list[Tensor]] = {}
        for master in self._masters:
            if master.counted and master.tensor.grad is not None:
                groups.setdefault(master.cut_along, []).append(master.tensor.grad)
        total = torch.zeros((), device=self.mesh.device)
        for axes, gradients in groups.items():
            square = get_total_norm(gradients).square().to(self.mesh.device)
            for mesh, axis in axes:
                dist.all_reduce(square, group=mesh.get_group(axis))
            total += square
        return self.mesh.pipeline.all_sum(total).sqrt()

    def scale(self, by: Tensor) -> None:
        """Multiply all gradients in place."""
        groups: dict[torch.device, list[Tensor]] = {}
        for gradient in self.gradients:
            groups.setdefault(gradient.device, []).append(gradient)
        for device, gradients in groups.items():
            torch._foreach_mul_(gradients, by.to(device))

    def flag_for_optimizer(self, flag: Tensor) -> Tensor:
        """The flag on the device where the optimizer reads it: copied to the host, which
        synchronises, if any master lives there.
        """
        return (
            flag.to(HOST) if any(master.tensor.device == HOST for master in self._masters) else flag
        )

    @torch.no_grad()
    def publish(self) -> None:
        """After the optimizer step: copy the masters into the model's weights and drop all
        gradients.
        """
        for master in self._masters:
            if master.tensor is not master.parameter:
                here = local_tensor(master.parameter.detach())
                if not _share_memory(here, master.tensor):
                    here.copy_(master.tensor)
            master.parameter.grad = master.tensor.grad = None


def _share_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of a size lie in the same place; known without asking for addresses,
    which tensors without contents do not have.
    """
    storages = {tensor.untyped_storage()._cdata for tensor in (one, other)}
    return len(storages) == 1 and one.storage_offset() == other.storage_offset()


def _full_gradient(parameter: nn.Parameter) -> Tensor:
    """The gradient of a parameter, sharded as the parameter is; partial sums held by several ranks
    are reduced.
    """
    grad = parameter.grad
    assert grad is not None
    if is_dtensor(parameter) and is_dtensor(grad) and grad.placements != parameter.placements:
        return grad.redistribute(placements=parameter.placements)
    return grad


def _accumulate(master: Master, grad: Tensor) -> None:
    master.parameter.grad = None
    if master.tensor.grad is None:
        master.tensor.grad = grad.to(master.tensor.device, torch.float32)
    else:
        master.tensor.grad += grad.to(master.tensor.device)


def _first_share(trained: Mapping[str, Tensor], share: float, shared: Collection[str]) -> set[str]:
    """Names of the first parameters that together hold this share of all elements as nearly as
    possible; the same on all ranks that hold them. Both ends of a pipeline hold the `shared` ones
    and sum their gradients, but beside them each holds others: to choose the same on both, the
    shared ones are left out unless all are chosen.
    """
    sizes = {
        name: parameter.numel()
        for name, parameter in trained.items()
        if share == 1 or name not in shared
    }
    before = dict(zip(sizes, itertools.accumulate(sizes.values(), initial=0), strict=False))
    total = sum(parameter.numel() for parameter in trained.values())
    return {name for name, size in sizes.items() if before[name] + size / 2 < share * total}


def _sharded_axes(parameter: Tensor) -> Axes:
    if not is_dtensor(parameter):
        return ()
    return tuple(
        (parameter.device_mesh, axis)
        for axis, placement in enumerate(parameter.placements)
        if not placement.is_replicate()
    )
