"""Records what a piece of torch code allocates, frees, computes and communicates, one operator
after the other, without the contents of any tensor.

Memory is recorded as a sequence of changes, block by block. The peak and what it consists of are
found afterwards, when it is known what became of each block.
"""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ingot.plan.tracing.records import ROLES, SPREAD, MemoryUse, Operator, Role
from ingot.plan.tracing.segments import BLOCK, Reserved, replay

Phase = Literal["build", "forward", "update", "backward"]
COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
"""Namespaces of torch's collective operators."""
COPIED_BY_GLOO = frozenset(
    {
        "allgather_",
        "_allgather_base_",
        "allgather_into_tensor_coalesced_",
        "all_gather_into_tensor",
        "reduce_scatter_",
        "_reduce_scatter_base_",
        "reduce_scatter_tensor_coalesced_",
        "reduce_scatter_tensor",
    }
)
"""Collectives in which gloo works on a copy of the whole tensor. NCCL makes none."""
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
IN_PLACE = {
    torch.ops.aten.scatter_add.default: torch.ops.aten.scatter_add_.default,
    torch.ops.aten.scatter.value: torch.ops.aten.scatter_.value,
    torch.ops.aten.scatter.src: torch.ops.aten.scatter_.src,
    torch.ops.aten.index_add.default: torch.ops.aten.index_add_.default,
    torch.ops.aten.index_put.default: torch.ops.aten.index_put_.default,
}
"""Where any dispatch mode is active, the backward formulas of torch (`gather_backward` and others)
write into a second tensor what they otherwise write into the zeros that they made.
"""
GROUPED = torch.ops.aten._grouped_mm.default
"""Products of groups of rows, each with a matrix of its own: those of a mixture of experts."""


