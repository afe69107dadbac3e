"""The part of a parameter that this rank holds: all of it or, once wrappers have sharded it, a
slice of rows and columns. Also its initialisation, which does not depend on the sharding.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from typing_extensions import TypeIs

from ingot.models.native.decoder import Decoder

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Slices = tuple[slice, ...]


def is_dtensor(tensor: Tensor) -> TypeIs[DTensor]:
    """Whether a tensor is sharded over ranks.

    `torch.distributed.tensor` takes a second to import; if nothing has imported it, no tensor is a
    DTensor.
    """
    # Another thread may be importing it now; while it does, there is none either.
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor, sharing its memory."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def shard_slices(tensor: Tensor, coordinate: Sequence[int] | None = None) -> Slices:
    """The position in the whole tensor, a slice for each dimension, of this rank's shard, or of
    that of the rank at `coordinate` of the tensor's mesh.
    """
    if not is_dtensor(tensor):
        return tuple(slice(0, size) for size in tensor.shape)
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    mesh = tensor.device_mesh
    here = list(mesh.get_coordinate() or ()) if coordinate is None else list(coordinate)
    with _disable_current_modes():  # it computes with tensors, which must have contents
        shape, offset = _compute_local_shape_and_global_offset(
            tensor.shape, mesh.shape, here, tensor.placements
        )
    return tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))


def shard_like(like: Tensor, local: Tensor) -> Tensor:
    """This rank's shard `local` as a tensor sharded like `like`."""
    if not is_dtensor(like):
        return local
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    # Not `from_local`: it would copy a host tensor to the mesh's device, and values loaded into the
    # copy would be lost.
    spec = DTensorSpec(
        like.device_mesh,
        like.placements,
        tensor_meta=TensorMeta(like.shape, like.stride(), local.dtype),
    )
    return DTensor(local, spec, requires_grad=local.requires_grad)


def whole_sum(tensor: Tensor) -> Tensor:
    """A sum whose parts the ranks of a mesh have, added up; rows that they share stay shared."""
    if not is_dtensor(tensor) or not any(one.is_partial() for one in tensor.placements):
        return tensor
    from torch.distributed.tensor import Replicate

    return tensor.redistribute(
        placements=[Replicate() if one.is_partial() else one for one in tensor.placements]
    )


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Everything that the files of a decoder hold: its parameters, tied ones once, and the buffers
    that training changes without a gradient.
    """
    yield from model.named_parameters()
    yield from model.named_buffers()


def is_sharded(model: nn.Module) -> bool:
    """Whether any parameter of a model is sharded over ranks."""
    return any(is_dtensor(parameter) for parameter in model.parameters())


@torch.no_grad()
def allocate(model: nn.Module, device: torch.device) -> None:
    """Allocate every parameter that is still on `meta`, uninitialised."""

    def empty(tensor: Tensor) -> Tensor:
        if is_dtensor(tensor):
            return torch.empty_like(tensor, device=device)
        # `empty_like` of a tensor on `meta` imports sympy, which takes most of a second.
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)

    if any(parameter.is_meta for parameter in model.parameters()):
        model._apply(empty)


BLOCK_ELEMENTS = 2**17
"""That a thread fills at a time: intermediate numbers of a megabyte each."""
_WORDS = 4  # 64-bit words that one Philox counter yields (Salmon et al. 2011)


def normal_rows(seed: int, name: str, first: int, rows: int, columns: int) -> np.ndarray:
    """Standard normal float32 `[rows, columns]`: rows `first` to `first + rows` of the parameter
    `name`.

    Box-Muller on Philox output with a fixed number of words per row, so that row r starts at
    counter r * counters-per-row and any rank can generate its rows alone.
    """
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16], "little")
    words = -(-columns // (2 * _WORDS)) * 2 * _WORDS  # whole counters, an even number of words
    counters = words // _WORDS
    generator = np.random.Philox(key=key, counter=first * counters)
    uniform = (generator.random_raw(rows * words) >> 11) * 2.0**-53  # [0, 1)
    pairs = uniform.reshape(rows, 2, words // 2)
    radius = np.sqrt(-2.0 * np.log1p(-pairs[:, 0]))
    angle = 2.0 * np.pi * pairs[:, 1]
    normal = np.concatenate((radius * np.cos(angle), radius * np.sin(angle)), axis=1)
    return normal[:, :columns].astype(np.float32)


def fill_normal(parameter: Tensor, seed: int, name: str, std: float) -> None:
    """Fill a matrix `[rows, columns]`, or each of a stack `[N, rows, columns]`, or this rank's
    shard of it, in place.
    """
    here, (*stack, rows, columns) = local_tensor(parameter), shard_slices(parameter)
    width = parameter.shape[-1]
    if not stack:
        _fill_matrix(here, rows, columns, width, seed, name, std)
        return
    for place, number in enumerate(range(stack[0].start, stack[0].stop)):
        _fill_matrix(here[place], rows, columns, width, seed, f"{name}.{number}", std)


def _fill_matrix(
    here: Tensor, rows: slice, columns: slice, width: int, seed: int, name: str, std: float
) -> None:
    """Fill the given rows and columns of a matrix that is `width` wide, a block of rows at a time
    on each thread.
    """
    block = max(1, BLOCK_ELEMENTS // width)
    firsts = range(rows.start, rows.stop, block)
    threads = max(1, min(torch.get_num_threads(), len(firsts)))

    def drawn(first: int) -> np.ndarray:
        return normal_rows(seed, name, first, min(block, rows.stop - first), width)[:, columns]

    # numpy computes without the interpreter's lock; torch's modes are the caller's alone.
    with ThreadPoolExecutor(threads) as pool:
        for some in range(0, len(firsts), threads):
            together = firsts[some : some + threads]
            for first, values in zip(together, pool.map(drawn, together), strict=True):
                place = first - rows.start
                here[place : place + len(values)].copy_(torch.from_numpy(values).mul_(std))


@torch.no_grad()
def init_weights(model: Decoder, seed: int, *, quick: bool = False) -> None:
    """Initialise every weight: matrices normal with the configuration's `initializer_range`, each
    expert's its own, norms such that they multiply by 1, biases and sinks 0. `quick`: by the
    device's generator, for a trial: other numbers on every device and in every layout.
    """
    for name, parameter in named_weights(model):
        if not parameter.is_floating_point():
            continue  # a matrix kept as bytes: `init_packed`
        if parameter.ndim >= 2 and not name.endswith("bias"):
            if quick:
                local_tensor(parameter).normal_(std=model.config.initializer_range)
            else:
                fill_normal(parameter, seed, name, model.config.initializer_range)
        else:
            norm = 1.0 - model.config.norm_offset
            local_tensor(parameter).fill_(0.0 if name.endswith(("bias", "sinks")) else norm)
