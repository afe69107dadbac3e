"""Which part of a parameter is here: all of it, or, once wrappers have spread it over ranks, a box
of rows and columns.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

Box = tuple[slice, ...]


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def box(tensor: Tensor) -> Box:
    """Where that lies in the whole tensor, a slice for each dimension."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))


def spread_as(like: Tensor, mine: Tensor) -> Tensor:
    """This rank's part `mine` as a tensor that is spread as `like` is."""
    if not isinstance(like, DTensor):
        return mine
    # Not `from_local`: what waits on the host would be copied to the mesh's device, and what is
    # loaded into the copy would be lost.
    spec = DTensorSpec(
        like.device_mesh,
        like.placements,
        tensor_meta=TensorMeta(like.shape, like.stride(), mine.dtype),
    )
    return DTensor(mine, spec, requires_grad=mine.requires_grad)


def is_spread(model: nn.Module) -> bool:
    """Whether any parameter of a model lies on several ranks."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


@torch.no_grad()
def give_memory(model: nn.Module, device: torch.device) -> None:
    """Room for every parameter that is still on `meta`, in place of it; nothing is written
    there.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        model.to_empty(device=device)
