"""The training state as named tensors, the reverse, and its copy in a host staging buffer. Names
depend on neither layout, wrappers nor the optimizer's parameter numbering.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from ingot.base.errors import WrongInput
from ingot.models.parameters import local_tensor, shard_like
from ingot.parallel.masters import Master, Masters
from ingot.parallel.mesh import Mesh

MODEL, OPTIMIZER = "model.", "optimizer."


def training_tensors(masters: Masters, optimizer: Optimizer | None) -> dict[str, Tensor]:
    """`model.NAME` for every trained parameter and buffer, and `optimizer.NAME.KEY` for the
    optimizer state of a parameter: sharded as the parameter is where it has its shape (`exp_avg`),
    else whole on each rank (`step`).

    The tensors share memory with the training state. After loading into them call `copy_back`:
    values of a tensor on the host whose parameter is on a device may have been loaded into a copy.
    Frozen parameters (the base under an adapter) are left out; they come from the run's start.

    Raises:
        WrongInput: the optimizer has state that would not come back as it is.
    """
    return {
        name: tensor if master is None else master.spread(tensor)
        for name, tensor, master in _local_tensors(masters, optimizer)
    }


def copy_back(masters: Masters, optimizer: Optimizer | None, tensors: Mapping[str, Tensor]) -> None:
    """Copy loaded values of `training_tensors` back where memory is not shared."""
    for name, tensor, _ in _local_tensors(masters, optimizer):
        loaded = local_tensor(tensors[name])
        if loaded.device != tensor.device or loaded.data_ptr() != tensor.data_ptr():
            tensor.copy_(loaded)


def _local_tensors(
    masters: Masters, optimizer: Optimizer | None
) -> Iterator[tuple[str, Tensor, Master | None]]:
    """This rank's tensors by name, each with the `Master` whose sharding it has; None for what
    each rank has whole, such as Adam's step.
    """
    state = {} if optimizer is None else optimizer.state
    others = (state[key] for key in state.keys() - {master.tensor for master in masters})
    if any(not isinstance(kept, dict) or kept for kept in others):
        raise WrongInput(
            "the optimizer has state of what is no trained parameter; keep it as tensors in the"
            " state of its parameters, where checkpoints have it"
        )
    for master in masters:
        yield MODEL + master.name, master.tensor.detach(), master
        # By the name alone: as text, a pair would be the whole tensor, fetched from its device.
        for key, value in sorted(state.get(master.tensor, {}).items(), key=_name):
            _check_kept(master, key, value)
            is_alike = value.shape == master.tensor.shape
            yield f"{OPTIMIZER}{master.name}.{key}", value, master if is_alike else None
    yield from ((MODEL + name, buffer, None) for name, buffer in masters.buffers.items())


def _name(item: tuple[object, object]) -> str:
    return str(item[0])


def _check_kept(master: Master, key: object, value: object) -> None:
    """Raises WrongInput if a checkpoint cannot keep this part of a parameter's optimizer state."""
    what = f"optimizer state {master.name}.{key}"
    if not isinstance(key, str) or "." in key:
        raise WrongInput(f"{what} has a key that is no name without a dot; give it another")
    if not isinstance(value, Tensor):
        raise WrongInput(f"{what} is of type {type(value).__name__}; make it a tensor")
    # Replicas in bf16 are sharded by name alone, over an axis of one rank.
    is_cut = any(mesh.size(axis) > 1 for mesh, axis in master.cut_along)
    if value.ndim and value.shape != master.tensor.shape and is_cut:
        # Each rank would have one of its own, of its shard; another layout has other shards.
        raise WrongInput(
            f"{what} is {list(value.shape)}, and {master.name}, which is divided among ranks, is"
            f" {list(master.tensor.shape)} here; give it that shape or make it a scalar, or train"
            " with this optimizer where each rank has the whole weights"
        )


