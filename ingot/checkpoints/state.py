"""A training state as named tensors, and back, and a copy of it in host memory, which is written
while training goes on. Names do not depend on layout, wrappers or the numbering of the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ingot.models.parameters import local_tensor, shard_like
from ingot.parallel.masters import Master, Masters
from ingot.parallel.mesh import Mesh

MODEL, OPTIMIZER = "model.", "optimizer."


def training_tensors(masters: Masters, optimizer: Optimizer | None) -> dict[str, Tensor]:
    """`model.NAME` for every parameter that is trained, `optimizer.NAME.KEY` for its state
    (`exp_avg`, ...).

    Each is spread over ranks as the parameter is. Memory is shared, not copied, but where it is on
    the host and the parameter is not: `settle` brings what was loaded there. What is frozen (the
    base under an adapter) is not training's to save: it comes from where the run started.
    """
    return {
        name: tensor if master is None else master.spread(tensor)
        for name, tensor, master in _mine(masters, optimizer)
    }


def settle(masters: Masters, optimizer: Optimizer | None, tensors: Mapping[str, Tensor]) -> None:
    """After loading into what `training_tensors` gave."""
    for name, tensor, _ in _mine(masters, optimizer):
        loaded = local_tensor(tensors[name])
        if loaded.device != tensor.device or loaded.data_ptr() != tensor.data_ptr():
            tensor.copy_(loaded)


def _mine(
    masters: Masters, optimizer: Optimizer | None
) -> Iterator[tuple[str, Tensor, Master | None]]:
    """This rank's tensors by their names, each with the master that it is spread as; None for one
    number for all of a parameter.
    """
    for master in masters:
        yield MODEL + master.name, master.tensor.detach(), master
        for key, value in (
            sorted(optimizer.state.get(master.tensor, {}).items()) if optimizer is not None else ()
        ):
            if isinstance(value, Tensor):
                yield (
                    f"{OPTIMIZER}{master.name}.{key}",
                    value,
                    master if value.ndim or not master.tensor.ndim else None,
                )


def make_room(masters: Masters, optimizer: Optimizer, stored: Iterable[str]) -> None:
    """Give a fresh optimizer empty state of the stored kinds, so that `training_tensors` has a
    place for each.
    """
    stored = set(stored)
    for master in masters:
        prefix = f"{OPTIMIZER}{master.name}."
        for key in sorted(
            full.removeprefix(prefix)
            for full in stored
            if full.startswith(prefix) and "." not in full.removeprefix(prefix)
        ):
            # Adam's step counter is one number a parameter, and fused kernels want it beside the
            # parameter. State is float32, whatever weights are.
            tensor = master.tensor
            shape = () if key == "step" else tensor.shape
            optimizer.state[tensor][key] = torch.zeros(
                shape, dtype=torch.float32, device=tensor.device
            )


def misfits(tensors: Mapping[str, Tensor], there: Mapping[str, Any], mesh: Mesh) -> list[str]:
    """What differs between the tensors of this rank and the stored ones, which all stages of a
    pipeline together must have.
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
    # Where only another stage has something to tell, this one stops with it.
    return [*wrong, *unknown] or ["another stage of the pipeline says what"] * bool(elsewhere)


ALIGNED_BYTES = 64


@dataclass(frozen=True)
class Staged:
    """The copies by the names of what was copied, spread as that is; they hold until the next copy
    is made.
    """

    tensors: dict[str, Tensor]
    began: torch.Event | None = None
    ended: torch.Event | None = None

    def settle(self) -> float:
        """Wait until a device has copied; the seconds that it did nothing else. To be called before
        the tensors are read, from any thread.
        """
        if self.began is None or self.ended is None:
            return 0.0
        self.ended.synchronize()
        return self.began.elapsed_time(self.ended) / 1e3


class Staging:
    """Room on the host for one copy of this rank's part of a training state, used again by every
    copy of the same shapes.

    It costs as much as what is copied: with AdamW 12 bytes for each trained number of this rank.
    What lies on a device is copied on its current stream into pinned memory, which the host does
    not wait for (and the allocator of which may take up to twice as much).
    """

    def __init__(self) -> None:
        self._kinds: dict[str, tuple[torch.Size, torch.dtype]] = {}
        self._room: dict[str, Tensor] = {}

    def make_room(
        self, tensors: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], torch.device | None]:
        """Take the memory that a copy needs, unless it is there; what is to be copied of each
        tensor, and the device that some of it lies on.
        """
        here = {name: local_tensor(tensor) for name, tensor in tensors.items()}
        device = _device(here)
        kinds = {name: (tensor.shape, tensor.dtype) for name, tensor in here.items()}
        if kinds != self._kinds:
            self._room = {}  # the old one goes before the new one comes
            self._room, self._kinds = _room(kinds, pinned=device is not None), kinds
        return here, device

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Tensor]) -> Staged:
        here, device = self.make_room(tensors)
        began = _mark(device)
        for name, tensor in here.items():
            self._room[name].copy_(tensor, non_blocking=True)
        return Staged(
            {name: shard_like(tensor, self._room[name]) for name, tensor in tensors.items()},
            began,
            _mark(device),
        )


def unstaged(tensors: dict[str, Tensor]) -> Staged:
    """The tensors themselves, for one who does not change them meanwhile."""
    ended = _mark(_device({name: local_tensor(tensor) for name, tensor in tensors.items()}))
    return Staged(tensors, ended, ended)


def _device(tensors: Mapping[str, Tensor]) -> torch.device | None:
    return next((tensor.device for tensor in tensors.values() if tensor.device.type != "cpu"), None)


def _mark(device: torch.device | None) -> torch.Event | None:
    """When a device comes to this point of its work; None where the host does all of it."""
    if device is None:
        return None
    event = torch.Event(device, enable_timing=True)
    event.record(torch.accelerator.current_stream(device))
    return event


def _room(
    kinds: Mapping[str, tuple[torch.Size, torch.dtype]], *, pinned: bool
) -> dict[str, Tensor]:
    """A tensor of each kind, all in one block of memory. Each has a storage of its own size: torch
    would write a larger one from a copy of it.
    """
    places, total = {}, 0
    for name, (shape, dtype) in kinds.items():
        places[name] = total
        total += -(-shape.numel() * dtype.itemsize // ALIGNED_BYTES) * ALIGNED_BYTES
    # The system gives memory when it is first written to, which takes longer than the copy.
    block = torch.empty(total, dtype=torch.uint8, pin_memory=pinned).zero_().numpy()
    return {
        name: (
            torch.frombuffer(block, dtype=dtype, count=shape.numel(), offset=places[name]).view(
                shape
            )
            if shape.numel()
            else torch.empty(shape, dtype=dtype)
        )
        for name, (shape, dtype) in kinds.items()
    }
