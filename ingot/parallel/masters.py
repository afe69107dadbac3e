"""The weights as the optimizer knows them: plain local float32 tensors, however the model's own are spread over ranks.

So the optimizer, clipping and the finite check are the same on one process and in every layout, and no kernel has to know a DTensor.
A gradient is a *sum* over ranks and micro-batches all the way; the step divides once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from ingot.models.placed import local, spread_as
from ingot.parallel.mesh import Mesh

Axes = tuple[tuple[DeviceMesh, int], ...]
"""The axes of meshes along which a parameter is cut."""


@dataclass(frozen=True)
class Master:
    """One trained parameter, and what the optimizer changes in its place."""

    name: str
    parameter: nn.Parameter
    tensor: nn.Parameter
    """This rank's part of it: the parameter itself or a view of its memory; a copy where the parameter has another type."""
    counted: bool = True
    """Whether the gradient's norm counts it here, and not with its twin on another stage."""

    def spread(self, tensor: Tensor) -> Tensor:
        """A tensor of this rank's part, such as the optimizer's state, spread as the parameter is."""
        return spread_as(self.parameter, tensor)


class Masters:
    """All parameters of a model that are trained.

    Args:
        model: has its memory already, its weights and its wrappers.
        shared: names of parameters that both ends of a pipeline hold: a tied embedding.
        working: type that the model's own weights are put in where this rank holds them whole; the masters stay float32. None: as they are.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, shared: Iterable[str] = (), working: torch.dtype | None = None) -> None:
        self.mesh, self._shared, self._model, self._working = mesh, frozenset(shared), model, working
        self._masters = [self._of(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        self.work_in(working)

    def __iter__(self) -> Iterator[Master]:
        return iter(self._masters)

    def _of(self, name: str, parameter: nn.Parameter) -> Master:
        here = local(parameter.detach())
        if not isinstance(parameter, DTensor) and parameter.dtype == torch.float32 == (self._working or torch.float32):
            tensor = parameter
        else:
            tensor = nn.Parameter(here.float())  # the same memory where it is float32 already
        return Master(name, parameter, tensor, counted=name not in self._shared or self.mesh.ends.is_main)

    def work_in(self, dtype: torch.dtype | None) -> None:
        """Put the model's own weights in another type; float32 gives it the masters themselves."""
        if dtype is None:
            return
        masters = {id(master.parameter): master.tensor for master in self._masters}
        for parameter in self._model.parameters():
            if not isinstance(parameter, DTensor):
                parameter.data = masters.get(id(parameter), parameter).data.to(dtype)

    @property
    def gradients(self) -> list[Tensor]:
        """What `collect` gave, local and float32."""
        return [master.tensor.grad for master in self._masters if master.tensor.grad is not None]

    def accumulate(self) -> None:
        """After each micro-batch: add up in float32 what a parameter of a smaller type would round away."""
        for master in self._masters:
            if master.parameter.dtype != torch.float32 and master.parameter.grad is not None:
                _add(master, local(_whole(master.parameter)))

    def collect(self) -> None:
        """After the last micro-batch: every master has its gradient, summed over all ranks that have a part in it."""
        for master in self._masters:
            if master.tensor is not master.parameter and master.parameter.grad is not None:
                _add(master, local(_whole(master.parameter)))
            if master.name in self._shared and self.mesh.ends.world > 1:
                if master.tensor.grad is None:
                    master.tensor.grad = torch.zeros_like(master.tensor)
                self.mesh.ends.all_sum(master.tensor.grad)

    def norm(self) -> Tensor:
        """Norm of the whole gradient, over all ranks; each number is counted once."""
        groups: dict[Axes, list[Tensor]] = {}
        for master in self._masters:
            if master.counted and master.tensor.grad is not None:
                groups.setdefault(_cut_along(master.parameter), []).append(master.tensor.grad)
        total = torch.zeros((), device=self.mesh.device)
        for axes, gradients in groups.items():
            square = get_total_norm(gradients).square()
            for mesh, axis in axes:
                dist.all_reduce(square, group=mesh.get_group(axis))
            total += square
        return self.mesh.pipeline.all_sum(total).sqrt()

    @torch.no_grad()
    def publish(self) -> None:
        """After the optimizer: the model's weights are what the masters are now, and gradients are gone."""
        for master in self._masters:
            if master.parameter.dtype != master.tensor.dtype:
                local(master.parameter.detach()).copy_(master.tensor)
            master.parameter.grad = master.tensor.grad = None


def _whole(parameter: nn.Parameter) -> Tensor:
    """The gradient of a parameter, spread as it is: what several ranks hold a part of the sum of is summed."""
    grad = parameter.grad
    assert grad is not None
    if isinstance(parameter, DTensor) and isinstance(grad, DTensor) and grad.placements != parameter.placements:
        return grad.redistribute(placements=parameter.placements)
    return grad


def _add(master: Master, grad: Tensor) -> None:
    master.parameter.grad = None
    if master.tensor.grad is None:
        master.tensor.grad = grad.to(master.tensor.dtype)
    else:
        master.tensor.grad += grad


def _cut_along(parameter: Tensor) -> Axes:
    if not isinstance(parameter, DTensor):
        return ()
    return tuple((parameter.device_mesh, axis) for axis, placement in enumerate(parameter.placements) if not placement.is_replicate())