class StoredShape(Protocol):
    """What is known of a stored tensor without reading it."""

    @property
    def size(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...


def allocate_state(
    masters: Masters, optimizer: Optimizer, stored: Mapping[str, StoredShape]
) -> None:
    """Create zeroed state in a fresh optimizer for each stored key, so that `training_tensors` has
    a tensor to load it into: what had the parameter's shape is this rank's shard, else it is whole.
    """
    by_name = {master.name: master for master in masters}
    for full, about in sorted(stored.items()):
        name, _, key = full.removeprefix(OPTIMIZER).rpartition(".")
        if not full.startswith(OPTIMIZER) or name not in by_name:
            continue
        master, tensor = by_name[name], by_name[name].tensor
        # Fused kernels want a counter of steps on the parameter's device, too.
        optimizer.state[tensor][key] = torch.zeros(
            tensor.shape if about.size == master.parameter.shape else about.size,
            dtype=about.dtype,
            device=tensor.device,
        )


def mismatches(tensors: Mapping[str, Tensor], there: Mapping[str, Any], mesh: Mesh) -> list[str]:
    """Differences in names and shapes between this rank's tensors and the stored ones. The stored
    names must equal the union over all pipeline stages. Collective over the pipeline axis.
    """
    names = sorted(there)
    wrong = [f"{name} is missing" for name in sorted(tensors.keys() - there.keys())]
    wrong += [
        f"{name} is {list(size)}, {list(tensors[name].shape)} is wanted"
        for name in names
        if name in tensors
        and (size := getattr(there[name], "size", None)) is not None
        and size != tensors[name].shape
    ]
    elsewhere, *holders = mesh.pipeline.agree(
        len(wrong), *(float(name in tensors) for name in names)
    )
    unknown = [
        f"{name} is not part of this model"
        for name, count in zip(names, holders, strict=True)
        if not count
    ]
    # If only another stage found a difference, this one must stop as well.
    return [*wrong, *unknown] or ["another stage of the pipeline says what"] * bool(elsewhere)


ALIGNED_BYTES = 64


@dataclass(frozen=True)
class Staged:
    """A copy of the training state, sharded like its source. Valid until the next copy is made into
    the same buffer.
    """

    tensors: dict[str, Tensor]
    began: torch.Event | None = None
    ended: torch.Event | None = None

    def wait(self) -> float:
        """Wait until the device has finished copying; returns the seconds the copy took on its
        stream. Call it before the tensors are read, from any thread.
        """
        if self.began is None or self.ended is None:
            return 0.0
        self.ended.synchronize()
        return self.began.elapsed_time(self.ended) / 1e3


class Staging:
    """A host buffer for one copy of this rank's part of the training state, reused by every copy of
    the same shapes.

    It is as large as its source: with AdamW 12 bytes per trained parameter of this rank. Device
    tensors are copied on the current stream into pinned memory without blocking the host (the
    pinned allocator may take up to twice the size).
    """

    def __init__(self) -> None:
        self._specs: dict[str, tuple[torch.Size, torch.dtype]] = {}
        self._buffer: dict[str, Tensor] = {}

    def allocate(
        self, tensors: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], torch.device | None]:
        """Allocate the buffer unless it fits already. Returns this rank's part of each tensor to be
        copied, and the device if any lies on one.
        """
        here = {name: local_tensor(tensor) for name, tensor in tensors.items()}
        device = _device(here)
        specs = {name: (tensor.shape, tensor.dtype) for name, tensor in here.items()}
        if specs != self._specs:
            self._buffer = {}  # free the old buffer before allocating the new one
            self._buffer, self._specs = _allocate_block(specs, pinned=device is not None), specs
        return here, device

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Tensor]) -> Staged:
        here, device = self.allocate(tensors)
        began = _record_event(device)
        for name, tensor in here.items():
            self._buffer[name].copy_(tensor, non_blocking=True)
        return Staged(
            {name: shard_like(tensor, self._buffer[name]) for name, tensor in tensors.items()},
            began,
            _record_event(device),
        )


def staged_in_place(tensors: dict[str, Tensor]) -> Staged:
    """The tensors themselves without a copy, for callers that do not change them meanwhile."""
    ended = _record_event(_device({name: local_tensor(tensor) for name, tensor in tensors.items()}))
    return Staged(tensors, ended, ended)


def _device(tensors: Mapping[str, Tensor]) -> torch.device | None:
    return next((tensor.device for tensor in tensors.values() if tensor.device.type != "cpu"), None)


def _record_event(device: torch.device | None) -> torch.Event | None:
    """An event recorded on the device's current stream; None if everything is on the host."""
    if device is None:
        return None
    event = torch.Event(device, enable_timing=True)
    event.record(torch.accelerator.current_stream(device))
    return event


def _allocate_block(
    specs: Mapping[str, tuple[torch.Size, torch.dtype]], *, pinned: bool
) -> dict[str, Tensor]:
    """One tensor for each shape and dtype, all in one block of memory. Each has a storage of its
    own size: torch would otherwise serialise a copy of the larger storage.
    """
    offsets, total = {}, 0
    for name, (shape, dtype) in specs.items():
        offsets[name] = total
        total += -(-shape.numel() * dtype.itemsize // ALIGNED_BYTES) * ALIGNED_BYTES
    # Zeroing touches every page now: first-touch page faults take longer than the copy itself.
    block = torch.empty(total, dtype=torch.uint8, pin_memory=pinned).zero_().numpy()
    return {
        name: (
            torch.frombuffer(block, dtype=dtype, count=shape.numel(), offset=offsets[name]).view(
                shape
            )
            if shape.numel()
            else torch.empty(shape, dtype=dtype)
        )
        for name, (shape, dtype) in specs.items()
    }
