"""What backward needs of a layer waits in the host's memory: it goes out as it is made, and comes
back a layer ahead of its use.

Copies run on a stream of their own beside the computation, through pinned memory. On a CPU they are
plain copies, so that all else of this
runs there as well. Weights stay, and so does what a layer was given that needs no gradient: all
layers share it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from ingot.models.parameters import is_dtensor, local_tensor, shard_like
from ingot.parallel.shard import stacks

SMALL_BYTES = 2**12
"""Tensors below this stay: a copy would cost more than they do."""


def offload_activations(model: nn.Module) -> None:
    """Let the layers of a model, or of a stage of it, keep what they save for backward on the host,
    in place. Results stay the same, to the last bit.

    A layer's class is replaced by a subclass; around the whole call, and so outside of what is
    compiled and of what gathers weights.
    """
    road, made = CopyStream(), dict[type, type]()
    for stack in stacks(model):
        for layer in stack:
            kind = type(layer)
            layer.__class__ = made.setdefault(kind, _offloading(kind, road))


def _offloading(kind: type, road: CopyStream) -> type:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return kind.__call__(self, *args, **kwargs)
        with LayerOffload(self, road).packing(
            [
                leaf
                for leaf in tree_leaves((args, kwargs))
                if isinstance(leaf, Tensor) and not leaf.requires_grad
            ]
        ):
            return kind.__call__(self, *args, **kwargs)

    return type(
        f"Offloading{kind.__name__}", (kind,), {"__call__": call, "__module__": kind.__module__}
    )


class CopyStream:
    """The stream on which copies to and from the host run, and the layer call that used it last."""

    def __init__(self) -> None:
        self._stream: torch.Stream | None = None
        self.last: weakref.ref[LayerOffload] | None = None

    @contextlib.contextmanager
    def beside(self, device: torch.device) -> Iterator[torch.Stream | None]:
        """Copies run beside what is computed from here on, after what was computed before; None on
        a CPU, where nothing does.
        """
        if device.type == "cpu":
            yield None
            return
        if self._stream is None:
            self._stream = torch.Stream(device)
        self._stream.wait_stream(torch.accelerator.current_stream())
        with self._stream:
            yield self._stream


class OffloadedTensor:
    """One saved tensor, copied to the host."""

    def __init__(self, tensor: Tensor, road: CopyStream) -> None:
        self.device = tensor.device
        self.there = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type != "cpu")
        with road.beside(tensor.device) as stream:
            self.there.copy_(tensor, non_blocking=True)
            if stream is not None:
                tensor.record_stream(stream)


class LayerOffload:
    """The tensors that one call of a layer saved for backward, on the host."""

    def __init__(self, layer: nn.Module, road: CopyStream) -> None:
        self._layer, self._road, self._before, road.last = layer, road, road.last, weakref.ref(self)
        self._loads: list[OffloadedTensor] = []
        self._back: dict[int, Tensor] = {}
        self._arrived: torch.Event | None = None
        self._kept_here: set[int] | None = None
        self._known: dict[Any, tuple[Tensor, int]] = {}
        """Where a tensor is that was saved before in this call; tensors are held, so that their
        memory is no other's meanwhile.
        """

    @contextlib.contextmanager
    def packing(self, given: list[Tensor]) -> Iterator[None]:
        """While the layer is called; `given` stays on the device."""
        self._given = [_memory(tensor) for tensor in given]
        with saved_tensors_hooks(self._pack, self._unpack):
            yield
        self._known.clear()

    def _pack(self, tensor: Tensor) -> Any:
        mine = local_tensor(tensor)
        if (
            self._kept_here is None
        ):  # only now: before the call, weights may not have been gathered yet
            self._kept_here = {
                *self._given,
                *(_memory(local_tensor(parameter)) for parameter in self._layer.parameters()),
            }
        if (
            type(mine) not in (Tensor, nn.Parameter)
            or mine.nbytes < SMALL_BYTES
            or _memory(mine) in self._kept_here
        ):
            return tensor
        flat = mine.detach().view(-1) if mine.is_contiguous() else mine.detach()
        key = (_memory(flat), flat.storage_offset(), flat.shape, flat.stride(), flat.dtype)
        if key not in self._known:
            self._known[key] = flat, len(self._loads)
            self._loads.append(OffloadedTensor(flat, self._road))
        like = shard_like(tensor, mine.detach().to("meta")) if is_dtensor(tensor) else None
        return self._known[key][1], mine.shape, like

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        number, shape, like = packed
        self.fetch()
        before = self._before() if self._before is not None else None
        if before is not None:
            before.fetch()
        if self._arrived is not None:
            current = torch.accelerator.current_stream()
            current.wait_event(self._arrived)
            self._back[number].record_stream(current)
        mine = (
            self._back[number].view(shape) if self._back[number].ndim == 1 else self._back[number]
        )
        return mine if like is None else shard_like(like, mine)

    def fetch(self) -> None:
        """Begin to bring back all that is away, once."""
        if self._back or not self._loads:
            return
        with self._road.beside(self._loads[0].device) as stream:
            for number, load in enumerate(self._loads):
                self._back[number] = torch.empty_like(load.there, device=load.device).copy_(
                    load.there, non_blocking=True
                )
            self._arrived = None if stream is None else stream.record_event()


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
