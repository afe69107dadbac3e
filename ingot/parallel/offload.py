"""Activation offload: what a layer saves for backward is copied to host memory as it is saved, and
prefetched one layer ahead of its use in backward.

Copies run on a stream of their own through pinned memory; on a CPU they are plain copies, so that
the same code runs there. Weights stay on the device, and so do inputs that need no gradient: all
layers share them.
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
"""Smaller tensors stay on the device: copying costs more than it saves."""


def offload_activations(model: nn.Module) -> None:
    """Make the layers of a model, or of a pipeline stage, keep what they save for backward in host
    memory, in place. Results are bit-identical.

    The class of each layer is replaced by a subclass that overrides `__call__`, so that offload
    stays outside the compiled region and FSDP's hooks.
    """
    copy_stream, made = CopyStream(), dict[type, type]()
    for stack in stacks(model):
        for layer in stack:
            kind = type(layer)
            layer.__class__ = made.setdefault(kind, _offloading(kind, copy_stream))


def _offloading(kind: type, copy_stream: CopyStream) -> type:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return kind.__call__(self, *args, **kwargs)
        with LayerOffload(self, copy_stream).saving(
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
    """The stream for copies to and from the host, and the layer call that used it last."""

    def __init__(self) -> None:
        self._stream: torch.Stream | None = None
        self.last: weakref.ref[LayerOffload] | None = None

    @contextlib.contextmanager
    def overlapping(self, device: torch.device) -> Iterator[torch.Stream | None]:
        """Run copies on the stream, ordered after the work issued so far and concurrent with later
        work; yields None on a CPU, where copies are synchronous.
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
    """One saved tensor in host memory."""

    def __init__(self, tensor: Tensor, copy_stream: CopyStream) -> None:
        self.device = tensor.device
        self.on_host = torch.empty_like(
            tensor, device="cpu", pin_memory=tensor.device.type != "cpu"
        )
        with copy_stream.overlapping(tensor.device) as stream:
            self.on_host.copy_(tensor, non_blocking=True)
            if stream is not None:
                tensor.record_stream(stream)


class LayerOffload:
    """The tensors that one call of a layer saved for backward, in host memory."""

    def __init__(self, layer: nn.Module, copy_stream: CopyStream) -> None:
        self._layer = layer
        self._copy_stream = copy_stream
        self._previous = copy_stream.last
        copy_stream.last = weakref.ref(self)
        self._loads: list[OffloadedTensor] = []
        self._restored: dict[int, Tensor] = {}
        self._restored_event: torch.Event | None = None
        self._stays_on_device: set[int] | None = None
        self._saved_index: dict[Any, tuple[Tensor, int]] = {}
        """Index of each tensor saved before in this call. The tensors are held, so that their
        memory is not reused meanwhile.
        """

    @contextlib.contextmanager
    def saving(self, given: list[Tensor]) -> Iterator[None]:
        """Active while the layer is called; the tensors in `given` stay on the device."""
        self._given = [_memory(tensor) for tensor in given]
        with saved_tensors_hooks(self._pack, self._unpack):
            yield
        self._saved_index.clear()

    def _pack(self, tensor: Tensor) -> Any:
        mine = local_tensor(tensor)
        if (
            self._stays_on_device is None
        ):  # only now: before the call, weights may not have been gathered yet
            self._stays_on_device = {
                *self._given,
                *(_memory(local_tensor(parameter)) for parameter in self._layer.parameters()),
            }
        if (
            hasattr(mine, "__tensor_flatten__")  # of several tensors
            or mine.nbytes < SMALL_BYTES
            or _memory(mine) in self._stays_on_device
        ):
            return tensor
        flat = mine.detach().view(-1) if mine.is_contiguous() else mine.detach()
        key = (_memory(flat), flat.storage_offset(), flat.shape, flat.stride(), flat.dtype)
        if key not in self._saved_index:
            self._saved_index[key] = flat, len(self._loads)
            self._loads.append(OffloadedTensor(flat, self._copy_stream))
        like = shard_like(tensor, mine.detach().to("meta")) if is_dtensor(tensor) else None
        return self._saved_index[key][1], mine.shape, like

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        number, shape, like = packed
        self.fetch()
        before = self._previous() if self._previous is not None else None
        if before is not None:
            before.fetch()
        if self._restored_event is not None:
            current = torch.accelerator.current_stream()
            current.wait_event(self._restored_event)
            self._restored[number].record_stream(current)
        mine = (
            self._restored[number].view(shape)
            if self._restored[number].ndim == 1
            else self._restored[number]
        )
        return mine if like is None else shard_like(like, mine)

    def fetch(self) -> None:
        """Start copying everything back to the device, once."""
        if self._restored or not self._loads:
            return
        with self._copy_stream.overlapping(self._loads[0].device) as stream:
            for number, load in enumerate(self._loads):
                self._restored[number] = torch.empty_like(load.on_host, device=load.device).copy_(
                    load.on_host, non_blocking=True
                )
            self._restored_event = None if stream is None else stream.record_event()


def _memory(tensor: Tensor) -> int:
    """What tells storages apart that are held; unlike their addresses, also where tensors have no
    contents.
    """
    return int(tensor.untyped_storage()._cdata)
