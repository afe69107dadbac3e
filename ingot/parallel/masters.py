"""The weights as the optimizer knows them: plain local tensors, however the model's own are spread
over ranks.

They are float32; with stochastic rounding the model's own bf16, with float32 gradients. A share of
them may live on the host.

So the optimizer, clipping and the finite check are the same on one process and in every layout, and
no kernel has to know a DTensor. A gradient is a *sum* over ranks and micro-batches all the way; the
step divides once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import get_total_norm

from ingot.models.parameters import is_dtensor, local_tensor, shard_like
from ingot.parallel.mesh import Mesh

HOST = torch.device("cpu")
Axes = tuple[tuple[DeviceMesh, int], ...]
"""The axes of meshes along which a parameter is cut."""


@dataclass(frozen=True)
class Master:
    """One trained parameter, and what the optimizer changes in its place."""

    name: str
    parameter: nn.Parameter
    tensor: nn.Parameter
    """This rank's part of it: the parameter itself or a view of its memory; a copy where the
    parameter has another type or device.
    """
    counted: bool = True
    """Whether the gradient's norm counts it here, and not with its twin on another stage."""
    cut_along: Axes = ()
    """The axes of meshes along which the parameter is cut."""

    def spread(self, tensor: Tensor) -> Tensor:
        """A tensor of this rank's part, such as the optimizer's state, spread as the parameter
        is.
        """
        return shard_like(self.parameter, tensor)


class Masters:
    """All parameters of a model that are trained.

    Args:
        model: has its memory already, its weights and its wrappers.
        shared: names of parameters that both ends of a pipeline hold: a tied embedding.
        working: type that the model's own weights are put in where this rank holds them whole; the
            masters stay float32. None: as they are.
        stochastic: keep no float32 copies; the optimizer rounds what it makes of bf16 weights.
        on_host: share of the trained numbers whose masters, and so the optimizer's state and work,
            are the host's.
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
        self.mesh, self.stochastic, self._shared, self._model, self._working = (
            mesh,
            stochastic,
            frozenset(shared),
            model,
            working,
        )
        trained = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        away = _first_share(trained, on_host)
        self._masters = [
            self._of(name, parameter, exact=not stochastic, away=name in away)
            for name, parameter in trained.items()
        ]
        self.work_in(working)

    def __iter__(self) -> Iterator[Master]:
        return iter(self._masters)

    def _of(self, name: str, parameter: nn.Parameter, *, exact: bool, away: bool) -> Master:
        here = local_tensor(parameter.detach())
        dtype = torch.float32 if exact else here.dtype
        if away:
            tensor = nn.Parameter(here.to(HOST, dtype, copy=True))
        elif not is_dtensor(parameter) and parameter.dtype == torch.float32 == (
            self._working or torch.float32
        ):
            tensor = parameter
        else:
            tensor = nn.Parameter(here.to(dtype))  # the same memory where it has that type already
        if dtype != torch.float32:
            tensor.grad_dtype = torch.float32
        counted = name not in self._shared or self.mesh.ends.is_main
        return Master(name, parameter, tensor, counted, _sharded_axes(parameter))

    def work_in(self, dtype: torch.dtype | None) -> None:
        """Put the model's own weights in another type; float32 gives it the masters themselves."""
        if dtype is None:
            return
        masters = {id(master.parameter): master.tensor for master in self._masters}
        for parameter in self._model.parameters():
            if not is_dtensor(parameter):
                parameter.data = masters.get(id(parameter), parameter).data.to(dtype)

    @property
    def gradients(self) -> list[Tensor]:
        """What `collect` gave, local and float32."""
        return [master.tensor.grad for master in self._masters if master.tensor.grad is not None]

    def accumulate(self) -> None:
        """After each micro-batch: add up in float32 what a parameter of a smaller type would round
        away.
        """
        for master in self._masters:
            if master.parameter.dtype != torch.float32 and master.parameter.grad is not None:
                _add(master, local_tensor(_full_gradient(master.parameter)))

    def collect(self) -> None:
        """After the last micro-batch: every master has its gradient, summed over all ranks that
        have a part in it.
        """
        for master in self._masters:
            if master.tensor is not master.parameter and master.parameter.grad is not None:
                _add(master, local_tensor(_full_gradient(master.parameter)))
            if master.name in self._shared and self.mesh.ends.world > 1:
                if master.tensor.grad is None:
                    master.tensor.grad = torch.zeros_like(master.tensor, dtype=torch.float32)
                self.mesh.ends.all_sum(master.tensor.grad)

    def norm(self) -> Tensor:
        """Norm of the whole gradient, over all ranks; each number is counted once."""
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
        """Multiply all gradients, in place."""
        groups: dict[torch.device, list[Tensor]] = {}
        for gradient in self.gradients:
            groups.setdefault(gradient.device, []).append(gradient)
        for device, gradients in groups.items():
            torch._foreach_mul_(gradients, by.to(device))

    def flag_for_optimizer(self, flag: Tensor) -> Tensor:
        """A flag on the device where the optimizer reads it: copied to the host, which waits for
        the device, if any master lives there.
        """
        return (
            flag.to(HOST) if any(master.tensor.device == HOST for master in self._masters) else flag
        )

    @torch.no_grad()
    def publish(self) -> None:
        """After the optimizer: the model's weights are what the masters are now, and gradients are
        gone.
        """
        for master in self._masters:
            if master.tensor is not master.parameter:
                here = local_tensor(master.parameter.detach())
                same = here.data_ptr() == master.tensor.data_ptr()
                if not same or here.device != master.tensor.device:
                    here.copy_(master.tensor)
            master.parameter.grad = master.tensor.grad = None


def _full_gradient(parameter: nn.Parameter) -> Tensor:
    """The gradient of a parameter, spread as it is: what several ranks hold a part of the sum of is
    summed.
    """
    grad = parameter.grad
    assert grad is not None
    if is_dtensor(parameter) and is_dtensor(grad) and grad.placements != parameter.placements:
        return grad.redistribute(placements=parameter.placements)
    return grad


def _add(master: Master, grad: Tensor) -> None:
    master.parameter.grad = None
    if master.tensor.grad is None:
        master.tensor.grad = grad.to(master.tensor.device, torch.float32)
    else:
        master.tensor.grad += grad.to(master.tensor.device)


def _first_share(trained: Mapping[str, Tensor], share: float) -> set[str]:
    """Names of parameters, the first ones, that hold as nearly as can be this share of all numbers;
    the same on all ranks that hold them.
    """
    sizes = {name: parameter.numel() for name, parameter in trained.items()}
    before = dict(zip(sizes, itertools.accumulate(sizes.values(), initial=0), strict=False))
    return {
        name
        for name, size in sizes.items()
        if before[name] + size / 2 < share * sum(sizes.values())
    }


def _sharded_axes(parameter: Tensor) -> Axes:
    if not is_dtensor(parameter):
        return ()
    return tuple(
        (parameter.device_mesh, axis)
        for axis, placement in enumerate(parameter.placements)
        if not placement.is_replicate()
    )
