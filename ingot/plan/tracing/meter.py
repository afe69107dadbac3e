"""Records what a piece of torch code allocates, frees, computes and communicates, one operator
after the other, without the contents of any tensor.

Memory is recorded as a sequence of changes, block by block. The peak and what it consists of are
found afterwards, when it is known what became of each block.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ingot.plan.tracing.records import ROLES, MemoryUse, Operator, Role

Phase = Literal["build", "forward", "update", "backward"]
ALLOCATION_BYTES = 512
"""The allocator of an accelerator hands out multiples of this."""
COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
"""Namespaces of torch's collective operators."""
SLOWER = {
    "_safe_softmax": "softmax",
    **dict.fromkeys(("bernoulli", "bernoulli_", "native_dropout", "uniform_"), "random"),
    **dict.fromkeys(
        (
            "_softmax",
            "_log_softmax",
            "gelu",
            "gelu_backward",
            "silu",
            "silu_backward",
            "tanh",
            "sigmoid",
            "exp",
        ),
        "special",
    ),
}
"""Kernels that are bound by memory on an accelerator, but compute much for each byte on a CPU."""


class Meter(TorchDispatchMode):
    """Records everything that happens while it is active. Enter it inside the fake mode.

    Args:
        rounded: count blocks as an accelerator's allocator does, in multiples of 512 bytes.
    """

    def __init__(self, *, rounded: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: Counter[Operator] = Counter()
        self.phase: Phase = "build"
        """The phase of what happens from now on; backward is recognised without being told."""
        self.is_paused = False
        """Whether what happens now is ignored."""
        self._rounded = rounded
        self._made_in: list[Phase] = []
        self._freed_in: dict[int, Phase] = {}
        self._roles: dict[int, Role] = {}
        self._sizes: list[int] = []
        self._changes: list[tuple[int, int]] = []
        self._phases: list[Phase] = []
        self._alive: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._resize: Callable[..., Any] = torch.UntypedStorage.resize_

    def __enter__(self) -> Meter:
        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = self._resize(storage, size)
            self._resized(storage)
            return result

        # Not an operator: modes do not see it.
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(kind, Tensor) and hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # the operators on its parts are seen one by one
        result = func(*args, **(kwargs or {}))
        if self.is_paused:
            return result
        seen = len(self._sizes)
        for output in tree_leaves(result):
            if isinstance(output, Tensor):
                self._see(output)
        is_view = (
            len(self._sizes) == seen
            and not func._schema.is_mutable
            and func.namespace not in COLLECTIVES  # which do not say what they write
        )
        if not is_view:
            self.operators[describe(func, args, kwargs or {}, result)] += 1
        return result

    @property
    def now(self) -> int:
        """The number of changes so far: a moment in the sequence."""
        return len(self._changes)

    def assign(self, role: Role, tensors: Iterable[Tensor | None]) -> None:
        """Tell what these tensors hold; what is known already stays."""
        for tensor in tensors:
            for part in _parts(tensor):
                self._roles.setdefault(self._see(part), role)

    def peaks(self, stretches: Sequence[tuple[int, int]]) -> list[MemoryUse]:
        """The highest use in each stretch between two moments, in order, and what it consisted
        of.
        """
        held: dict[Role, int] = dict.fromkeys(ROLES, 0)
        total = at = 0
        found = []
        for first, last in stretches:
            best, most = dict(held), -1
            while at < last:
                number, change = self._changes[at]
                held[self._role(number)] += change
                total, at = total + change, at + 1
                if at >= first and total > most:
                    best, most = dict(held), total
            found.append(MemoryUse(best))
        return found

    def windows(self, first: int) -> list[tuple[int, int]]:
        """The stretches of one phase each from a moment on; backward passes are two stretches,
        since their highest use is at the beginning or at the end.
        """
        found = []
        while first < self.now:
            phase = self._phases[first]
            last = first + 1
            while last < self.now and self._phases[last] == phase:
                last += 1
            middle = (first + last) // 2
            if phase == "backward" and middle > first:
                found.append((first, middle))
                first = middle
            found.append((first, last))
            first = last
        return found

    def _role(self, number: int) -> Role:
        kept = self._made_in[number] == "forward" and self._freed_in.get(number) == "backward"
        return self._roles.get(number, "activations" if kept else "temporary")

    def _see(self, tensor: Tensor) -> int:
        """The number of the block that a tensor lies in; a new one if it was not seen before."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._alive:
            self._alive[key] = (
                weakref.ref(storage, functools.partial(self._free, key)),
                len(self._sizes),
            )
            self._made_in.append(self._current_phase())
            self._sizes.append(0)
            held = 0 if tensor.device.type == "meta" else storage.nbytes()
            self._change(len(self._sizes) - 1, held)
        return self._alive[key][1]

    def _free(self, key: int, _: object) -> None:
        _, number = self._alive.pop(key)
        self._freed_in[number] = self._current_phase()
        self._change(number, 0)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._alive:
            number = self._alive[storage._cdata][1]
            # Only sharding resizes: it gathers weights into a storage and lets them go again.
            self._roles.setdefault(number, "gathered")
            self._change(number, storage.nbytes())

    def _change(self, number: int, size: int) -> None:
        if self._rounded:
            size = -(-size // ALLOCATION_BYTES) * ALLOCATION_BYTES
        change = size - self._sizes[number]
        if change:
            self._sizes[number] = size
            self._changes.append((number, change))
            self._phases.append(self._current_phase())

    def _current_phase(self) -> Phase:
        return "backward" if torch._C._current_autograd_node() is not None else self.phase


def _parts(tensor: Tensor | None) -> Iterator[Tensor]:
    """The plain tensors that a tensor consists of."""
    if tensor is None:
        return
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    for inner in (getattr(tensor, name) for name in flatten()[0]):
        if isinstance(inner, Tensor):  # not the mesh
            yield from _parts(inner)


def describe(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> Operator:
    """What a call of an operator of torch was, as far as its time depends on it."""
    packet = func._overloadpacket
    inputs = [one for one in tree_leaves((args, dict(kwargs))) if isinstance(one, Tensor)]
    outputs = [one for one in tree_leaves(result) if isinstance(one, Tensor)]
    largest = max((*inputs, *outputs), key=_bytes, default=None)
    dtype = _name(largest)
    if func.namespace in COLLECTIVES:
        size = 0 if largest is None else _bytes(largest)
        return Operator(packet.__name__, dtype, 0, size, _group(args))
    moved = sum(map(_bytes, inputs)) + sum(map(_bytes, outputs))
    if "attention" in packet.__name__:
        flops = _attention_flops(packet.__name__, inputs)
        whole = _argument(func, args, kwargs, "is_causal") is False
        return Operator("attention", dtype, flops * (2 if whole else 1), moved)
    if packet in flop_registry:
        flops = flop_registry[packet](*args, **kwargs, out_val=result)
        return Operator("matmul", _name(inputs[-1]), flops, moved)
    return Operator(SLOWER.get(packet.__name__, "memory"), dtype, 0, moved)


def _argument(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str) -> Any:
    """The value with which an operator was called; None if it has no such argument."""
    for place, one in enumerate(func._schema.arguments):
        if one.name == name:
            given = args[place] if place < len(args) else one.default_value
            return kwargs.get(name, given)
    return None


def _name(tensor: Tensor | None) -> str:
    return "float32" if tensor is None else str(tensor.dtype).removeprefix("torch.")


def _bytes(tensor: Tensor) -> int:
    return int(tensor.numel() * tensor.element_size())


def _attention_flops(name: str, inputs: list[Tensor]) -> float:
    """Of causal attention, which computes half of the square: two products forward, five backward
    (Dao 2023, section 3.3).
    """
    backward = "backward" in name
    # The gradient of the output comes first in backward.
    q, k = inputs[1:3] if backward else inputs[:2]
    batch, heads, length, size = q.shape
    return (5 if backward else 2) * batch * heads * length * k.shape[2] * size


@functools.cache
def group_layout(group: dist.ProcessGroup) -> tuple[int, int]:
    """Size of a process group, and the distance between the numbers of its ranks."""
    ranks = dist.get_process_group_ranks(group)
    return len(ranks), ranks[1] - ranks[0] if len(ranks) > 1 else 1


def _group(args: tuple[Any, ...]) -> tuple[int, int]:
    """Size of the group of a collective, and the distance between the numbers of its ranks."""
    for one in args:
        if isinstance(one, torch.ScriptObject) and "ProcessGroup" in str(one._type()):
            return group_layout(dist.ProcessGroup.unbox(one))
    name = next((one for one in reversed(args) if isinstance(one, str)), None)
    return (1, 1) if name is None else group_layout(_resolve(name))


def _resolve(name: str) -> dist.ProcessGroup:
    return torch._C._distributed_c10d._resolve_process_group(cast("Any", name))
