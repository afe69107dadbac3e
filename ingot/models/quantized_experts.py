"""The stacked matrices of a mixture's experts in few bits, each expert's quantised by itself: a
product turns one after the other back into numbers, and never holds a stack as a whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ingot.base.errors import WrongInput
from ingot.models.native.experts import Experts
from ingot.models.parameters import fill_normal, local_tensor, shard_slices
from ingot.models.quantized import Quantization

STACKS = ("gate_up_proj", "down_proj")


class _StackProduct(torch.autograd.Function):
    """The rows of each expert times its matrix, which is made anew for backward."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, data: Tensor, sizes: list[int], stack: ExpertMatrices
    ) -> Tensor:
        kind = rows.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else rows.dtype
        ctx.stack, ctx.sizes, ctx.dtypes = stack, sizes, (rows.dtype, dtype)
        ctx.save_for_backward(data)
        made = rows.new_empty(len(rows), stack.rows, dtype=dtype)
        parts = zip(rows.to(dtype).split(sizes), made.split(sizes), strict=True)
        for number, (part, place) in enumerate(parts):
            if len(part):
                place.copy_(part @ stack.unpacked(number, dtype, data).T)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (data,), (wanted, dtype) = ctx.saved_tensors, ctx.dtypes
        found = gradient.new_empty(len(gradient), ctx.stack.columns, dtype=wanted)
        parts = zip(gradient.split(ctx.sizes), found.split(ctx.sizes), strict=True)
        for number, (part, place) in enumerate(parts):
            if len(part):
                place.copy_(part @ ctx.stack.unpacked(number, dtype, data))
        return found, None, None, None


class ExpertMatrices(nn.Module):
    """The frozen matrices `[N, O, D]` of N experts as bytes `[N, bytes]`."""

    def __init__(
        self, shape: tuple[int, int, int], quantization: Quantization, device: torch.device
    ) -> None:
        super().__init__()
        self.count, self.rows, self.columns = shape
        self.quantization = quantization
        self._bytes = quantization.bytes_of(self.rows, self.columns)
        # Filled up, since the bytes of each expert begin with floats, which have to be aligned.
        width = self._bytes + -self._bytes % torch.float32.itemsize
        self.packed = nn.Parameter(
            torch.empty(self.count, width, dtype=torch.uint8, device=device), requires_grad=False
        )

    @property
    def held(self) -> range:
        """The experts whose bytes this rank keeps."""
        experts = shard_slices(self.packed)[0]
        return range(experts.start, experts.stop)

    @torch.no_grad()
    def fill(self, expert: int, weight: Tensor, name: str) -> None:
        """Quantise the matrix `[O, D]` of one expert, if this rank keeps it. Raises WrongInput,
        with the `name` of the stack, if a weight is not finite.
        """
        if expert not in self.held:
            return
        try:
            data = self.quantization.pack(weight)
        except ValueError as error:
            raise WrongInput(
                f"model.quantize {self.quantization.kind}: {name}, expert {expert}, cannot be"
                f" quantised, {error}; fetch the model again"
            ) from None
        data = functional.pad(data, (0, self.packed.shape[1] - self._bytes))
        share = shard_slices(self.packed)[1]
        local_tensor(self.packed)[expert - self.held.start].copy_(data[share])

    def unpacked(self, expert: int, dtype: torch.dtype, data: Tensor | None = None) -> Tensor:
        """The matrix of one expert in `dtype`; `data` are the bytes of all, if they are at hand."""
        data = self.packed.detach() if data is None else data
        own = data[expert, : self._bytes]
        return self.quantization.unpack(own, self.rows, self.columns, dtype)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """As `ingot.models.native.experts.grouped_product`."""
        sizes = self.sizes(counts, len(rows))
        out: Tensor = _StackProduct.apply(rows, self.packed, sizes, self)  # type: ignore[no-untyped-call]
        return out

    def sizes(self, counts: Tensor, rows: int) -> list[int]:
        """How many of the `rows` each expert has, on the host."""
        found: list[int] = counts.tolist()
        assert sum(found) == rows, f"{rows} rows, but their experts' counts add up to {sum(found)}"
        return found


class PackedExperts(Experts):
    """Experts whose matrices are kept as bytes; made of a layer's by `quantize_experts`."""

    @property
    def launches_alike(self) -> bool:
        return False

    def _grouped(self, rows: Tensor, weights: Any, counts: Tensor) -> Tensor:
        out: Tensor = weights(rows, counts)
        return out


def quantize_experts(experts: Experts, quantization: Quantization, name: str) -> None:
    """Turn the experts of a layer in place into ones whose matrices are bytes; quantised unless
    they are on `meta` and come later.
    """
    for leaf in STACKS:
        weight = getattr(experts, leaf)
        count, rows, columns = weight.shape
        stack = ExpertMatrices((count, rows, columns), quantization, weight.device)
        if not weight.is_meta:
            for number in range(count):
                stack.fill(number, weight[number], f"{name}.{leaf}")
        delattr(experts, leaf)
        setattr(experts, leaf, stack)
    experts.__class__ = PackedExperts


def packed_stacks(model: nn.Module) -> dict[str, ExpertMatrices]:
    """The stacks kept as bytes, by the names that they have in our models."""
    return {name: one for name, one in model.named_modules() if isinstance(one, ExpertMatrices)}


def init_stacks(model: nn.Module, seed: int, std: float) -> None:
    """Fill every stack with what `init_weights` would draw for it, one expert at a time."""
    for name, stack in packed_stacks(model).items():
        for number in stack.held:
            weight = torch.empty(stack.rows, stack.columns)
            fill_normal(weight, seed, f"{name}.{number}", std)
            stack.fill(number, weight, name)


class StackReader:
    """Collects the matrices of experts, which files hold in parts, and quantises each once it is
    complete.
    """

    def __init__(self, stacks: dict[str, ExpertMatrices]) -> None:
        self._stacks = stacks
        self._waiting: dict[tuple[str, int], tuple[Tensor, int]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._stacks

    def held(self, name: str) -> range:
        return self._stacks[name].held

    def take(self, name: str, expert: int, first: int, part: Tensor) -> None:
        """The rows of an expert's matrix from `first` on, `[R, D]`."""
        stack = self._stacks[name]
        if (name, expert) not in self._waiting:
            self._waiting[name, expert] = torch.empty(stack.rows, stack.columns), stack.rows
        whole, missing = self._waiting.pop((name, expert))
        whole[first : first + len(part)] = part
        if missing > len(part):
            self._waiting[name, expert] = whole, missing - len(part)
        else:
            stack.fill(expert, whole, name)