class Meter(TorchDispatchMode):
    """Records everything that happens while it is active. Enter it inside the fake mode.

    Args:
        rounded: count blocks as an accelerator's allocator does, in multiples of 512 bytes.
        gloo: count the copies that gloo makes for a collective, as on CPUs.
    """

    def __init__(self, *, rounded: bool = False, gloo: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: Counter[Operator] = Counter()
        self.phase: Phase = "build"
        """The phase of what happens from now on; backward is recognised without being told."""
        self.is_paused = False
        """Whether what happens now is ignored."""
        self._rounded = rounded
        self._gloo = gloo
        self._made_in: list[Phase] = []
        self._freed_in: dict[int, Phase] = {}
        self._roles: dict[int, Role] = {}
        self._sizes: list[int] = []
        self._changes: list[tuple[int, int]] = []
        self._phases: list[Phase] = []
        self._alive: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._resize: Callable[..., Any] = torch.UntypedStorage.resize_
        self._sum: tuple[int, int] | None = None
        """The storages of the first operand and of the result, if the last operator was a sum of
        two gradients in autograd.
        """

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
            self.count(SPREAD)
            return NotImplemented  # the operators on its parts are seen one by one
        if func in IN_PLACE and self._current_phase() == "backward":
            func = IN_PLACE[func]
        if func is GROUPED:
            offsets = _argument(func, args, kwargs or {}, "offs")
            result = _grouped_product(args[0], args[1], offsets)
        else:
            result = func(*args, **(kwargs or {}))
        if self.is_paused:
            return result
        seen = len(self._sizes)
        for output in tree_leaves(result):
            if isinstance(output, Tensor):
                self._see(output)
        if self._gloo and func.namespace in COLLECTIVES:
            self._count_copy(func, args, result)
        self._sum = None
        if func is torch.ops.aten.add.Tensor and _is_called_by_autograd(sys._getframe(1)):
            self._sum = _storage(args[0]), _storage(result)
        is_view = (
            len(self._sizes) == seen
            and not func._schema.is_mutable
            and func.namespace not in COLLECTIVES  # which do not say what they write
        )
        if not is_view:
            self.operators[describe(func, args, kwargs or {}, result)] += 1
        return result

    def count(self, operator: Operator) -> None:
        """Note work that is no kernel."""
        self.operators[operator] += not self.is_paused

    @property
    def now(self) -> int:
        """The number of changes so far: a moment in the sequence."""
        return len(self._changes)

    def phase_after(self, moment: int) -> Phase:
        return self._phases[moment]

    def assign(self, role: Role, tensors: Iterable[Tensor | None]) -> None:
        """Tell what these tensors hold; what is known already stays."""
        for tensor in tensors:
            for part in _parts(tensor):
                self._roles.setdefault(self._see(part), role)

    def move_to_host(self, tensors: Iterable[Tensor | None]) -> None:
        """Tell that these tensors take no memory of the device from now on."""
        for tensor in tensors:
            for part in _parts(tensor):
                self._change(self._see(part), 0)

    def peaks(self, stretches: Sequence[tuple[int, int]]) -> list[MemoryUse]:
        """The highest use in each stretch between two moments, and what it consisted of."""
        totals = [0, *itertools.accumulate(change for _, change in self._changes)]
        highest = [max(range(first, last + 1), key=totals.__getitem__) for first, last in stretches]
        held: dict[Role, int] = dict.fromkeys(ROLES, 0)
        uses, at = {}, 0
        for moment in sorted(set(highest)):
            for number, change in self._changes[at:moment]:
                held[self._role(number)] += change
            uses[moment], at = MemoryUse(dict(held)), moment
        return [uses[moment] for moment in highest]

    def reserved(self) -> Reserved:
        """What torch's allocator of CUDA reserves for everything so far."""
        return replay(self._changes)

    def windows(self, first: int, lengths: Sequence[int] = ()) -> list[tuple[int, int]]:
        """The stretches of one phase each from a moment on; backward passes are two stretches that
        overlap, since their highest use is at the beginning or at the end.

        Args:
            lengths: of these stretches in a trace of the same model with fewer layers. Those of
                backward passes become as long, and thus lie in the same layers from its ends.
        """
        found: list[tuple[int, int]] = []
        while first < self.now:
            phase = self._phases[first]
            last = first + 1
            while last < self.now and self._phases[last] == phase:
                last += 1
            if phase == "backward":
                part = -((first - last) * 3 // 5)
                if len(found) < len(lengths):
                    part = min(lengths[len(found)], last - first)
                found += [(first, first + part), (last - part, last)]
            else:
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
            number = self._new_block()
            self._alive[key] = weakref.ref(storage, functools.partial(self._free, key)), number
            self._change(number, 0 if tensor.device.type == "meta" else storage.nbytes())
        return self._alive[key][1]

    def _new_block(self) -> int:
        self._made_in.append(self._current_phase())
        self._sizes.append(0)
        return len(self._sizes) - 1

    def _count_copy(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Count the copy that gloo makes of the larger side of a collective, inputs or outputs."""
        if func._overloadpacket.__name__ in COPIED_BY_GLOO:
            sides = (*args[:2], result)
            sizes = (
                sum(_bytes(one) for one in tree_leaves(side) if isinstance(one, Tensor))
                for side in sides
            )
            number = self._new_block()
            self._change(number, max(sizes))
            self._freed_in[number] = self._current_phase()
            self._change(number, 0)

    def _free(self, key: int, _: object) -> None:
        if self._sum is not None and self._sum[0] == key and self._takes_over(*self._sum):
            return
        _, number = self._alive.pop(key)
        self._freed_in[number] = self._current_phase()
        self._change(number, 0)

    def _takes_over(self, first: int, result: int) -> bool:
        """Whether a sum is written into its first operand, which nobody holds any more: so it is
        where no mode is active. The result's block is then that of the operand.
        """
        held, (ref, made) = self._alive[first][1], self._alive[result]
        if self._sizes[made] != self._sizes[held] or self._changes[-1][0] != made:
            return False
        self._changes.pop()
        self._phases.pop()
        del self._alive[first]
        self._alive[result] = (ref, held)
        return True

    def _resized(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._alive:
            number = self._alive[storage._cdata][1]
            # Only sharding resizes: it gathers weights into a storage and lets them go again.
            self._roles.setdefault(number, "gathered")
            self._change(number, storage.nbytes())

    def _change(self, number: int, size: int) -> None:
        if self._rounded:
            size = -(-size // BLOCK) * BLOCK
        change = size - self._sizes[number]
        if change:
            self._sizes[number] = size
            self._changes.append((number, change))
            self._phases.append(self._current_phase())

    def _current_phase(self) -> Phase:
        return "backward" if torch._C._current_autograd_node() is not None else self.phase


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is_called_by_autograd(frame: FrameType | None) -> bool:
    """Whether torch's engine called an operator itself, not Python code in a backward pass."""
    while frame is not None and frame.f_code.co_name in ("_fn", "inner"):  # torch's decorators
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "_engine_run_backward"


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
    if func is GROUPED:
        # Each row of the first operand meets one matrix of the second; of a gradient of weights,
        # each column of it one row.
        flops = 2.0 * args[0].numel() * args[1].shape[-1]
        return Operator("matmul", _name(args[1]), flops, moved)
    if packet in flop_registry:
        flops = flop_registry[packet](*args, **kwargs, out_val=result)
        # What is added comes before the factors, scales of a product in float8 come after them.
        factor = inputs[0] if packet is torch.ops.aten._scaled_mm else inputs[-1]
        return Operator("matmul", _name(factor), flops, moved)
    return Operator(SLOWER.get(packet.__name__, "memory"), dtype, 0, moved)


def _grouped_product(first: Tensor, second: Tensor, offsets: Tensor) -> Tensor:
    """A grouped product without contents: of rows `[S, A]` with matrices `[N, A, B]`, or of N
    groups of columns of `[A, S]` with those of rows of `[S, B]`. torch's own refuses float32,
    though its kernels take it.
    """
    outer = first.shape[:1] if second.dim() == 3 else (len(offsets), first.shape[0])
    return first.new_empty(*outer, second.shape[-1])


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
    if name is None:
        return 1, 1
    return group_layout(torch._C._distributed_c10d._resolve_process_group(cast("Any", name)))
